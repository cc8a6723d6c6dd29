"""How many episodes may run at a time."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Admission:
    """Lets episodes in, first come first served, while they and those that run are expected to fit the cache.

    An episode's prefix has to stay in the key-value cache while it waits for its environment, or every turn computes
    it anew. An episode is expected to grow to the mean size of those that ended; the first ones to `first_guess`. One
    that is larger counts with what it holds. One episode always runs.

    Args:
        limit: most episodes at a time.
        cache_tokens: what the cache holds; None: no limit.
        first_guess: tokens of an episode while none has ended.
    """

    def __init__(self, limit: int, cache_tokens: int | None, first_guess: int):
        self._limit, self._cache_tokens = limit, cache_tokens
        self._held: dict[object, int] = {}
        self._reserved = 0  # let in, not begun
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._ended, self._total, self._guess = 0, 0, first_guess
        self.largest = 0
        """Most episodes that ran at a time."""

    @property
    def expected(self) -> int:
        """Tokens that an episode is expected to grow to."""
        return self._total // self._ended if self._ended else self._guess

    @asynccontextmanager
    async def place(self, episode: object) -> AsyncIterator[None]:
        """Wait for a place, and give it back at the end."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(turn)
            else:  # let in and cancelled at once
                self._reserved -= 1
                self._admit()
            raise
        self._reserved -= 1
        self._held[episode] = 0
        self.largest = max(self.largest, len(self._held))
        try:
            yield
        finally:
            held = self._held.pop(episode)
            if held:
                self._ended, self._total = self._ended + 1, self._total + held
            self._admit()

    def holds(self, episode: object, tokens: int) -> None:
        """An episode holds so many tokens now."""
        self._held[episode] = tokens

    def _fits(self) -> bool:
        running = len(self._held) + self._reserved
        if running == 0:
            return True
        if running >= self._limit:
            return False
        if self._cache_tokens is None:
            return True
        expected = self.expected
        used = sum(max(held, expected) for held in self._held.values()) + self._reserved * expected
        return used + expected <= self._cache_tokens

    def _admit(self) -> None:
        while self._waiting and self._fits():
            self._reserved += 1
            self._waiting.popleft().set_result(None)
