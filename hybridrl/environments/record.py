"""What an environment returned, checked and put into plain JSON values; and the turns of the episode so far."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hybridrl.environments.environment import AGENT, Action, Environment, Message, Step, Task, Trajectory, Turn

MAX_REPLY_BYTES = 1 << 20
"""Longest answer of an environment, as JSON; a longer one would not fit any context."""
MAX_REWARD = 1e30
"""Rewards are float32."""
FAILURES = ("raised", "invalid", "timeout", "died", "overflow", "aborted")
"""What can go wrong with an episode. The environment raised; returned what the contract or the chat template does not
allow; gave no result in time (or the episode took too long); its process ended; already its first observation is
longer than the context; the engine gave a turn up."""


class EnvironmentFailure(Exception):
    """What an episode failed of. `kind` is one of FAILURES."""

    def __init__(self, kind: str, text: str):
        super().__init__(kind, text)
        self.kind, self.text = kind, text

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(slots=True)
class Reply:
    """What a call of `reset` or `step` came to; plain JSON values throughout."""

    messages: list[Message] | None
    """The observation; None where `reset` leaves it to the row's prompt."""
    agent: str
    """Who acts next."""
    done: bool = False
    rewards: dict[str, float] = field(default_factory=dict)
    token_rewards: list[float] | None = None
    info: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    state: Any = None

    def to_json(self) -> bytes:
        """As bytes for the other process; raises EnvironmentFailure when they are too many."""
        text = json.dumps(asdict(self)).encode()
        if len(text) > MAX_REPLY_BYTES:
            raise EnvironmentFailure("invalid", f"returned {len(text)} bytes, must be at most {MAX_REPLY_BYTES}")
        return text


class Record:
    """The episode that an environment is in; `verify` is shown its turns."""

    def __init__(self, task: Task):
        self.trajectory = Trajectory(task)
        self._agent = AGENT
        self._shown: list[Message] = []

    def opened(self, environment: Environment, returned: Any, state: Any) -> Reply:
        """Check what `reset` returned."""
        step = returned if isinstance(returned, Step) else Step(returned)
        if step.done:
            raise _invalid("reset", returned, "the beginning of an episode, which is not over yet")
        self._agent = _agent(step.agent, AGENT)
        messages = _messages(step.observation)
        if messages is None and self.trajectory.task.prompt is None:
            raise _invalid("reset", None, "an observation where the row has no prompt")
        self._shown = messages or []
        tools = _plain("tools", list(environment.tools))
        return Reply(messages, self._agent, tools=tools, state=_plain("state", state))

    def stepped(self, action: Action, returned: Any, state: Any) -> Reply:
        """Check what `step` returned for an action, and keep the turn."""
        if not isinstance(returned, tuple) or not 4 <= len(returned) <= len(Step._fields):
            raise _invalid("step", returned, "a Step, or a tuple of observation, reward, done, info")
        step, actor = Step(*returned), self._agent
        if not isinstance(step.done, bool) and type(step.done).__name__ not in ("bool_", "bool"):
            raise _invalid("done", step.done, "true or false")
        messages = _messages(step.observation) or []
        if not messages and not step.done and step.agent in (None, actor):
            raise _invalid("observation", step.observation, "text while the episode goes on")
        reply = Reply(
            messages, _agent(step.agent, actor), bool(step.done), _rewards(step.reward, [actor]),
            _token_rewards(step.token_rewards, len(action.token_ids)), _info(step.info), state=_plain("state", state))
        self.trajectory.turns.append(Turn(actor, self._shown, action, reply.rewards, reply.info))
        self._agent, self._shown = reply.agent, messages
        return reply

    def ended(self, finish_reason: str, turns: Sequence[Turn] = ()) -> Trajectory:
        """The whole trajectory, for `verify`; `turns` are those that `step` did not see."""
        self.trajectory.finish_reason = finish_reason
        self.trajectory.turns += turns
        return self.trajectory

    def verified(self, returned: Any) -> dict[str, float]:
        """Check what `verify` returned: one number for all agents, or numbers by agent."""
        acted = list(dict.fromkeys(turn.agent for turn in self.trajectory.turns))
        return _rewards(returned, acted)


def _invalid(what: str, value: Any, accepted: str) -> EnvironmentFailure:
    try:
        shown = repr(value)[:80]
    except Exception as error:  # a repr is the environment's code, too
        shown = f"<no repr: {type(error).__name__}>"
    return EnvironmentFailure("invalid", f"{what} must be {accepted}, got {shown} ({type(value).__name__})")


def _messages(observation: Any) -> list[Message] | None:
    if observation is None:
        return None
    if isinstance(observation, str):
        observation = [{"role": "user", "content": observation}]
    elif isinstance(observation, Mapping):
        observation = [observation]
    if not isinstance(observation, list):
        raise _invalid("observation", observation, "text, a chat message or a list of them")
    for message in observation:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise _invalid("a message of an observation", message, "an object with texts role and content")
        if message["role"] == "assistant":
            raise _invalid("the role of an observation", "assistant", "another: the assistant's turns are sampled")
    return _plain("observation", observation)


def _plain(what: str, value: Any) -> Any:
    """The value as JSON holds it: nothing of the environment's own types is left."""
    if value is None:
        return None
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentFailure("invalid", f"{what} is no valid Unicode text: {error.reason}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFailure("invalid", f"{what} is no JSON value: {error}") from None
    return json.loads(text)


def _agent(name: Any, default: str) -> str:
    if name is None:
        return default
    if not isinstance(name, str) or not name:
        raise _invalid("agent", name, "the name of an agent")
    return _plain("agent", name)


def _number(what: str, value: Any) -> float:
    if not hasattr(type(value), "__float__"):
        raise _invalid(what, value, "a number")
    number = float(value)
    if not abs(number) <= MAX_REWARD:  # false for NaN, too
        raise _invalid(what, number, f"finite and at most {MAX_REWARD:g} in size")
    return number


def _rewards(value: Any, default_agents: list[str]) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {_agent(name, ""): _number(f"reward of {name!r}", number) for name, number in value.items()}
    number = _number("reward", value)
    return dict.fromkeys(default_agents, number)


def _token_rewards(value: Any, count: int) -> list[float] | None:
    if value is None:
        return None
    rewards = [_number("token reward", number) for number in value]
    if len(rewards) != count:
        raise _invalid("the number of token rewards", len(rewards), f"that of the action's tokens, {count}")
    return rewards


def _info(info: Any) -> dict[str, Any]:
    if not isinstance(info, Mapping):
        raise _invalid("info", info, "a mapping")
    kept = {str(name): value if isinstance(value, bool | int | str) or value is None else
            float(value) if hasattr(type(value), "__float__") else str(value)[:200] for name, value in info.items()}
    return _plain("info", {name: value if _countable(value) else None for name, value in kept.items()})


def _countable(value: Any) -> bool:
    """Whether means can be taken of a value, if it is a number."""
    try:
        return not isinstance(value, int | float) or math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False
