"""Gymnasium environments that are played in text: actions are Discrete or Text. Source: Towers et al.,
arXiv:2407.17032."""

import json
import re
from collections.abc import Mapping
from typing import Any

from hybridrl.environments.environment import Environment, Step, Task
from hybridrl.errors import ConfigError, extra
from hybridrl.importing import imported

KEY = "environment.options"
_COLOURED = re.compile(r"\x1b\[(\d+)(?:;1)?m(.*?)\x1b\[0m", re.DOTALL)
_COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


class Gymnasium(Environment):
    """Plays `gymnasium.make(id)`; its rewards are those of the turns.

    A Discrete action is the last of its names or numbers that a response has as a word of its own; a Text action is
    the response, ends stripped. A response without one is answered with what is accepted, and leaves the environment
    as it is. The environment's random numbers come from the task's seed.

    Args:
        id: of a registered environment; `module:id` imports the module that registers it first.
        make: more keyword arguments of `gymnasium.make`.
        reset: `options` of each reset.
        actions: names of the Discrete actions, in order, or a mapping from names to their numbers.
        rules: text before the first observation, with `{actions}`.
        show: `render` shows the environment's own drawing in text, `observation` the observation as JSON, `auto` the
            drawing where there is one; `package.module:function` makes the text of (observation, environment).
        max_steps: steps of one episode, 0 for the environment's own limit.
        malformed_reward: reward of a response that holds no action.
    """

    def __init__(self, id: str, make: dict[str, Any] | None = None, reset: dict[str, Any] | None = None,
                 actions: list | dict[str, Any] | None = None, rules: str = "Possible answers: {actions}.",
                 show: str = "auto", max_steps: int = 0, malformed_reward: float = 0.0):
        self._environment = _made(id, make or {}, show, max_steps)
        self._drawn = self._environment.render_mode == "ansi"
        self._formatter = imported(show, f"{KEY}.show", "formatter") if ":" in show else None
        self._names = _names(self._environment.action_space, actions)
        self._reset_options, self._malformed_reward = reset, malformed_reward
        self._rules = rules.replace("{actions}", self._accepted())
        names = "|".join(map(re.escape, sorted(self._names, key=len, reverse=True)))
        self._named = re.compile(rf"(?<![\w.-])(?:{names}|-?\d+)(?![\w-]|\.\d)", re.IGNORECASE)

    @staticmethod
    def check_options(id: str, make: dict[str, Any] | None = None, actions: list | dict[str, Any] | None = None,
                      show: str = "auto", max_steps: int = 0, **_: Any) -> None:
        """Make the environment once. Raises ConfigError for what can't be played."""
        if ":" in show:
            imported(show, f"{KEY}.show", "formatter")
        environment = _made(id, make or {}, show, max_steps)
        _names(environment.action_space, actions)
        environment.close()

    def reset(self, task: Task) -> str:
        observation, _ = self._environment.reset(seed=task.seed, options=self._reset_options)
        return f"{self._rules}\n\n{self._text(observation)}".strip()

    def step(self, action: str) -> Step:
        taken = self._action(action)
        if taken is None:
            return Step(f"That is no action. Possible answers: {self._accepted()}.", self._malformed_reward,
                        info={"malformed": 1})
        observation, reward, terminated, truncated, _ = self._environment.step(taken)
        info = {"malformed": 0} | ({"truncated": int(truncated)} if terminated or truncated else {})
        return Step(self._text(observation), reward, bool(terminated or truncated), info)

    def close(self) -> None:
        self._environment.close()

    def _action(self, response: str) -> Any:
        """The action that a response names, or None."""
        space = self._environment.action_space
        if not self._names:
            return response.strip() if response.strip() in space else None
        found = self._named.findall(response)
        if not found:
            return None
        name = found[-1].lower()
        number = self._names[name] if name in self._names else int(name[:20])  # no action has so many digits
        return number if number in self._names.values() else None

    def _accepted(self) -> str:
        if self._names:
            return ", ".join(self._names)
        space = self._environment.action_space
        return f"texts of {space.min_length} to {space.max_length} of the characters {space.characters!r}"

    def _text(self, observation: Any) -> str:
        if self._formatter is not None:
            return self._formatter(observation, self._environment.unwrapped)
        if self._drawn:
            return _COLOURED.sub(_uncoloured, self._environment.render()).strip("\n")
        return observation if isinstance(observation, str) else json.dumps(_plain(observation), ensure_ascii=False)


def _made(id: str, options: dict[str, Any], show: str, max_steps: int) -> Any:
    with extra("gymnasium", "environment.name=gymnasium"):
        import gymnasium
    options = dict(options) | ({"max_episode_steps": max_steps} if max_steps else {})
    if ":" not in show and show not in ("auto", "render", "observation"):
        raise ConfigError(f"{KEY}.show must be auto, render, observation or package.module:function, got {show!r}.")
    try:
        environment = gymnasium.make(id, **options)
        drawn = "ansi" in (environment.metadata.get("render_modes") or ())
        if show == "render" and not drawn:
            raise ConfigError(f"{KEY}.show=render: {id} has no drawing in text; use show=observation.")
        if drawn and show in ("auto", "render") and "render_mode" not in options:
            environment.close()
            environment = gymnasium.make(id, render_mode="ansi", **options)
    except ConfigError:
        raise
    except Exception as error:  # environments raise any kind for options they don't know
        raise ConfigError(f"{KEY}: gymnasium can't make {id!r} with {options}: {error}") from error
    return environment


def _names(space: Any, actions: list | dict[str, Any] | None) -> dict[str, int]:
    """Lower-case names of Discrete actions and their numbers; empty for Text."""
    from gymnasium.spaces import Discrete, Text

    if not isinstance(space, Discrete | Text):
        raise ConfigError(f"{KEY}.id: actions must be Discrete or Text to be played in text, got {space}.")
    if isinstance(space, Text):
        if actions:
            raise ConfigError(f"{KEY}.actions must be empty where actions are texts, got {actions}.")
        return {}
    numbers = range(int(space.start), int(space.start + space.n))
    if actions is None:
        return {str(number): number for number in numbers}
    if isinstance(actions, list) and len(actions) != len(numbers):
        raise ConfigError(f"{KEY}.actions must name {len(numbers)} actions, got {actions}.")
    named = actions if isinstance(actions, dict) else dict(zip(actions, numbers, strict=True))
    names = {str(name).lower(): number for name, number in named.items()}
    if len(names) != len(actions) or not names or any(n not in numbers or isinstance(n, bool) for n in names.values()):
        raise ConfigError(f"{KEY}.actions must give different names to numbers from {numbers[0]} to {numbers[-1]}, got "
                          f"{actions}.")
    return names


def _uncoloured(match: re.Match) -> str:
    """What a terminal shows in colour, in plain text: [x] on a coloured ground, <red>x</red> in a colour."""
    code, text = int(match[1]), match[2]
    colour = _COLOURS[code % 10] if code % 10 < len(_COLOURS) else "gray"
    return f"[{text}]" if 40 <= code < 48 or code >= 100 else f"<{colour}>{text}</{colour}>"


def _plain(value: Any) -> Any:
    """An observation in JSON values."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value
