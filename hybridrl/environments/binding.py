"""From a configured name and options to an environment class that accepts them."""

import inspect
import types
import typing
from dataclasses import dataclass
from typing import Any

from hybridrl.environments.environment import AsyncEnvironment, Environment
from hybridrl.errors import ConfigError, unknown
from hybridrl.importing import imported

ENVIRONMENTS: dict[str, str] = {
    "agent": "hybridrl.environments.agent:AgentEnvironment",
    "guess": "hybridrl.environments.guess:GuessNumber",
    "gymnasium": "hybridrl.environments.adapters.gymnasium:Gymnasium",
    "openenv": "hybridrl.environments.adapters.openenv:OpenEnv",
    "reasoning_gym": "hybridrl.environments.adapters.reasoning_gym:ReasoningGym",
    "textarena": "hybridrl.environments.adapters.textarena:TextArena",
    "tools": "hybridrl.environments.tools:ToolEnvironment",
    "verifier": "hybridrl.environments.verifier:Verifier",
    "verifiers": "hybridrl.environments.adapters.verifiers:Verifiers",
}
"""Environments by name: where each is. Any other goes by its own import path, `package.module:Class`."""

KEY = "environment"


@dataclass(frozen=True, slots=True)
class BoundEnvironment:
    """An environment class with the options of its constructor."""

    cls: type[Environment]
    options: dict[str, Any]

    @property
    def is_async(self) -> bool:
        """Whether its methods are coroutines."""
        return issubclass(self.cls, AsyncEnvironment)

    def build(self) -> Environment:
        """A new environment. Raises whatever its constructor raises."""
        return self.cls(**self.options)


def bind(name: str, options: dict[str, Any]) -> BoundEnvironment:
    """The environment that `name` names, with `options`. Nothing is built yet.

    Raises ConfigError: no such environment, an import that fails, options that the constructor doesn't take, lacks, or
    annotates with another type.
    """
    cls = _imported(name)
    _check_options(cls, name, options)
    check = getattr(cls, "check_options", None)
    if check is not None:
        check(**options)
    return BoundEnvironment(cls, dict(options))


def _imported(name: str) -> type[Environment]:
    path = ENVIRONMENTS.get(name, name)
    cls = imported(path, f"{KEY}.name", "environment", ENVIRONMENTS, _is_environment)
    if not _is_environment(cls):
        hint = "" if isinstance(cls, type) or not callable(cls) else (
            f" A program that calls the policy is {KEY}.name=agent with {KEY}.options.function={path}.")
        raise ConfigError(f"{KEY}.name: {path!r} must be a subclass of hybridrl.environments.Environment, got {cls!r}."
                          + hint)
    return cls


def _is_environment(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Environment) and value not in (Environment, AsyncEnvironment)


def _check_options(cls: type[Environment], name: str, options: dict[str, Any]) -> None:
    parameters = inspect.signature(cls).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    hints = typing.get_type_hints(cls.__init__)
    for option, value in options.items():
        if option not in named and not takes_any:
            raise ConfigError(f"{KEY}.options: " + unknown(f"option of environment {name!r}", option, named))
        if not _fits(value, hints.get(option, Any)):
            raise ConfigError(f"{KEY}.options.{option} of environment {name!r} must be "
                              f"{_name(hints[option])}, got {value!r}.")
    for p in named.values():
        if p.default is p.empty and p.name not in options:
            raise ConfigError(f"{KEY}.options: environment {name!r} needs {p.name!r}.")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of a configuration has an annotated type; containers are not looked into."""
    if hint is Any:
        return True
    origin = typing.get_origin(hint) or hint
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is None:
        return value is None
    return isinstance(value, origin) if isinstance(origin, type) else True


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
