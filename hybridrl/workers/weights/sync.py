"""One weight sync: FSDP shards to the rollout engine, and a check that both engines mean the same model."""

import math
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.batch import make_batch
from hybridrl.config import SyncConfig
from hybridrl.errors import SyncError
from hybridrl.workers.rollout.engine import Bucket, RolloutEngine
from hybridrl.workers.training.engine import TrainingEngine
from hybridrl.workers.weights.buckets import full_buckets
from hybridrl.workers.weights.names import checkpoint_buckets

DEFAULT_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Largest accepted log-prob gap by rollout dtype, where none is configured: far above rounding, far below stale."""


def sync_weights(training: TrainingEngine, rollout: RolloutEngine, cfg: SyncConfig, dtype: torch.dtype,
                 version: int) -> dict[str, float]:
    """Replace the rollout engine's weights by the training engine's, as `version`. Collective over all ranks.

    Args:
        dtype: dtype of the rollout engine's weights.
    Returns:
        `sync/version`, `sync/bytes` (handed to this rank's engine), `time/sync_load`.
    Raises:
        SyncError: engine weights that never arrived; the engine refuses to sample from then on.
    """
    started, counter = time.perf_counter(), {"bytes": 0}
    merged = cfg.lora == "merged"
    buckets = full_buckets(training.weights() if merged else training.adapters(), dtype, cfg.bucket_mib << 20)
    if rollout.checkpoint_names and merged:
        buckets = checkpoint_buckets(training.model.causal_lm, buckets)
    rollout.load_weights(_counted(buckets, counter), version)
    return {"sync/version": float(version), "sync/bytes": float(counter["bytes"]),
            "time/sync_load": time.perf_counter() - started}


def _counted(buckets: Iterator[Bucket], counter: dict[str, int]) -> Iterator[Bucket]:
    for bucket in buckets:
        counter["bytes"] += sum(weight.numel() * weight.element_size() for _, weight in bucket)
        yield bucket


def fingerprint_ids(num_tokens: int, vocabulary: int) -> list[int]:
    """num_tokens + 1 fixed token ids below `vocabulary`: the first is context, the others are scored."""
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(vocabulary, (num_tokens + 1,), generator=generator).tolist()


def training_log_probs(training: TrainingEngine, ids: list[int]) -> Tensor:
    """Log-probs [num_tokens] of ids[1:] under the training weights, at temperature 1. Collective."""
    row = make_batch(prompt_ids=[ids[:1]], response_ids=[ids[1:]])
    return training.log_probs(row)["log_probs"].values()


def largest_gap(scored: list[float], trained: Tensor) -> float:
    """Largest difference between the engines' log-probs of the same tokens, over all ranks. Collective."""
    gap = (torch.tensor(scored) - trained).abs().max()
    # NaN would pass every comparison and lose every maximum.
    gap = torch.nan_to_num(gap, nan=torch.inf).reshape(1)
    dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    return float(gap)


def check_gap(gap: float, cfg: SyncConfig, dtype: torch.dtype, version: int) -> None:
    """Raise SyncError when the fingerprint's gap is above what `cfg` (or the dtype) accepts."""
    accepted = cfg.max_gap or DEFAULT_GAP[dtype]
    if math.isinf(gap):
        raise SyncError(f"after weight sync {version} log-probs are not finite: training has diverged "
                        "(policy.training.learning_rate), or the weights it started from are damaged.")
    if not gap <= accepted:
        raise SyncError(f"after weight sync {version} the engines' log-probs differ by {gap:.3g}, more than the "
                        f"accepted {accepted:g} (policy.sync.max_gap): the rollout engine has other weights.")
