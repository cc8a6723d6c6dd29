"""What one weight sync costs, and whether it is exact; the last line is JSON.

    python -m benchmarks.weight_sync [model=tiny|smollm2|FOLDER] [ranks=N] [tensor_parallel=T]

`bytes` are one rank's full weights in the engine's dtype, as they are handed to it. `memcpy_seconds` copies the same
bytes in the same process, in turn with the syncs; `ratio` is seconds / memcpy_seconds. The gaps are the largest
difference of the two engines' log-probs of a few tokens, after changing every weight and after the sync.
`extra_peak_bytes` is how far the sync raises the process's memory above where it was (the largest rank).
"""

import json
import statistics
import sys
import threading
import time
from pathlib import Path

import psutil
import torch

from hybridrl.config import ClusterConfig, ModelConfig, PolicyConfig, RolloutConfig, SyncConfig
from hybridrl.controller import Cluster, WorkerGroup
from hybridrl.dispatch import to_all
from hybridrl.workers.policy import PolicyWorker
from hybridrl.workers.weights.sync import fingerprint_ids, largest_gap, sync_weights, training_log_probs

REPETITIONS = 5
TINY = Path(__file__).resolve().parents[1] / "recipes" / "demo" / "model"
DEFAULTS = {"model": "tiny", "ranks": "1", "tensor_parallel": "1"}


class PeakMemory:
    """Largest memory of this process while inside, over what it was on entering, in bytes."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.extra = 0

    def __enter__(self) -> "PeakMemory":
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated() if self.cuda else psutil.Process().memory_info().rss
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()
        if self.cuda:
            self.extra = torch.cuda.max_memory_allocated() - self.before

    def _watch(self) -> None:
        process = psutil.Process()
        while not self._done.wait(0.001) and not self.cuda:
            self.extra = max(self.extra, process.memory_info().rss - self.before)


class MeasuredPolicy(PolicyWorker):
    """A policy that times its own syncs."""

    @to_all
    def measure(self, repetitions: int) -> dict[str, float]:
        """Medians over `repetitions` syncs, each after a change of every weight."""
        self.sync_weights()
        rows = []
        for _ in range(repetitions):
            with torch.no_grad():
                for _, weight in self.training.weights():
                    weight.to_local().mul_(1.001)
            before = self._gap()
            with PeakMemory(self.device) as memory:
                started = time.perf_counter()
                counted = sync_weights(self.training, self.rollout, self.cfg.sync, self.dtype, self.version + 1)
                seconds = time.perf_counter() - started
            self.version += 1
            rows.append({"bytes": counted["sync/bytes"], "seconds": seconds, "memcpy_seconds": self._memcpy(),
                         "before": before, "after": self._gap(), "extra": memory.extra})
        middle = {name: statistics.median(row[name] for row in rows) for name in ("bytes", "seconds", "memcpy_seconds")}
        return middle | {"before": min(row["before"] for row in rows), "after": max(row["after"] for row in rows),
                         "extra": max(row["extra"] for row in rows)}

    def _gap(self) -> float:
        ids = fingerprint_ids(32, len(self.tokenizer))
        return largest_gap(self.rollout.score(ids), training_log_probs(self.training, ids))

    def _memcpy(self) -> float:
        """Seconds to copy a model's bytes once, tensor by tensor, into memory that exists already."""
        sources = [torch.empty(w.shape, dtype=self.dtype, device=self.device) for _, w in self.training.weights()]
        targets = [torch.zeros_like(source) for source in sources]
        started = time.perf_counter()
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started


def main(words: list[str]) -> None:
    """Run with `key=value` words."""
    options = DEFAULTS | dict(word.split("=", 1) for word in words if "=" in word)
    unknown = [word for word in words if "=" not in word] + sorted(set(options) - set(DEFAULTS))
    if unknown:
        sys.exit(f"Unknown option {unknown[0]!r}; accepted: model=, ranks=, tensor_parallel=.")
    ranks, shared = int(options["ranks"]), int(options["tensor_parallel"])
    cfg = PolicyConfig(
        model=ModelConfig(path=str(TINY) if options["model"] == "tiny" else options["model"]), sync=SyncConfig(),
        rollout=RolloutConfig(tensor_parallel=shared, max_prompt_tokens=64, max_response_tokens=64))
    with Cluster(ClusterConfig(ranks=ranks)) as cluster:
        policy = WorkerGroup(MeasuredPolicy, cluster.pool(), cfg, role="policy")
        by_rank = policy.measure(REPETITIONS)
    result = {name: by_rank[0][name] for name in ("bytes", "seconds", "memcpy_seconds")}
    print(json.dumps({
        "model": options["model"], "ranks": ranks, "tensor_parallel": shared, **result,
        "ratio": result["seconds"] / result["memcpy_seconds"],
        "max_log_prob_gap_before": min(rank["before"] for rank in by_rank),
        "max_log_prob_gap_after": max(rank["after"] for rank in by_rank),
        "extra_peak_bytes": max(rank["extra"] for rank in by_rank), "bucket_bytes": cfg.sync.bucket_mib << 20}))


if __name__ == "__main__":
    main(sys.argv[1:])
