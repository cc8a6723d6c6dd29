"""One agent's side of an episode as training rows: exactly the ids that were fed and sampled.

A row is a prompt and what followed it. While the chat template only adds to a conversation, observations and
responses are appended to one row. When it rewrites what was said before, the ids held so far are no longer what the
model is shown: they stay a row as they are, and another begins with the rewritten conversation as its prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from hybridrl.environments import Action, Message
from hybridrl.environments.record import Reply
from hybridrl.workers.rollout.chat import Chat, Continuation
from hybridrl.workers.rollout.engine import Completion

MAX_AGENTS = 1024
"""Most agents of one episode."""
OBSERVED = -1
"""Weight version of tokens that no weights produced."""


@dataclass(slots=True)
class Row:
    """Columns of one training row; lists are by response token."""

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    token_rewards: list[float] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    experts: Tensor | None = None
    """Of the tokens that were fed until the last turn, where the engine keeps them."""

    @property
    def ids(self) -> list[int]:
        """Prompt and response."""
        return self.prompt_ids + self.response_ids

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens of the response."""
        for column in (self.response_ids, self.mask, self.log_probs, self.versions, self.token_rewards):
            del column[length:]

    def extend(self, ids: Sequence[int], mask: bool, log_probs: Sequence[float], versions: Sequence[int]) -> None:
        """Append tokens of one kind."""
        self.response_ids += ids
        self.mask += [mask] * len(ids)
        self.log_probs += log_probs
        self.versions += versions
        self.token_rewards += [0.0] * len(ids)


class Mark(NamedTuple):
    """A place in a conversation: how much there was of each of its parts."""

    rows: int
    response: int
    held: int
    messages: int


class Conversation:
    """What one agent was shown and has written.

    Args:
        chat: renders it.
        tools: JSON schemas for the chat template.
        context: most tokens of prompt and response together.
        max_response_tokens: most tokens of a row's response, observations included.
    """

    def __init__(self, chat: Chat, tools: Sequence[Mapping[str, Any]], context: int, max_response_tokens: int):
        self._chat, self._tools = chat, chat.neutral(list(tools))
        self._context, self._max_response_tokens = context, max_response_tokens
        self.rows: list[Row] = []
        self.reward = 0.0
        """All rewards of the agent so far."""
        self._messages: list[Message] = []
        self._heard: list[Message] = []
        self._before: tuple[int, int, str, int] = (0, 0, "", 0)
        self._held = ""
        self._owed = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of the row that goes on."""
        return len(self.rows[-1].prompt_ids) + len(self.rows[-1].response_ids) if self.rows else 0

    def hear(self, messages: Sequence[Message]) -> int:
        """Take an observation; how many tokens the next response may have. 0: the observation did not fit."""
        new = [self._chat.neutral(message) for message in messages]
        if self.rows:
            return self.feed(self._chat.following(self._held, self._messages, new, self._tools), messages, new)
        return self.feed(self._chat.opening(new, self._tools), messages, new)

    def feed(self, piece: Continuation, heard: Sequence[Message], new: Sequence[Message]) -> int:
        """`hear` for an observation that is rendered: as it was given, and as the chat template gets it."""
        response = len(self.rows[-1].response_ids) if self.rows else 0
        self._before = len(self.rows), response, self._held, len(self._messages)
        anew = piece.rewritten or not self.rows
        room = self._room(Row(piece.ids) if anew else self.rows[-1], 0 if anew else len(piece.ids))
        if room < 1 and self.rows:
            return 0
        if anew:
            self.rows.append(Row(piece.ids))
            self._held = piece.text
        else:
            self.rows[-1].extend(piece.ids, False, [0.0] * len(piece.ids), [OBSERVED] * len(piece.ids))
            self._held += piece.text
        self._messages += new
        self._heard = list(heard)
        return max(room, 0)

    def mark(self) -> Mark:
        """The place after the last turn, for `branch`."""
        return Mark(len(self.rows), len(self.rows[-1].response_ids), len(self._held), len(self._messages))

    def branch(self, mark: Mark) -> "Conversation | None":
        """Another conversation that goes on from an earlier turn; None when the history was rewritten since.

        The ids that were fed and sampled until then are the prompt of its first row.
        """
        if mark.rows != len(self.rows):
            return None
        twin = Conversation(self._chat, self._tools, self._context, self._max_response_tokens)
        row = self.rows[-1]
        twin.rows = [Row(row.prompt_ids + row.response_ids[:mark.response])]
        twin._held, twin._messages = self._held[:mark.held], self._messages[:mark.messages]
        return twin

    def take_back(self) -> None:
        """Forget the last observation, which no response followed."""
        rows, response, self._held, messages = self._before
        del self.rows[rows:], self._messages[messages:]
        if self.rows:
            self.rows[-1].cut(response)

    def _room(self, row: Row, added: int) -> int:
        response = len(row.response_ids) + added
        return min(self._context - len(row.prompt_ids) - response, self._max_response_tokens - response)

    def say(self, completion: Completion) -> Action:
        """Take what was sampled after `ids`."""
        row, ids = self.rows[-1], completion.token_ids
        start = len(row.response_ids)
        row.extend(ids, True, completion.log_probs, completion.versions)
        row.experts = completion.experts
        self._held += self._chat.text_of(ids)
        self._messages.append(self._chat.spoken(ids))
        action = self._chat.action(ids, completion.finish_reason)
        row.turns.append({"start": start, "stop": start + len(ids), "observation": self._heard, "action": str(action)})
        owed, self._owed = self._owed, 0.0
        if owed:
            row.turns[-1]["reward"] = owed
            self._place(owed)
        return action

    def answered(self, reply: Reply) -> None:
        """Note what the last action led to, rewards apart."""
        row = self.rows[-1]
        turn = row.turns[-1]
        turn |= {"info": reply.info, "state": reply.state, "reward": turn.get("reward", 0.0)}
        if reply.token_rewards:
            for i, reward in enumerate(reply.token_rewards, turn["start"]):
                row.token_rewards[i] += reward
            self._count(sum(reply.token_rewards))

    def earn(self, reward: float) -> None:
        """Take a reward, of a turn or at the end; it sits on the last token sampled."""
        self._count(reward)
        if any(row.turns for row in self.rows):
            self._place(reward)
        else:
            self._owed += reward

    def _count(self, reward: float) -> None:
        self.reward += reward
        spoken = [row.turns[-1] for row in self.rows if row.turns]
        if spoken:
            spoken[-1]["reward"] = spoken[-1].get("reward", 0.0) + reward

    def _place(self, reward: float) -> None:
        row = [row for row in self.rows if row.turns][-1]
        row.token_rewards[row.turns[-1]["stop"] - 1] += reward
