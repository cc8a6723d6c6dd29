"""Which rows a step draws: seeded, without loss between epochs, exactly resumable."""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from hybridrl.data.prompts import PromptSet
from hybridrl.errors import DataError

_SAMPLING, _SHUFFLING = 1, 2


def row_seeds(seed: int, step: int, num_rows: int) -> torch.Tensor:
    """Sampling seed of each row of a step, [num_rows] int64, not negative: the same on every machine and layout."""
    return torch.from_numpy(_hashes(num_rows, seed, step, _SAMPLING))


def _hashes(num: int, *words: int) -> np.ndarray:
    """[num] int64 hashes in [0, 2^63) of the words and 0..num-1.

    Each word is added to the state, which the SplitMix64 finaliser then mixes.
    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    state = np.zeros(num, dtype=np.uint64)
    columns = [np.full(num, word % 2**64, dtype=np.uint64) for word in words]
    for column in (*columns, np.arange(num, dtype=np.uint64)):
        state = state + column + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(1)).astype(np.int64)


class PromptLoader:
    """Draws batches of prompts for ever, each row once an epoch.

    A batch may span epochs. With `shuffle` each epoch has its own order, made from `seed` and the epoch's number
    alone, so that a resumed loader needs no more than its position.
    """

    def __init__(self, prompts: PromptSet, *, seed: int, shuffle: bool = True):
        self.prompts, self.seed, self.shuffle = prompts, seed, shuffle
        self.epoch = self.position = self.drawn = 0
        self._order = self._epoch_order()

    @property
    def counts(self) -> dict[str, int]:
        """`rows` usable, `overlong` and `malformed` left out."""
        return self.prompts.counts

    def next_batch(self, n: int) -> TensorDict:
        """The next `n` rows (see `PromptSet.batch`); group_ids never repeat in a run. n may exceed an epoch."""
        rows: list[int] = []
        while len(rows) < n:
            if self.position == len(self.prompts):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._epoch_order()
            taken = self._order[self.position:self.position + n - len(rows)]
            rows += taken
            self.position += len(taken)
        batch = self.prompts.batch(rows, first_group=self.drawn)
        self.drawn += n
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, as JSON values."""
        return {"epoch": self.epoch, "position": self.position, "drawn": self.drawn, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place. Raises DataError when it was saved with other data, seed or shuffling."""
        for name, here in self._identity().items():
            if state[name] != here:
                raise DataError(f"can't resume the prompts: {name} was {state[name]!r} when saved and is {here!r} now.")
        self.epoch, self.position, self.drawn = state["epoch"], state["position"], state["drawn"]
        self._order = self._epoch_order()

    def _identity(self) -> dict[str, Any]:
        return {"rows": len(self.prompts), "fingerprint": self.prompts.fingerprint, "seed": self.seed,
                "shuffle": self.shuffle}

    def _epoch_order(self) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.prompts)))
        return np.argsort(_hashes(len(self.prompts), self.seed, self.epoch, _SHUFFLING), kind="stable").tolist()
