"""What a weight patch costs; the last line is JSON.

    python -m benchmarks.delta_sync [parameters=135e6] [density=0.01] [repetitions=7]
    python -m benchmarks.delta_sync model=smollm2|FOLDER [learning_rate=1e-6] [steps=20] [rows=8]
    python -m benchmarks.delta_sync model=smollm2|FOLDER engine=vllm|transformers [ranks=2] [density=0.01]

The weights are bfloat16, in tensors of the sizes of a Llama model. A `density` of their elements, uniformly spread,
moves by one or two units in the last place each time. `encode_ms` is from weights to bytes, `apply_ms` from bytes to
weights that are verified and written, `full_encode_ms` and `full_apply_ms` the same for a full state. In the same
process and in turn with them: `memcpy_ms` copies all weights, tensor by tensor; `index_put_ms` writes the entries that
changed with one flat index_put. All are medians. `compression` is full bytes / patch bytes.

With `model`, the changes are those of training it: `steps` policy-gradient steps, each on `rows` new rows whose
advantages are drawn from a normal distribution, with float32 master weights and AdamW's defaults; after each step a
patch in bfloat16 is made. `changed_frac` and `compression` are then given for each step.

With `engine` too, a policy's two engines in the same processes are synced, by `policy.sync.mode=full` and by `delta`,
after a change of a `density` of the elements: seconds and bytes from other ranks, medians.
"""

import json
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from hybridrl.batch import make_batch
from hybridrl.config import ClusterConfig, ModelConfig, PolicyConfig, RolloutConfig, TrainingConfig
from hybridrl.controller import Cluster, WorkerGroup
from hybridrl.dispatch import to_all
from hybridrl.models import load_tokenizer, resolve_model
from hybridrl.workers.policy import PolicyWorker
from hybridrl.workers.training.engine import TrainingEngine
from hybridrl.workers.weights.delta_sync import DeltaSync
from hybridrl.workers.weights.patch_chain import PatchReceiver, PatchSender
from hybridrl.workers.weights.sync import WeightSync

DEFAULTS = {"parameters": "135e6", "density": "0.01", "repetitions": "7", "model": "", "learning_rate": "1e-6",
            "steps": "20", "rows": "8", "engine": "", "ranks": "2"}
HIDDEN, INTERMEDIATE, VALUES = 576, 1536, 192


