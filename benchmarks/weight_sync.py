"""What one weight sync costs, and whether it is exact; the last line is JSON.

    python -m benchmarks.weight_sync [model=tiny|moe|smollm2|FOLDER] [ranks=N] [tensor_parallel=T] [verify=NAME]

`moe` is a mixture of 16 experts with 20 million parameters, made on the spot. `bytes` are written into one rank's
engine. `received_bytes_per_rank` came from other ranks, `needed_bytes_per_rank` are what a rank's engine reads and the
rank does not hold, each element once; `traffic_ratio` is the one over the other, of the rank where it is largest (1 if
none are needed). `memcpy_seconds` copies `bytes` in the same process, in turn with the syncs, and `repack_seconds` is
the engine's own packing of parameters that are filled already; the ratios are `seconds` over those. The gaps are the
largest difference of the two engines' log-probs of a few tokens, after changing every weight and after the sync.
`extra_peak_bytes` is how far the sync raises the process's memory above where it was (the largest rank).
"""

import json
import statistics
import sys
import tempfile
import threading
import time
from math import prod
from pathlib import Path
from typing import Any

import psutil
import torch

from hybridrl.config import ClusterConfig, ModelConfig, PolicyConfig, RolloutConfig, SyncConfig
from hybridrl.controller import Cluster, WorkerGroup
from hybridrl.dispatch import to_all
from hybridrl.workers.policy import PolicyWorker
from hybridrl.workers.rollout.vllm_engine import VLLMEngine
from hybridrl.workers.weights.plan import needed_elements
from hybridrl.workers.weights.sync import fingerprint_ids, largest_gap, training_log_probs

REPETITIONS = 5
TINY = Path(__file__).resolve().parents[1] / "recipes" / "demo" / "model"
DEFAULTS = {"model": "tiny", "ranks": "1", "tensor_parallel": "1", "verify": "none"}


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
            assert isinstance(self.rollout, VLLMEngine)
            repack = self.rollout.llm.collective_rpc(repack_seconds, args=(self.rollout.found,))[0]
            torch.distributed.barrier()
            with PeakMemory(self.device) as memory:
                started = time.perf_counter()
                counted = self.weight_sync.run(self.version + 1)
                seconds = time.perf_counter() - started
            self.version += 1
            rows.append({"bytes": counted["sync/bytes"], "received": counted["sync/received_bytes"],
                         "seconds": seconds, "memcpy_seconds": self._memcpy(int(counted["sync/bytes"])),
                         "repack_seconds": repack, "before": before, "after": self._gap(), "extra": memory.extra})
        middle = {name: statistics.median(row[name] for row in rows)
                  for name in ("bytes", "received", "seconds", "memcpy_seconds", "repack_seconds")}
        channel, size = self.weight_sync, self.dtype.itemsize
        return middle | {"needed": size * needed_elements(channel.weights, channel.copies, channel.index),
                         "model": size * sum(prod(weight.shape) for weight in channel.weights),
                         "before": min(row["before"] for row in rows), "after": max(row["after"] for row in rows),
                         "extra": max(row["extra"] for row in rows)}

    def _gap(self) -> float:
        ids = fingerprint_ids(32, len(self.tokenizer))
        return largest_gap(self.rollout.score(ids), training_log_probs(self.training, ids))

    def _memcpy(self, num_bytes: int) -> float:
        """Seconds to copy bytes once into memory that exists already."""
        source = torch.ones(num_bytes, dtype=torch.uint8, device=self.device)
        target = torch.zeros_like(source)
        started = time.perf_counter()
        target.copy_(source)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started


def repack_seconds(worker: Any, layout: Any) -> float:
    """Run in vLLM's worker: seconds it takes to pack every layer, whose parameters are in memory and filled."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

    from hybridrl.workers.rollout.vllm_weights import Layers, parameters_of, restore

    model, seconds = worker.model_runner.get_model(), 0.0
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        restore(model)
        layers = Layers(layout, parameters_of(model), None)
        for layer in layers.missing:
            layers.open(layer)
            for parameter in layer.parameters(recurse=False):
                parameter.fill_(0.01)
            started = time.perf_counter()
            layers.close(layer)
            seconds += time.perf_counter() - started
        finalize_layerwise_reload(model, worker.model_runner.model_config)
    return seconds


def write_mixture(folder: Path) -> Path:
    """A mixture of experts with random weights, and the demo's tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=256,
        max_position_embeddings=512, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main(words: list[str]) -> None:
    """Run with `key=value` words."""
    options = DEFAULTS | dict(word.split("=", 1) for word in words if "=" in word)
    unknown = [word for word in words if "=" not in word] + sorted(set(options) - set(DEFAULTS))
    if unknown:
        sys.exit(f"Unknown option {unknown[0]!r}; accepted: {', '.join(f'{name}=' for name in DEFAULTS)}.")
    ranks, shared = int(options["ranks"]), int(options["tensor_parallel"])
    with tempfile.TemporaryDirectory() as scratch:
        path = {"tiny": TINY, "moe": scratch}.get(options["model"], options["model"])
        if options["model"] == "moe":
            write_mixture(Path(scratch))
        cfg = PolicyConfig(
            model=ModelConfig(path=str(path)), sync=SyncConfig(verify=options["verify"]),
            rollout=RolloutConfig(tensor_parallel=shared, max_prompt_tokens=64, max_response_tokens=64))
        with Cluster(ClusterConfig(ranks=ranks)) as cluster:
            policy = WorkerGroup(MeasuredPolicy, cluster.pool(), cfg, role="policy")
            by_rank = policy.measure(REPETITIONS)
    result = {name: by_rank[0][name] for name in ("bytes", "seconds", "memcpy_seconds", "repack_seconds")}
    ratios = [rank["received"] / rank["needed"] if rank["needed"] else 1.0 + rank["received"] for rank in by_rank]
    print(json.dumps({
        "model": options["model"], "ranks": ranks, "tensor_parallel": shared, **result,
        "ratio": result["seconds"] / result["memcpy_seconds"],
        "ratio_to_repack": result["seconds"] / result["repack_seconds"],
        "model_bytes": by_rank[0]["model"], "received_bytes_per_rank": [rank["received"] for rank in by_rank],
        "needed_bytes_per_rank": [rank["needed"] for rank in by_rank], "traffic_ratio": max(ratios),
        "max_log_prob_gap_before": min(rank["before"] for rank in by_rank),
        "max_log_prob_gap_after": max(rank["after"] for rank in by_rank),
        "extra_peak_bytes": max(rank["extra"] for rank in by_rank), "bucket_bytes": cfg.sync.bucket_mib << 20}))


if __name__ == "__main__":
    main(sys.argv[1:])
