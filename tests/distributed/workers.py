"""Tiny workers for the tests of worker groups."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tensordict import TensorDict

from hybridrl.batch import lengths, num_rows, put, select
from hybridrl.dispatch import RowCosts, over_rows, to_all, to_first
from hybridrl.errors import BatchError
from hybridrl.workers.base import Worker, WorkerContext


def response_lengths(batch: TensorDict) -> list[float] | None:
    """Rows cost their response."""
    return lengths(batch["response_ids"]).tolist() if "response_ids" in batch.keys() else None


class Tiny(Worker):
    """Marks rows with its rank, counts, waits, fails."""

    def __init__(self, context: WorkerContext, start: int = 0, shard_ranks: int = 1, costly: bool = False):
        super().__init__(context)
        self.calls, self.shard_ranks, self.costly = start, shard_ranks, costly

    def costs(self, axis: str) -> RowCosts | None:
        return response_lengths if self.costly else None

    def peers(self, axis: str) -> int:
        return self.shard_ranks if axis == "rollout" else 1

    @over_rows()
    def mark(self, batch: TensorDict, other: TensorDict | None = None) -> TensorDict:
        """Which rank had each row; joins a collective, so that a worker left out would hang the rest."""
        rows = torch.tensor(num_rows(batch))
        dist.all_reduce(rows)
        put(batch, "rewards", torch.full((num_rows(batch),), float(self.rank)))
        put(batch, "total", torch.full((num_rows(batch),), int(rows)))
        if other is not None:
            put(batch, "returns", [row.float() for row in other["response_ids"].unbind()])
        return batch

    @over_rows(axis="rollout")
    def mark_shared(self, batch: TensorDict) -> TensorDict:
        """As `mark`, on an axis whose shards have several ranks."""
        put(batch, "rewards", torch.full((num_rows(batch),), float(self.rank)))
        return batch

    @over_rows()
    def keep_even(self, batch: TensorDict) -> TensorDict:
        """Rows with an even group id: shares become uneven."""
        return select(batch, batch["group_ids"] % 2 == 0)

    @over_rows()
    def scale_in_place(self, batch: TensorDict) -> TensorDict:
        """Writes into what it received."""
        batch["group_ids"] *= 10
        batch["response_ids"].values().mul_(10)
        return batch

    @over_rows()
    def answers(self, batch: TensorDict) -> list:
        """A list, one item a row."""
        return list(batch["answer"])

    @over_rows(join="first")
    def count(self, batch: TensorDict) -> dict:
        """Rows of all ranks."""
        rows = torch.tensor(num_rows(batch))
        dist.all_reduce(rows)
        return {"rows": int(rows), "rank": self.rank}

    @to_all
    def whole(self, batch: TensorDict, box: dict | None = None) -> tuple:
        """What a rank sees of a batch that is not split, alone and inside another object."""
        return self.rank, num_rows(batch), num_rows(box["batch"]) if box else None

    @to_first
    def add(self, amount: int) -> int:
        """Rank 0 alone counts."""
        self.calls += amount
        return self.calls

    @to_all
    def state(self) -> tuple:
        """Rank, step and count."""
        return self.rank, self.step, self.calls

    @to_all
    def process(self) -> int:
        """Process id."""
        return os.getpid()

    @to_all
    def environment(self, name: str) -> str | None:
        """An environment variable."""
        return os.environ.get(name)

    @to_all
    def sleep(self, seconds: float) -> int:
        """Wait."""
        time.sleep(seconds)
        return self.rank

    @to_all
    def wait_for(self, file: str) -> int:
        """Wait until a file exists."""
        while not os.path.exists(file):
            time.sleep(0.01)
        return self.rank

    @to_all
    def hang(self, folder: str, barrier: bool) -> None:
        """Leave a file named as the rank, and wait: with `barrier` rank 0 in one that the others never join."""
        Path(folder, str(self.rank)).touch()
        if barrier and self.rank == 0:
            dist.barrier()
        time.sleep(300)

    @to_all
    def refuse(self, message: str) -> None:
        """Every rank refuses alike."""
        raise BatchError(message)

    @to_all
    def fail(self, rank: int) -> None:
        """One rank fails, the others wait for it in a collective."""
        if self.rank == rank:
            return {}["missing key"]
        dist.barrier()

    @over_rows()
    def fail_on_rows(self, batch: TensorDict) -> TensorDict:
        """Every rank with rows refuses."""
        raise BatchError("no such rows")

    @to_all
    def leave(self, rank: int) -> None:
        """One rank ends its process."""
        if self.rank == rank:
            os._exit(3)


class Refusing(Worker):
    """Can't be built."""

    def __init__(self, context: WorkerContext):
        raise BatchError(f"rank {context.rank} was asked for the impossible")
