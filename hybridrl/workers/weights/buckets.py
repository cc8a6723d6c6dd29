"""Full weights from FSDP shards, a bucket at a time.

No rank ever holds a second full model: a bucket is gathered with one collective, handed on, and freed before
the next one. The cast to the engine's dtype comes before the gather, so that it halves what travels.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from hybridrl.workers.rollout.engine import Bucket


def full_buckets(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket_bytes: int) -> Iterator[Bucket]:
    """Yield the full weights in order, as buckets of at most `bucket_bytes` in `dtype`.

    Args:
        weights: (name, plain tensor or DTensor sharded on dimension 0 of a 1-D mesh), the same on every rank.
        dtype: dtype of what is yielded.
        bucket_bytes: size of a bucket; a larger single tensor gets a bucket of its own.
    """
    pending: list[tuple[str, Tensor]] = []
    size = 0
    for name, weight in weights:
        num_bytes = weight.numel() * dtype.itemsize
        if pending and size + num_bytes > bucket_bytes:
            yield _gather(pending, dtype)
            pending, size = [], 0
        pending.append((name, weight))
        size += num_bytes
    if pending:
        yield _gather(pending, dtype)


@torch.no_grad()
def _gather(weights: list[tuple[str, Tensor]], dtype: torch.dtype) -> Bucket:
    sharded = [weight for _, weight in weights if isinstance(weight, DTensor)]
    if not sharded or sharded[0].device_mesh.size() == 1:
        return [(name, _local(weight).to(dtype)) for name, weight in weights]
    mesh = sharded[0].device_mesh
    if mesh.ndim != 1 or any(w.placements != (Shard(0),) for w in sharded):
        return [(name, (w.full_tensor() if isinstance(w, DTensor) else w).to(dtype)) for name, w in weights]
    # One collective a bucket: each rank's rows, padded to the largest share, laid end to end.
    parts, shares = mesh.size(), [-(-w.shape[0] // mesh.size()) for w in sharded]
    device = sharded[0].device
    mine = torch.zeros(sum(s * _row_size(w) for s, w in zip(shares, sharded, strict=True)), dtype=dtype, device=device)
    start = 0
    for share, weight in zip(shares, sharded, strict=True):
        local = weight.to_local().reshape(-1)
        mine[start:start + local.numel()] = local
        start += share * _row_size(weight)
    everyone = torch.empty(parts * mine.numel(), dtype=dtype, device=device)
    dist.all_gather_into_tensor(everyone, mine, group=mesh.get_group())
    columns = everyone.view(parts, -1)
    bucket, start = [], 0
    for name, weight in weights:
        if not isinstance(weight, DTensor):
            bucket.append((name, weight.detach().to(dtype)))
            continue
        share = -(-weight.shape[0] // parts)
        rows = columns[:, start:start + share * _row_size(weight)].reshape(-1)
        bucket.append((name, rows[:weight.numel()].view(weight.shape)))
        start += share * _row_size(weight)
    return bucket


def _row_size(weight: Tensor) -> int:
    return weight.numel() // weight.shape[0] if weight.shape[0] else 0


def _local(weight: Tensor) -> Tensor:
    return weight.to_local().detach() if isinstance(weight, DTensor) else weight.detach()
