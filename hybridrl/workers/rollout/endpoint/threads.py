"""The conversations that one caller holds, found again by what a call repeats of them.

A call brings all that was said so far. Where that begins with what a conversation has come to, the call goes on with
it: ids that were sampled stay as they are, and only what is new is rendered and tokenised. Where it begins with an
earlier state of one, a new conversation goes on from there, and its prompt is the ids of that state. Any other call
begins anew. All conversations together are one trajectory.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrl.environments import Message
from hybridrl.workers.rollout.conversation import Conversation, Mark, Row

Said = list[Message] | str | list[int]
"""What a call brings: messages, or a prompt as text or as token ids."""


@dataclass(slots=True)
class Thread:
    """A conversation, and what its caller knows of it."""

    kind: str
    """Calls of other kinds don't go on with it: chat with these tools, text, token ids."""
    conversation: Conversation
    said: Any = ()
    busy: bool = False
    """A response is being sampled."""
    turns: list[tuple[int, Mark]] = field(default_factory=list)
    """After each turn, how much of `said` there was, and the conversation's place."""

    def after(self, said: Any) -> tuple[int, Mark] | None:
        """The last turn whose state `said` begins with."""
        return next((turn for turn in reversed(self.turns) if begins(said, self.said[:turn[0]])), None)

    def goes_on_from(self, turn: tuple[int, Mark]) -> bool:
        """Whether it can go on from a turn: its last, while it waits."""
        return turn == self.turns[-1] and not self.busy


@dataclass(slots=True)
class Threads:
    """The conversations of one caller. To the rows of a batch they are what the conversation of an agent is.

    Args:
        begin: makes an empty conversation, for a call with these tools.
    """

    begin: Callable[[Sequence[Mapping[str, Any]]], Conversation]
    held: list[Thread] = field(default_factory=list)
    _rows: dict[int, Row] = field(default_factory=dict)
    _last: Conversation | None = None

    def find(self, said: Said, tools: Sequence[Mapping[str, Any]] = ()) -> Thread:
        """The conversation that a call goes on with, or a new one, which is kept once it has spoken."""
        kind = kind_of(said, tools)
        fitting = [(turn, thread) for thread in self.held if thread.kind == kind
                   if (turn := thread.after(said)) is not None]
        # The longest first, and where two are as long, the one that can go on.
        fitting.sort(key=lambda found: (found[0][0], found[1].goes_on_from(found[0])), reverse=True)
        for turn, thread in fitting:
            if thread.goes_on_from(turn):
                return thread
            twin = thread.conversation.branch(turn[1])
            if twin is not None:
                return Thread(kind, twin, thread.said[:turn[0]])
        return Thread(kind, self.begin(tools))

    def spoke(self, thread: Thread, said: Said) -> None:
        """A thread has a response; `said` is what its caller knows of it now."""
        thread.said = said
        thread.turns.append((len(said), thread.conversation.mark()))
        if not any(thread is other for other in self.held):
            self.held.append(thread)
        self._last, row = thread.conversation, thread.conversation.rows[-1]
        self._rows.pop(id(row), None)
        self._rows[id(row)] = row

    # ---- as a conversation

    @property
    def rows(self) -> list[Row]:
        """All rows with responses, in the order of their last ones."""
        return list(self._rows.values())

    @property
    def reward(self) -> float:
        """All rewards so far."""
        return sum(thread.conversation.reward for thread in self.held)

    @property
    def num_tokens(self) -> int:
        """Tokens of the rows that may go on."""
        return sum(thread.conversation.num_tokens for thread in self.held)

    def earn(self, reward: float) -> None:
        """Take a reward; it sits on the last token sampled."""
        assert self._last is not None, "only callers that got an answer earn"
        self._last.earn(reward)


def kind_of(said: Said, tools: Sequence[Mapping[str, Any]]) -> str:
    """The kind of a thread; calls with other tools show the model another prompt."""
    if isinstance(said, str):
        return "text"
    return "ids" if said and isinstance(said[0], int) else "chat " + json.dumps(list(tools), sort_keys=True)


def begins(said: Any, held: Any) -> bool:
    """Whether what is said begins with what is held."""
    if isinstance(held, str):
        return said.startswith(held)
    return len(held) <= len(said) and all(map(same, held, said))


def same(ours: Any, theirs: Any) -> bool:
    """Whether two messages (or token ids) are the same.

    Of the assistant's, blanks around the text, the spelling of arguments and the ids of tool calls don't count: the
    model is shown what it sampled anyway.
    """
    if ours == theirs:
        return True
    return isinstance(ours, dict) and ours["role"] == theirs["role"] == "assistant" and _core(ours) == _core(theirs)


def _core(message: Message) -> Any:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["content"].strip(), calls
