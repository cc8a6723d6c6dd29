"""The plan carried out: a bucket's exchange runs while the bucket before it is written into the engine.

Only what a rank's engine reads is sent to it, already in the engine's dtype; what the rank holds itself is read
where it is.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from hybridrl.errors import SyncError
from hybridrl.workers.weights.plan import Bucket, Sharded
from hybridrl.workers.weights.regions import Write


@dataclass(slots=True)
class Traffic:
    """Elements that came from other ranks, and elements written into this rank's engine."""

    received: int = 0
    written: int = 0


def sharding(held: Iterable[tuple[str, DTensor]]) -> tuple[list[Sharded], dist.ProcessGroup | None]:
    """How training holds its weights, and the group they are sharded over (None: every rank holds them whole)."""
    weights, groups = [], {}
    for name, weight in held:
        sharded = [axis for axis, placement in enumerate(weight.placements) if placement != Replicate()]
        if len(sharded) > 1 or any(weight.placements[axis] != Shard(0) for axis in sharded):
            raise SyncError(f"weight {name} is placed {weight.placements}; a sync reads weights that are sharded by "
                            "rows over one dimension of the mesh.")
        parts = weight.device_mesh.size(sharded[0]) if sharded else 1
        if parts > 1:
            group = weight.device_mesh.get_group(sharded[0])
            groups[group.group_name] = group
        weights.append(Sharded(name, tuple(weight.shape), parts))
    assert len(groups) <= 1, "all weights are sharded over one group"
    return weights, next(iter(groups.values()), None)


@torch.no_grad()
def exchange(weights: Iterable[tuple[str, Tensor]], plan: Iterable[Bucket], dtype: torch.dtype,
             group: dist.ProcessGroup | None, traffic: Traffic) -> Iterator[list[Write]]:
    """Yield what this rank's engine is to write, as it becomes available. Collective over `group`.

    At most two buckets are under way at a time.

    Args:
        weights: of training, in the order of the plan; a sharded one as a DTensor.
        dtype: of the rollout engine.
        group: over which the weights are sharded; None when this rank holds them whole.
    """
    source, held = iter(weights), dict[str, Tensor]()
    before: _Transfer | None = None
    for bucket in plan:
        kept = {name: held[name] for name in bucket.weights if name in held}
        held = kept | {name: flat(weight) for name, weight in islice(source, len(bucket.weights) - len(kept))}
        assert list(held) == bucket.weights, f"training handed out {list(held)}, the plan expects {bucket.weights}"
        transfer = _Transfer(bucket, held, dtype, group)
        if before is not None:
            yield from before.writes(traffic)
        before = transfer
    if before is not None:
        yield from before.writes(traffic)


class _Transfer:
    """One bucket under way."""

    def __init__(self, bucket: Bucket, held: dict[str, Tensor], dtype: torch.dtype, group: dist.ProcessGroup | None):
        self.bucket, self.held, self.dtype, self.work = bucket, held, dtype, None
        if group is None:
            return
        device = next(iter(held.values())).device
        self.sent = torch.empty(sum(bucket.sent), dtype=dtype, device=device)
        start = 0
        for name, region in (item for regions in bucket.sends for item in regions):
            self.sent[start:start + region.numel].view(region.size).copy_(region.of(held[name]))
            start += region.numel
        self.received = torch.empty(sum(bucket.received), dtype=dtype, device=device)
        self.work = dist.all_to_all_single(self.received, self.sent, bucket.received, bucket.sent, group=group,
                                           async_op=True)

    def writes(self, traffic: Traffic) -> Iterator[list[Write]]:
        local = [Write(parameter, target, source.of(self.held[name]).to(self.dtype))
                 for name, source, parameter, target in self.bucket.local]
        traffic.written += sum(write.values.numel() for write in local)
        yield local
        if self.work is None:
            return
        self.work.wait()
        arrived, start = [], 0
        for places in (places for regions in self.bucket.receives for places in regions):
            size = places[0][1].size
            values = self.received[start:start + places[0][1].numel].view(size)
            arrived += [Write(parameter, target, values) for parameter, target in places]
            start += values.numel()
        traffic.received += start
        traffic.written += sum(write.values.numel() for write in arrived)
        yield arrived


def flat(weight: Tensor) -> Tensor:
    """What this rank holds of a weight, as one dimension, sharing memory."""
    held = weight.to_local() if isinstance(weight, DTensor) else weight
    return held.detach().reshape(-1)
