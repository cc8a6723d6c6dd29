"""From a configured name and options to a function of a row that returns a finite score or raises."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridrl.errors import ConfigError, unknown
from hybridrl.importing import imported
from hybridrl.rewards.functions import REWARDS, extractor

MAX_SCORE = 1e30
"""Rewards are float32, and weights multiply scores: larger ones would become infinite."""

INPUTS = ("response", "answer", "prompt", "task")


@dataclass(frozen=True, slots=True)
class BoundReward:
    """A reward function with its options. `inputs` are the columns of a row that it takes."""

    name: str
    function: Callable[..., Any]
    options: dict[str, Any]
    inputs: tuple[str, ...]

    def __call__(self, row: dict[str, Any]) -> float:
        """The score of a row. Raises what the function raises, and TypeError or ValueError for no finite number."""
        score = self.function(**{name: row[name] for name in self.inputs}, **self.options)
        if not hasattr(type(score), "__float__"):
            raise TypeError(f"returned {str(score)[:80]!r} ({type(score).__name__}), must be a number")
        value = float(score)
        if not abs(value) <= MAX_SCORE:  # false for NaN, too
            raise ValueError(f"returned {value}, must be finite and at most {MAX_SCORE:g} in size")
        return value


def bind(name: str, options: dict[str, Any]) -> BoundReward:
    """The reward function that `name` names, with `options`.

    Raises ConfigError: no such function, an import that fails, options or parameters that don't fit.
    """
    function = REWARDS[name] if name in REWARDS else _imported(name)
    inputs = _inputs(function, name, options)
    if name == "reasoning_gym":
        extractor(options.get("extract", "none"))
    return BoundReward(name, function, options, inputs)


def _imported(path: str) -> Callable[..., Any]:
    function = imported(path, "reward.functions", "reward function", REWARDS, inspect.isfunction)
    if not callable(function):
        raise ConfigError(f"reward.functions: {path!r} must be a function, got {type(function).__name__}.")
    return function


def _inputs(function: Callable[..., Any], name: str, options: dict[str, Any]) -> tuple[str, ...]:
    """The columns that `function` takes by keyword; ConfigError unless these and `options` are all that it needs."""
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    own = named.difference(INPUTS)
    for option in options:
        if option in INPUTS or not (takes_any or option in own):
            raise ConfigError("reward.functions: " + unknown(f"option of reward function {name!r}", option, own))
    for p in parameters:
        filled = p.name in named and (p.name in INPUTS or p.name in options)
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and not filled:
            raise ConfigError(f"reward.functions: {name!r} needs {p.name!r}, which is neither in its options nor one "
                              f"of {', '.join(INPUTS)} (given by keyword).")
    return tuple(i for i in INPUTS if takes_any or i in named)
