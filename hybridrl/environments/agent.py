"""An agent as an environment: a program that calls the policy as it would call any model, with OpenAI's client.

    def solve(task, base_url, api_key, model):              # or async; or a class with `__call__`
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        ...
        return reward

It runs in a process of its own. What it calls is the rollout engine that plays the episode, which keeps every call as
the tokens that were fed and sampled.
"""

import asyncio
import inspect
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from hybridrl.environments.environment import Environment, Task, Trajectory
from hybridrl.environments.record import EnvironmentFailure
from hybridrl.environments.tools.calls import FORMATS
from hybridrl.errors import ConfigError, unknown
from hybridrl.importing import imported
from hybridrl.rewards.binding import BoundReward, bind

KEY = "environment.options"
GIVEN = ("task", "base_url", "api_key", "model")
"""What an agent is called with, by name; it gets those that it takes."""
DEFAULT_FORMAT = "hermes"


class Access(NamedTuple):
    """How an agent reaches the policy in one episode."""

    base_url: str
    api_key: str
    model: str


class AgentEnvironment(Environment):
    """Runs an agent that calls the policy through OpenAI's API; all its calls together are one trajectory.

    The reward is the number that the agent returns, plus that of the reward function if there is one. The reward
    function scores the text that the agent returns, or where it returns none, the last response of the policy.

    Args:
        function: import path `package.module:function` of the agent. It is called with those of `task`, `base_url`,
            `api_key` and `model` that it takes. A class is built once, with `options`, and its object is called.
        options: further keyword arguments of the function, or of the class.
        reward: a name of `hybridrl.rewards.REWARDS`, or `package.module:function`; empty for none.
        reward_options: keyword arguments handed to it.
        format: how the model writes tool calls, a name of `hybridrl.environments.tools.calls.FORMATS`.
    """

    def __init__(self, function: str, options: dict[str, Any] | None = None, reward: str = "",
                 reward_options: dict[str, Any] | None = None, format: str = DEFAULT_FORMAT):
        agent: Any
        agent, self._score = self.check_options(function, options, reward, reward_options, format)
        self._agent: Any = agent(**options or {}) if inspect.isclass(agent) else agent
        self._options = {} if inspect.isclass(agent) else options or {}

    @staticmethod
    def check_options(function: str, options: dict[str, Any] | None = None, reward: str = "",
                      reward_options: dict[str, Any] | None = None, format: str = DEFAULT_FORMAT
                      ) -> tuple[Callable[..., Any], BoundReward | None]:
        """The agent and the reward function. Raises ConfigError when they don't fit."""
        if format not in FORMATS:
            raise ConfigError(f"{KEY}.format: " + unknown("format of tool calls", format, FORMATS))
        if reward_options and not reward:
            raise ConfigError(f"{KEY}.reward_options must be empty without a reward function, got {reward_options!r}.")
        agent = _imported(function)
        if inspect.isclass(agent):
            _check_class(agent, function, options or {})
        else:
            _arguments(agent, function, options or {})
        return agent, bind(reward, reward_options or {}) if reward else None

    def run(self, task: Task, access: Access) -> None:
        """Let the agent play; raises what it raises."""
        self._returned: Any = None
        # Agents that take neither find the policy as they find OpenAI.
        os.environ |= {"OPENAI_BASE_URL": access.base_url, "OPENAI_API_KEY": access.api_key}
        _reach_directly("127.0.0.1")
        given = {"task": task, **access._asdict()}
        names = _arguments(self._agent, "", self._options)
        returned = self._agent(**{name: given[name] for name in names}, **self._options)
        self._returned = asyncio.run(returned) if inspect.iscoroutine(returned) else returned

    def verify(self, trajectory: Trajectory) -> float:
        returned, reward = self._returned, 0.0
        if hasattr(type(returned), "__float__"):
            reward, returned = float(returned), None
        elif self._score is None and trajectory.finish_reason not in ("overflow", "max_turns"):
            raise EnvironmentFailure("invalid", f"the agent must return a number where there is no reward function, "
                                                f"got {type(returned).__name__}")
        if not isinstance(returned, str | None):
            raise EnvironmentFailure("invalid", f"the agent must return a number, a text or None, got "
                                                f"{type(returned).__name__}")
        if self._score is None:
            return reward
        response = str(trajectory.response) if returned is None else returned
        task = trajectory.task
        return reward + self._score({"response": response, "answer": task.answer, "prompt": task.prompt,
                                     "task": task.data})


def _imported(path: str) -> Callable[..., Any]:
    agent = imported(path, f"{KEY}.function", "agent")
    if not callable(agent):
        raise ConfigError(f"{KEY}.function: {path!r} must be a function or a class, got {type(agent).__name__}.")
    return agent


def _check_class(agent: type, path: str, options: dict[str, Any]) -> None:
    call = inspect.getattr_static(agent, "__call__", None)
    if not inspect.isfunction(call):
        raise ConfigError(f"{KEY}.function: class {path!r} needs a method __call__.")
    try:
        inspect.signature(agent).bind(**options)
    except TypeError as error:
        raise ConfigError(f"{KEY}: agent {path!r} can't be built with options {options!r}: {error}.") from error
    _arguments(call, path, {"self": None})


def _arguments(agent: Callable[..., Any], path: str, options: dict[str, Any]) -> list[str]:
    """Those of GIVEN that an agent takes by name; ConfigError unless these and `options` are all that it needs."""
    parameters = inspect.signature(agent).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for option in options:
        if option in GIVEN or not (takes_any or option in named):
            own = named.difference(GIVEN)
            raise ConfigError(f"{KEY}.options: " + unknown(f"option of agent {path!r}", option, own))
    for p in parameters:
        filled = p.name in named and (p.name in GIVEN or p.name in options)
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and not filled:
            raise ConfigError(f"{KEY}.options: agent {path!r} needs {p.name!r}, which is neither there nor one of "
                              f"{', '.join(GIVEN)}.")
    return [name for name in GIVEN if takes_any or name in named]


def _reach_directly(host: str) -> None:
    """Keep clients from going to `host` through a proxy."""
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [entry for entry in os.environ.get(name, "").split(",") if entry]
        os.environ[name] = ",".join(dict.fromkeys([*hosts, host]))
