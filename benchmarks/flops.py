"""How much of the machine's matrix rate an update reaches; the last line is JSON.

    python -m benchmarks.flops [model=demo|smollm2|FOLDER] [rows=N] [median=N] [micro_batch_tokens=N] [repetitions=N]
                               [threads=N]

The batch is that of benchmarks.training. `mfu` is the model FLOP/s of an update over the rate of bare matrix products
at the same dtype and shapes, measured in the same run. Model FLOPs are those of the linear layers and of causal
attention, forward and backward once: what is computed again does not count. The seconds of an update include
everything, the optimizer's step too.
"""

import json
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from benchmarks import matrix_rate
from benchmarks.training import DEMO, LEARNING_RATE, MAX_GRAD_NORM, grpo_like_batch, policy_gradient
from hybridrl.batch import lengths
from hybridrl.config import ModelConfig, TrainingConfig
from hybridrl.models import resolve_model
from hybridrl.workers.training.engine import TrainingEngine

DEFAULTS = {"model": "smollm2", "rows": "32", "median": "32", "micro_batch_tokens": "2048", "repetitions": "3",
            "threads": "0"}


def attention_flops(config, lengths: list[int]) -> int:
    """Scores and weighted sums of all layers, forward: half of the T x T square, which is what causality leaves."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return sum(2 * t * t * size * config.num_attention_heads * config.num_hidden_layers for t in lengths)


def main(words: list[str]) -> None:
    """Measure on one rank and print the JSON line."""
    options = DEFAULTS | dict(word.split("=", 1) for word in words)
    if set(options) != set(DEFAULTS):
        sys.exit(__doc__)
    if int(options["threads"]):
        torch.set_num_threads(int(options["threads"]))
    with tempfile.TemporaryDirectory() as scratch:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
        print(json.dumps(measure(options)))
        dist.destroy_process_group()


def measure(options: dict[str, str]) -> dict[str, object]:
    """All fields of the JSON line."""
    folder = resolve_model(str(DEMO) if options["model"] == "demo" else options["model"])
    cfg = TrainingConfig(learning_rate=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM,
                         micro_batch_tokens=int(options["micro_batch_tokens"]))
    engine = TrainingEngine(ModelConfig(path=str(folder)), cfg, torch.device("cpu"))
    causal_lm = engine.model.causal_lm
    batch = grpo_like_batch(int(options["rows"]), int(options["median"]), causal_lm.config.vocab_size)
    parts = engine._micro_batches(batch)
    fed = [part.input_ids.shape[1] for part in parts]
    shapes = matrix_rate.linear_shapes(causal_lm, fed, [len(part.targets) for part in parts])
    rows = (lengths(batch["prompt_ids"]) + lengths(batch["response_ids"]) - 1).tolist()
    model_flops = 3 * (matrix_rate.flops(shapes) + attention_flops(causal_lm.config, rows))

    seconds, rates = [], []
    for repetition in range(int(options["repetitions"]) + 1):
        started = time.perf_counter()
        engine.update(batch, policy_gradient)
        if repetition:  # the first makes the optimizer's state and warms up
            seconds.append(time.perf_counter() - started)
            rates.append(3 * matrix_rate.flops(shapes) / matrix_rate.seconds(shapes, backward=True))
    update_s, rate = statistics.median(seconds), statistics.median(rates)
    return {"model": options["model"], "fed_tokens": sum(fed), "micro_batches": len(fed),
            "update_s": round(update_s, 3), "model_flops": model_flops, "flops_per_s": round(model_flops / update_s),
            "matrix_flops_per_s": round(rate), "mfu": round(model_flops / update_s / rate, 3),
            "threads": torch.get_num_threads()}


if __name__ == "__main__":
    main(sys.argv[1:])
