"""The weight channel: FSDP shards to the rollout engine, and checks that both engines mean the same model.

    layout of the engine ─> plan (once)        weights ─> exchange ─> engine, bucket by bucket (each sync)
"""

import math
import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.batch import make_batch
from hybridrl.config import SyncConfig
from hybridrl.errors import SyncError
from hybridrl.workers.rollout.engine import RolloutEngine
from hybridrl.workers.training.engine import TrainingEngine
from hybridrl.workers.weights.digests import Digests
from hybridrl.workers.weights.exchange import Traffic, exchange, sharding
from hybridrl.workers.weights.names import checkpoint_weights
from hybridrl.workers.weights.plan import make_plan
from hybridrl.workers.weights.regions import Copy, Write

DEFAULT_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Largest accepted log-prob gap by rollout dtype, where none is configured: far above rounding, far below stale."""


class WeightSync:
    """Brings a rollout engine to the weights of a training engine, as often as asked.

    Building one is collective over all ranks: every rank finds out where its rollout engine's parameters take their
    elements from, and all make one plan of it.

    Args:
        dtype: of the rollout engine's weights.
        tensor_parallel: consecutive ranks that share one rollout engine.
    Raises:
        SyncError: engine parameters that no weight of training fills.
    """

    def __init__(self, training: TrainingEngine, rollout: RolloutEngine, cfg: SyncConfig, dtype: torch.dtype,
                 tensor_parallel: int):
        self.training, self.rollout, self.cfg, self.dtype = training, rollout, cfg, dtype
        self.held = training.adapters if cfg.lora == "adapter" else training.weights
        """Yields what is sent, as training holds it."""
        weights, self.group = sharding(self.held())
        metas = {w.name: torch.empty(w.shape, dtype=dtype, device="meta") for w in weights}
        self.copies = rollout.layout(metas, partial(checkpoint_weights, training.model.causal_lm))
        by_peer = _layouts(self.copies, tensor_parallel)
        members = dist.get_process_group_ranks(self.group) if self.group else [dist.get_rank()]
        self.index = members.index(dist.get_rank())
        self.layouts = [by_peer[rank % tensor_parallel] for rank in members]
        self.weights = weights
        self.plan = make_plan(weights, self.layouts, self.index, (cfg.bucket_mib << 20) // dtype.itemsize)

    def run(self, version: int) -> dict[str, float]:
        """Replace the rollout engine's weights, as `version`. Collective over all ranks.

        Returns:
            `sync/version`, `sync/bytes` (written into this rank's engine), `sync/received_bytes` (from other ranks),
            `time/sync_load`, and with `verify=full` `time/sync_verify`.
        Raises:
            SyncError: weights that never arrived or arrived changed; the engine refuses to sample from then on.
        """
        started, traffic = time.perf_counter(), Traffic()
        digests = self.digests()
        self.rollout.load_weights(self.writes(traffic), version, digests.inspect if digests else None)
        metrics = {"sync/version": float(version), "sync/bytes": float(traffic.written * self.dtype.itemsize),
                   "sync/received_bytes": float(traffic.received * self.dtype.itemsize),
                   "time/sync_load": time.perf_counter() - started}
        if digests:
            started = time.perf_counter()
            self.compare_digests(digests, version)
            metrics["time/sync_verify"] = time.perf_counter() - started
        return metrics

    def writes(self, traffic: Traffic) -> Iterator[list[Write]]:
        """What this rank's engine is to write, as it becomes available."""
        return exchange(self.held(), self.plan, self.dtype, self.group, traffic)

    def digests(self) -> Digests | None:
        """Digests to be filled while weights are written; None unless `verify=full`."""
        return Digests(self.copies, self.dtype) if self.cfg.verify == "full" else None

    def check(self, gap: float, version: int) -> None:
        """Raise SyncError for a gap of the fingerprint above what is accepted; the engine then refuses to sample."""
        try:
            check_gap(gap, self.cfg, self.dtype, version)
        except SyncError:
            self.rollout.version = None
            raise

    def compare_digests(self, digests: Digests, version: int) -> None:
        """Raise SyncError when a slice of the engine has another digest than training's; it then refuses to sample."""
        sent = digests.of_training(self.held(), self.weights, self.layouts, self.index, self.group)
        different = digests.different(sent)
        count = torch.tensor(len(different), device=self.training.device)
        dist.all_reduce(count)
        if count:
            self.rollout.version = None
            names = ", ".join(different[:5]) or "all on other ranks"
            raise SyncError(f"after weight sync {version} the rollout engine has {int(count)} slices that differ from "
                            f"training: {names}.")


def _layouts(copies: list[Copy], tensor_parallel: int) -> list[list[Copy]]:
    """The layout of each tensor-parallel peer; every engine's peers have those of the first engine."""
    layouts: list[list[Copy]] = [copies] * tensor_parallel
    for peer in range(tensor_parallel if dist.get_world_size() > 1 else 0):
        box = [copies]
        dist.broadcast_object_list(box, src=peer)
        layouts[peer] = box[0]
    return layouts


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