def shapes(parameters: int) -> list[tuple[int, ...]]:
    """Shapes of an embedding and of Llama layers (SmolLM2's), the last one cut, with `parameters` elements in all."""
    layer = [(HIDDEN, HIDDEN), (VALUES, HIDDEN), (VALUES, HIDDEN), (HIDDEN, HIDDEN),
             *[(INTERMEDIATE, HIDDEN)] * 3, (HIDDEN,), (HIDDEN,)]
    found: list[tuple[int, ...]] = []
    left = parameters
    for shape in [(49152, HIDDEN), *layer * (1 + parameters // sum(torch.Size(s).numel() for s in layer))]:
        size = min(torch.Size(shape).numel(), left)
        if size:
            found.append(shape if size == torch.Size(shape).numel() else (size,))
        left -= size
    return found


def train(weights: dict[str, Tensor], density: float, generator: torch.Generator) -> None:
    """Move a share of the elements by -2, -1, 1 or 2 units in the last place."""
    for weight in weights.values():
        moved = (torch.rand(weight.numel(), generator=generator) < density).nonzero().squeeze(1)
        steps = torch.tensor([-2, -1, 1, 2], dtype=torch.int16)
        weight.view(-1).view(torch.int16)[moved] += steps[torch.randint(4, moved.shape, generator=generator)]


class Clock:
    """Milliseconds of what is done inside."""

    def __enter__(self) -> "Clock":
        self.started = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self.ms = (time.perf_counter() - self.started) * 1e3


def entries(before: list[Tensor], after: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Positions and values of what changed, in all weights laid end to end."""
    old, new = (torch.cat([weight.view(-1) for weight in weights]) for weights in (before, after))
    index = (old.view(torch.int16) != new.view(torch.int16)).nonzero().squeeze(1)
    return index, new[index]


def measure(parameters: int, density: float, repetitions: int) -> dict[str, object]:
    """Medians over patches in a chain, after a full state and one patch that warms up."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"weights.{i}": (torch.randn(shape, generator=generator) * 0.02).bfloat16()
               for i, shape in enumerate(shapes(parameters))}
    held = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    copies = [torch.zeros_like(weight) for weight in weights.values()]
    flat = torch.zeros(parameters, dtype=torch.bfloat16)
    sender, receiver = PatchSender(torch.bfloat16), PatchReceiver(held)
    rows: list[dict[str, float]] = []
    identical = True
    for version in range(repetitions + 2):
        train(weights, density, generator)
        with Clock() as encode:
            data = sender.encode(weights.items(), version)
        index, values = entries(list(held.values()), list(weights.values()))
        with Clock() as apply:
            receiver.apply(data)
        with Clock() as memcpy:
            for copy, weight in zip(copies, weights.values(), strict=True):
                copy.copy_(weight)
        with Clock() as put:
            flat.index_put_((index,), values)
        with Clock() as acknowledge:
            sender.acknowledge(version)
        identical &= all(torch.equal(held[name].view(torch.int16), weight.view(torch.int16))
                         for name, weight in weights.items())
        rows.append({"encode_ms": encode.ms, "apply_ms": apply.ms, "memcpy_ms": memcpy.ms, "index_put_ms": put.ms,
                     "acknowledge_ms": acknowledge.ms, "patch_bytes": len(data), "changed_frac": sender.changed_frac})
    middle = {name: statistics.median(row[name] for row in rows[2:]) for name in rows[0]}
    full_bytes = sum(weight.nbytes for weight in weights.values())
    return {"parameters": parameters, "density": density, **middle, "full_bytes": full_bytes,
            "compression": full_bytes / middle["patch_bytes"],
            "encode_per_memcpy": middle["encode_ms"] / middle["memcpy_ms"],
            "apply_per_index_put": middle["apply_ms"] / middle["index_put_ms"],
            "full_encode_ms": rows[0]["encode_ms"], "full_apply_ms": rows[0]["apply_ms"],
            "threads": torch.get_num_threads(), "bit_identical": identical}


def policy_gradient(log_probs: Tensor, columns: dict[str, Tensor], entropies: Tensor | None) -> tuple[Tensor, dict]:
    """The advantage times the log-prob, averaged over the batch's tokens by its weights."""
    return -(log_probs * columns["advantages"] * columns["loss_weights"]).sum(), {}


def train_model(model: str, learning_rate: float, steps: int, rows: int) -> dict[str, object]:
    """Changed fraction and compression after each step of training."""
    folder = resolve_model(model)
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    engine = TrainingEngine(ModelConfig(path=str(folder)), TrainingConfig(learning_rate=learning_rate),
                            torch.device("cpu"))
    sender, generator = PatchSender(torch.bfloat16), torch.Generator().manual_seed(0)
    changed, compression = [], []
    for version in range(steps + 1):
        data = sender.encode(((name, weight.to_local()) for name, weight in engine.weights()), version)
        sender.acknowledge(version)
        if version:
            changed.append(sender.changed_frac)
            compression.append(2 * engine.num_parameters / len(data))
        if version < steps:
            engine.update(sums(tokenizer, rows, generator), policy_gradient)
    return {"model": model, "learning_rate": learning_rate, "steps": steps, "rows": rows,
            "changed_frac": changed, "compression": compression,
            "changed_frac_mean": statistics.mean(changed), "compression_mean": statistics.mean(compression)}


def sums(tokenizer: Any, rows: int, generator: torch.Generator) -> TensorDict:
    """Sums and answers of a sentence, each with one advantage."""
    numbers = torch.randint(100, (rows, 2), generator=generator).tolist()
    prompts = [tokenizer(f"What is {a} plus {b}?").input_ids for a, b in numbers]
    responses = [tokenizer(f" The sum of {a} and {b} is {a + b}.").input_ids for a, b in numbers]
    advantages = torch.randn(rows, generator=generator).tolist()
    tokens = sum(map(len, responses))
    return make_batch(prompt_ids=prompts, response_ids=responses,
                      advantages=[[a] * len(r) for a, r in zip(advantages, responses, strict=True)],
                      loss_weights=[[1 / tokens] * len(r) for r in responses])


class MeasuredPolicy(PolicyWorker):
    """A policy that times its own syncs."""

    @to_all
    def measure(self, mode: str, density: float, repetitions: int) -> dict[str, float]:
        """Medians of what syncs by this mode report, after a first one."""
        self.weight_sync = (DeltaSync if mode == "delta" else WeightSync)(
            self.training, self.rollout, self.cfg.sync, self.dtype, self.peers("rollout"))
        rows = []
        for version in range(self.version + 1, self.version + repetitions + 2):
            rows.append(self.weight_sync.run(version))
            for _, weight in self.training.weights():
                held = weight.to_local()  # shares memory with training
                held.mul_(1 + 0.1 * (torch.rand(held.shape) < density))
        self.version += repetitions + 1
        return {f"{mode}_{name}": statistics.median(row[f"{group}/{name}"] for row in rows[1:])
                for group, name in (("time", "sync_load"), ("sync", "received_bytes"))}


def measure_policy(model: str, engine: str, ranks: int, density: float, repetitions: int) -> dict[str, object]:
    """Both modes in one policy."""
    cfg = PolicyConfig(model=ModelConfig(path=model), rollout=RolloutConfig(
        engine=engine, max_prompt_tokens=64, max_response_tokens=64, kv_cache_gib=0.1))
    with Cluster(ClusterConfig(ranks=ranks)) as cluster:
        policy = WorkerGroup(MeasuredPolicy, cluster.pool(), cfg, role="policy")
        found = [policy.measure(mode, density, repetitions)[0] for mode in ("full", "delta")]
    return {"model": model, "engine": engine, "ranks": ranks, "density": density, **found[0], **found[1]}


def main(words: list[str]) -> None:
    """Run with `key=value` words."""
    options = DEFAULTS | dict(word.split("=", 1) for word in words if "=" in word)
    unknown = [word for word in words if "=" not in word] + sorted(set(options) - set(DEFAULTS))
    if unknown:
        sys.exit(f"Unknown option {unknown[0]!r}; accepted: {', '.join(f'{name}=' for name in DEFAULTS)}.")
    if not options["model"]:
        print(json.dumps(measure(int(float(options["parameters"])), float(options["density"]),
                                 int(options["repetitions"]))))
        return
    if options["engine"]:
        print(json.dumps(measure_policy(options["model"], options["engine"], int(options["ranks"]),
                                        float(options["density"]), int(options["repetitions"]))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
        print(json.dumps(train_model(options["model"], float(options["learning_rate"]), int(options["steps"]),
                                     int(options["rows"]))))
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
