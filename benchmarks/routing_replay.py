"""What routing replay does against a rollout whose routers are noisy, and what it costs; the last line is JSON.

    python -m benchmarks.routing_replay [noise=0.1] [rows=256] [response_tokens=32]

The model is the demo's mixture with experts far apart (4 layers, 2 of 4 experts a token). Gaussian noise of `noise`
times their spread is added to the router scores of the rollout engine alone: some of its choices tip. `kl_k3` and `f2`
(tokens with a probability ratio above 2 or below 1/2) compare both engines' log-probs of the sampled tokens.
`..._live` is without replay, `..._replayed` with it. Seconds are medians of runs that take turns, over one batch: of
sampling with and without keeping experts, of log-probs, and of an update.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from hybridrl.algorithms.diagnostics import batch_mismatch
from hybridrl.algorithms.partials import finalize
from hybridrl.batch import from_lengths, lengths, make_batch, padded, select
from hybridrl.config import ClusterConfig, ModelConfig, PolicyConfig, RolloutConfig, TrainingConfig
from hybridrl.controller import Cluster, WorkerGroup
from hybridrl.dispatch import to_all
from hybridrl.workers.policy import PolicyWorker
from hybridrl.workers.rollout.routing_table import mixture_layers
from recipes.demo.make_moe import write_moe

REPETITIONS = 3
EXPERT_NOISE = 1.0
DEFAULTS = {"noise": "0.1", "rows": "256", "response_tokens": "32"}


class NoisyPolicy(PolicyWorker):
    """A policy whose rollout engine has noisy routers, and that measures itself."""

    @to_all
    def measure(self, noise: float, rows: int, response_tokens: int) -> dict[str, float]:
        """Gaps and seconds, with and without replay."""
        self._add_noise(noise)
        generator = torch.Generator().manual_seed(0)
        prompts = make_batch(prompt_ids=list(torch.randint(5, 100, (rows, 16), generator=generator)),
                             seeds=torch.arange(rows))
        batch = self.generate(prompts, max_tokens=response_tokens)
        engine: Any = self.rollout
        kept = engine._table, engine.mixture
        result = _medians({"generate_seconds_replayed": lambda: self._generate(prompts, response_tokens, *kept),
                           "generate_seconds_live": lambda: self._generate(prompts, response_tokens, None, None)})
        batch["loss_weights"] = from_lengths(
            torch.full((len(batch["response_ids"].values()),), 1e-6), lengths(batch["response_ids"]))
        for name, replay in {"live": "off", "replayed": "rollout"}.items():
            result |= {f"{key}_{name}": value for key, value in self._gaps(batch, replay).items()}
        for stage in ("log_probs", "update"):
            result |= _medians({f"{stage}_seconds_{name}": partial(self._train, batch, stage, replay)
                                for name, replay in {"live": "off", "replayed": "rollout"}.items()})
        experts, fed = batch["routed_experts"].values(), int(lengths(batch["routed_experts"]).sum())
        return result | {"bytes_per_token": experts.nbytes / fed, "tokens": fed}

    def _add_noise(self, noise: float) -> None:
        def noisy(module: Any, inputs: Any, output: Any) -> Any:
            scores = output[0]
            return (scores + noise * scores.std() * torch.randn_like(scores), *output[1:])

        self.sync_weights()
        engine: Any = self.rollout
        [modules] = engine.llm.apply_model(lambda model: dict(model.named_modules()))
        for name, module in modules.items():
            if name.endswith(".mlp.gate"):
                module.register_forward_hook(noisy)
        self.routers = [layer.router for layer in mixture_layers(modules[""])]
        self.hooks = [router.capture_fn for router in self.routers]

    def _generate(self, prompts: TensorDict, tokens: int, table: Any, mixture: Any) -> None:
        """Sample with or without keeping experts."""
        engine: Any = self.rollout
        engine._table, engine.mixture = table, mixture
        for router, hook in zip(self.routers, self.hooks, strict=True):
            router.set_capture_fn(hook if table is not None else None)
        self.generate(select(prompts, slice(None)), max_tokens=tokens)

    def _gaps(self, batch: TensorDict, replay: str) -> dict[str, float]:
        self._train(batch, "log_probs", replay)
        columns = {name: padded(batch[name]) for name in ("old_log_probs", "rollout_log_probs")}
        found = finalize(batch_mismatch(columns | {"mask": padded(batch["response_mask"])}))
        return {"kl_k3": found["mismatch/kl_k3"], "f2": found["mismatch/frac_beyond_2"],
                "max_gap": found["mismatch/max_gap"]}

    def _train(self, batch: TensorDict, stage: str, replay: str) -> None:
        self.enter_training()
        self.training.replay = replay
        if stage == "log_probs":
            self.log_probs(batch)
        else:
            self.update(batch, _loss)


def _loss(log_probs: Tensor, columns: dict[str, Tensor], entropies: Tensor | None) -> tuple[Tensor, dict]:
    return -(log_probs * columns["loss_weights"]).sum(), {}


def _medians(runs: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median seconds of each of several things, done in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPETITIONS):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main(words: list[str]) -> None:
    """Run with `key=value` words."""
    options = DEFAULTS | dict(word.split("=", 1) for word in words if "=" in word)
    unknown = [word for word in words if "=" not in word] + sorted(set(options) - set(DEFAULTS))
    if unknown:
        sys.exit(f"Unknown option {unknown[0]!r}; accepted: {', '.join(f'{name}=' for name in DEFAULTS)}.")
    rows, tokens = int(options["rows"]), int(options["response_tokens"])
    with tempfile.TemporaryDirectory() as folder, Cluster(ClusterConfig(backend="local")) as cluster:
        write_moe(Path(folder), EXPERT_NOISE)
        cfg = PolicyConfig(
            model=ModelConfig(path=folder), training=TrainingConfig(learning_rate=0.0), routing_replay="rollout",
            rollout=RolloutConfig(max_prompt_tokens=16, max_response_tokens=tokens, kv_cache_gib=0.25))
        policy = WorkerGroup(NoisyPolicy, cluster.pool(), cfg, role="policy")
        [result] = policy.measure(float(options["noise"]), rows, tokens)
    print(json.dumps({"noise": float(options["noise"]), "rows": rows} | result))


if __name__ == "__main__":
    main(sys.argv[1:])
