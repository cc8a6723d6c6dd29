"""What every worker is told about itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hybridrl.dispatch import RowCosts, to_all
from hybridrl.workers.memory import peak_memory


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Place of a worker: rank of world_size, the device it owns, the role it plays, its rank on its machine."""

    rank: int
    world_size: int
    device: torch.device
    role: str
    local_rank: int = 0


class Worker:
    """Base of worker classes: plain Python, built as `Cls(context, *args, **kwargs)`, testable without a cluster.

    The default torch.distributed group (gloo; with NCCL for CUDA tensors on GPUs) spans all ranks and exists
    before a worker is built, for one rank too. Methods that a group may call carry a tag of `hybridrl.dispatch`.
    """

    def __init__(self, context: WorkerContext):
        self.context = context
        self.rank = context.rank
        self.world_size = context.world_size
        self.local_rank = context.local_rank
        self.device = context.device
        self.role = context.role
        self.step: int | None = None
        """Step of the call that runs; None before the first."""
        self.metrics: dict[str, float] = {}
        """What was measured since the last `take_metrics`."""

    def peers(self, axis: str) -> int:
        """How many consecutive ranks form one shard of an axis of `over_rows`."""
        return 1

    def costs(self, axis: str) -> RowCosts | None:
        """What rows of a batch cost on an axis, as a function that pickles; None: every row the same."""
        return None

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Note the most memory held meanwhile as the metric `memory/<name>_peak_bytes`, the largest of several."""
        try:
            with peak_memory(self.device) as peak:
                yield
        finally:
            key = f"memory/{name}_peak_bytes"
            self.metrics[key] = max(self.metrics.get(key, 0.0), float(peak.bytes))

    @to_all
    def take_metrics(self) -> dict[str, float]:
        """What this rank measured since the last call: bytes at most in each phase, and what its class adds."""
        metrics, self.metrics = self.metrics, {}
        return metrics

    def close(self) -> None:
        """Release what the process would not release by exiting."""
