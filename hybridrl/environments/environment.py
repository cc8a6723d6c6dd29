"""The contract between an episode and what it happens in.

    reset(task) ─> observation ─> action ─> step(action) ─> observation, reward, done, info ─> ... ─> verify(trajectory)

The policy writes actions; an environment answers them. A single-turn check is the shortest environment: it shows
the prompt, is done after one action, and `verify` scores it (`hybridrl.environments.verifier`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Message = dict[str, Any]
"""A chat message: `role`, `content` as text, and whatever else the chat template reads."""

Observation = str | Message | list[Message] | None
"""What the policy is shown: text (a message of the user), messages, or None: nothing new. From `reset`, None stands
for the row's own prompt."""

Rewards = float | Mapping[str, float]
"""The reward of the agent that acted, or rewards by the names of agents."""

AGENT = "agent"
"""Name of the only agent of an environment that names none."""


@dataclass(frozen=True, slots=True)
class Task:
    """What an episode is about: a row of data and a seed.

    The same task must give the same episode, so whatever is random in an environment is drawn from `seed`.
    """

    prompt: str | list[Message] | None = None
    answer: Any = None
    data: Any = None
    """The whole row, as rewards get it under the name `task`."""
    seed: int = 0


class Action(str):
    """What the policy wrote in one turn: the text without special tokens.

    `raw` is the same with special tokens, `token_ids` are the tokens as sampled. `finish_reason` is `stop` (an end
    token) or `length`: the text was cut.
    """

    raw: str
    token_ids: Sequence[int]
    finish_reason: str

    def __new__(cls, text: str, raw: str | None = None, token_ids: Sequence[int] = (), finish_reason: str = "stop"):
        action = super().__new__(cls, text)
        action.raw = text if raw is None else raw
        action.token_ids, action.finish_reason = tuple(token_ids), finish_reason
        return action

    def __reduce__(self):
        return type(self), (str(self), self.raw, self.token_ids, self.finish_reason)


class Step(NamedTuple):
    """What an action led to. A plain tuple of the first four is accepted, too.

    observation: for the agent that acts next.
    reward: of this turn, for the agent that acted, or by the names of agents.
    done: the episode is over.
    info: names with numbers or short texts, kept with the turn; numbers are averaged into `episodes/info/<name>`.
    agent: who acts next; None: whoever acted. `reset` may return a Step to say who begins.
    token_rewards: one for each of the action's `token_ids`, on top of `reward`.
    """

    observation: Observation = None
    reward: Rewards = 0.0
    done: bool = False
    info: Mapping[str, Any] = {}
    agent: str | None = None
    token_rewards: Sequence[float] | None = None


Stepped = Step | tuple[Observation, Rewards, bool, Mapping[str, Any]]
"""What `step` may return."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One action, what was shown before it, and what came of it. `rewards` are by agent."""

    agent: str
    observation: list[Message]
    action: Action
    rewards: Mapping[str, float]
    info: Mapping[str, Any]


@dataclass(slots=True)
class Trajectory:
    """An episode that is over. `finish_reason` is one of `hybridrl.batch.FINISH_REASONS`."""

    task: Task
    turns: list[Turn] = field(default_factory=list)
    finish_reason: str = ""

    @property
    def response(self) -> str:
        """The last action; empty when there was none."""
        return self.turns[-1].action if self.turns else ""


class Environment:
    """Base of environments whose methods are plain functions. They run in a process of their own.

    One object plays one episode at a time and many in a row: `reset` must leave nothing of the last one. The
    parameters of the constructor are the options of a configuration. A method may block; one that takes longer than
    the deadline is killed with its process. Whatever a method raises costs its episode and nothing else.

    `AsyncEnvironment` is the same with coroutines, which run in the event loop of the episodes.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas for the chat template to show in the prompt; read after `reset`."""

    def reset(self, task: Task) -> Observation | Step:
        """Begin an episode; returns the first observation. None shows the row's own prompt."""
        return None

    def step(self, action: Action) -> Stepped:
        """Take an action; returns what it led to."""
        raise NotImplementedError

    def state(self) -> Any:
        """Where the episode is, as JSON values, to be shown to people; nothing is trained on it."""
        return None

    def verify(self, trajectory: Trajectory) -> Rewards:
        """The reward of an episode that is over, on top of those of its turns, for every agent or by agent."""
        return 0.0

    def close(self) -> None:
        """Free what the object holds. It may be killed instead."""


class AsyncEnvironment(Environment):
    """An environment whose methods are coroutines: for services that wait on the network and do little themselves.

    It is not in a process of its own: code that blocks stops every episode of its engine. Each call is a task. One that
    runs out of time is cancelled, left behind if it ignores that, and the object is dropped.
    """

    async def reset(self, task: Task) -> Observation | Step:  # type: ignore[override]
        """As of Environment."""
        return None

    async def step(self, action: Action) -> Stepped:  # type: ignore[override]
        """As of Environment."""
        raise NotImplementedError

    async def state(self) -> Any:
        """As of Environment."""
        return None

    async def verify(self, trajectory: Trajectory) -> Rewards:  # type: ignore[override]
        """As of Environment."""
        return 0.0

    async def close(self) -> None:  # type: ignore[override]
        """As of Environment."""
