"""A response while it is sampled: what of its text is certain, and when a stop text ends it.

    engine thread: Progress ──> event loop: Telling.hear ──> the pieces of a stream

Certain is what no further token can change: no part of a character, nothing that may become a stop text, and nothing
from the mark of a tool call on.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from hybridrl.environments.tools.calls import text_so_far, without_beginning_of
from hybridrl.workers.rollout.engine import Completion

PART = "\ufffd"
"""What a decoder puts in the place of bytes that are no character, or not yet one."""


class Piece(NamedTuple):
    """Some more of the text of one choice, and the tokens since the piece before."""

    choice: int
    text: str
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    version: int
    """Of the weights that sampled the last of them."""


class Progress:
    """What the engine has sampled so far, handed from its thread to the event loop that made this object."""

    def __init__(self) -> None:
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        self.latest: Completion | None = None

    def __call__(self, completion: Completion) -> None:
        self.latest = completion
        self.wake()

    def wake(self, _: "Future[Any] | None" = None) -> None:
        """Have `news` return; callable from any thread."""
        if not self._news.is_set():
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._news.set)

    async def news(self) -> None:
        """Wait for the next."""
        await self._news.wait()
        self._news.clear()


class Text:
    """The text of tokens that come a few at a time, for the price of the last few."""

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode, self.text = decode, ""
        self._ids: list[int] = []
        self._first = self._read = 0

    def of(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, which begin with those of the call before; it lacks a character that is not whole."""
        for token in token_ids[len(self._ids):]:
            self._ids.append(token)
            # The tokens before are decoded, too: some decoders treat the beginning of a text in a way of its own.
            before, after = self._decode(self._ids[self._first:self._read]), self._decode(self._ids[self._first:])
            if len(after) > len(before) and not after.endswith(PART):
                self.text += after[len(before):]
                self._first, self._read = self._read, len(self._ids)
        return self.text


@dataclass
class Telling:
    """Says one response bit by bit.

    Args:
        plain, whole: token ids to text, without and with special tokens.
        stop: stop texts.
        call_format: how tool calls are written; None where none are read.
        say: takes pieces; None: nobody asks for them before the response is whole.
    """

    plain: Callable[[Sequence[int]], str]
    whole: Callable[[Sequence[int]], str]
    stop: Sequence[str]
    call_format: str | None
    say: Callable[[Piece], None] | None
    index: int = 0

    def __post_init__(self) -> None:
        self._plain, self._whole = Text(self.plain), Text(self.whole)
        self.told, self._num_tokens = "", 0
        self.heard: Completion | None = None
        """What the text told so far is of."""

    def hear(self, completion: Completion) -> bool:
        """Say what is certain of a response that goes on; whether a stop text ends it."""
        text = self._plain.of(completion.token_ids)
        if first_stop(text, self.stop) is not None:
            return True
        if self.say is not None:
            if self.call_format is not None:
                text = text_so_far(text, self._whole.of(completion.token_ids), self.call_format)
            self._tell(without_beginning_of(text, self.stop), completion)
        return False

    def finish(self, completion: Completion, text: str) -> str:
        """Say the rest of the text of a whole response; all that was said."""
        if self.say is None:
            return text
        self._tell(text, completion)
        rest = completion.token_ids[self._num_tokens:]
        if rest:
            self._say("", completion)
        return self.told

    def _tell(self, text: str, completion: Completion) -> None:
        if len(text) > len(self.told) and text.startswith(self.told):
            self._say(text[len(self.told):], completion)

    def _say(self, text: str, completion: Completion) -> None:
        assert self.say is not None, "only who has somebody to tell says anything"
        new = slice(self._num_tokens, None)
        self.say(Piece(self.index, text, completion.token_ids[new], completion.log_probs[new],
                       completion.versions[-1]))
        self.told, self._num_tokens, self.heard = self.told + text, len(completion.token_ids), completion


def first_stop(text: str, stop: Sequence[str]) -> tuple[int, int] | None:
    """Where the stop text that is complete first begins and ends; of several that end there, the longest."""
    places = [(found + len(one), found) for one in stop if (found := text.find(one)) >= 0]
    if not places:
        return None
    end, start = min(places)
    return start, end


def cut(completion: Completion, num_tokens: int, prompt_tokens: int) -> Completion:
    """The first tokens of a completion, ended there by its caller."""
    experts = None if completion.experts is None else completion.experts[:prompt_tokens + num_tokens - 1]
    return Completion(completion.token_ids[:num_tokens], completion.log_probs[:num_tokens],
                      completion.versions[:num_tokens], "stop", experts)


def fewest_tokens(text: str, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int:
    """The fewest of the tokens, at least one, whose text begins with `text`; all where it never does."""
    low, high = 1, len(token_ids)
    while low < high:  # a part of a character's bytes is another character
        middle = (low + high) // 2
        low, high = (low, middle) if decode(token_ids[:middle]).startswith(text) else (middle + 1, high)
    return low
