"""Log-probs and updates of the training engine against a plain loop, in turn in one process; the last line is JSON.

    python -m benchmarks.training [model=demo|smollm2|FOLDER] [rows=N] [median=N] [repetitions=N] [threads=N]

The batch has GRPO-like lengths: responses log-normal with the longest 8 times the median, 8 responses a prompt.
The plain loop is what a script does: the Hugging Face model with SDPA, right padding to the longest row of each
PLAIN_ROWS rows, all logits, log_softmax, AdamW. Both are float32 and make the same steps from the same weights: the
gaps are the relative differences of loss and gradient norm over the steps. Tokens per second count useful tokens,
prompt and response; `useful_token_frac` is their share in what the plain loop computes. `peak_bytes` of a pass is
how far it raises the process's resident memory, gradients and logits included, the larger of its two passes.
"""

import ctypes
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridrl.batch import lengths, make_batch, num_rows, padded, select
from hybridrl.config import ModelConfig, TrainingConfig
from hybridrl.models import resolve_model
from hybridrl.workers.training.engine import TrainingEngine

DEMO = Path(__file__).resolve().parents[1] / "recipes" / "demo" / "model"
DEFAULTS = {"model": "demo", "rows": "32", "median": "32", "repetitions": "5", "threads": "0"}
LEARNING_RATE, MAX_GRAD_NORM, PROMPT_TOKENS, LONGEST, PER_PROMPT, PLAIN_ROWS = 1e-5, 1.0, 16, 8, 8, 8


def grpo_like_batch(rows: int, median: int, vocabulary: int) -> TensorDict:
    """Response lengths at the quantiles of a log-normal whose largest is 8 medians, in random order."""
    g = torch.Generator().manual_seed(0)
    normal = torch.special.ndtri((torch.arange(rows) + 0.5) / rows)
    sizes = (median * (normal * math.log(LONGEST) / normal.max()).exp()).round().clamp(min=1).long()
    sizes = sizes[torch.randperm(rows, generator=g)].tolist()
    prompts = [torch.randint(0, vocabulary, (PROMPT_TOKENS,), generator=g) for _ in range(-(-rows // PER_PROMPT))]
    return make_batch(prompt_ids=[prompts[i // PER_PROMPT] for i in range(rows)],
                      response_ids=[torch.randint(0, vocabulary, (n,), generator=g) for n in sizes],
                      advantages=[torch.randn(1, generator=g).expand(n) / sum(sizes) for n in sizes])


class PlainLoop:
    """The loop that a script writes."""

    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self.computed_tokens = 0

    def _passes(self, batch: TensorDict) -> Iterator[tuple[TensorDict, Tensor]]:
        """PLAIN_ROWS rows at a time with their log-probs [b, R], padding included."""
        for start in range(0, num_rows(batch), PLAIN_ROWS):
            part = select(batch, range(start, min(start + PLAIN_ROWS, num_rows(batch))))
            responses = padded(part["response_ids"])
            inputs = torch.cat([padded(part["prompt_ids"]), responses], dim=1)
            prompt = inputs.shape[1] - responses.shape[1]
            mask = torch.arange(inputs.shape[1]) < prompt + lengths(part["response_ids"])[:, None]
            self.computed_tokens += inputs.numel()
            logits = self.model(input_ids=inputs, attention_mask=mask.long(), use_cache=False).logits
            log_probs = torch.log_softmax(logits[:, prompt - 1:-1], dim=-1)
            yield part, log_probs.gather(2, responses[..., None])[..., 0]

    @torch.no_grad()
    def log_probs(self, batch: TensorDict) -> list[Tensor]:
        return [log_probs for _, log_probs in self._passes(batch)]

    def update(self, batch: TensorDict) -> tuple[float, float]:
        total = 0.0
        for part, log_probs in self._passes(batch):
            loss = -(log_probs * padded(part["advantages"])).sum()
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM).item()
        self.adamw.step()
        self.adamw.zero_grad()
        return total, norm


def policy_gradient(log_probs: Tensor, columns: dict[str, Tensor], entropies: Tensor | None) -> tuple[Tensor, dict]:
    return -(log_probs * columns["advantages"]).sum(), {}


def measured(call: Callable[[], object]) -> tuple[float, int, object]:
    """Seconds of a call, how far it raised the resident memory, and its result."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark to what is resident now
    before, started = _high_water(), time.perf_counter()
    result = call()
    return time.perf_counter() - started, _high_water() - before, result


def _high_water() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main(words: list[str]) -> None:
    """Compare on one rank and print the JSON line."""
    options = DEFAULTS | dict(word.split("=", 1) for word in words)
    if set(options) != set(DEFAULTS):
        sys.exit(__doc__)
    if int(options["threads"]):
        torch.set_num_threads(int(options["threads"]))
    folder = resolve_model(str(DEMO) if options["model"] == "demo" else options["model"])
    with tempfile.TemporaryDirectory() as scratch:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
        print(json.dumps(compare(folder, options)))
        dist.destroy_process_group()


def compare(folder: Path, options: dict[str, str]) -> dict[str, object]:
    """All fields of the JSON line."""
    cfg = TrainingConfig(learning_rate=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM)
    ours = TrainingEngine(ModelConfig(path=str(folder)), cfg, torch.device("cpu"))
    plain = PlainLoop(folder)
    batch = grpo_like_batch(int(options["rows"]), int(options["median"]), plain.model.config.vocab_size)
    useful = int(lengths(batch["prompt_ids"]).sum() + lengths(batch["response_ids"]).sum())

    calls = {"log_probs": lambda: ours.log_probs(batch), "plain_log_probs": lambda: plain.log_probs(batch),
             "update": lambda: ours.update(batch, policy_gradient), "plain_update": lambda: plain.update(batch)}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    peaks: dict[str, int] = {}
    gaps = {"loss_gap": 0.0, "grad_norm_gap": 0.0}
    for repetition in range(int(options["repetitions"]) + 1):
        results = {}
        for name, call in calls.items():
            took, peak, results[name] = measured(call)
            if repetition:  # the first makes AdamW's state and warms up
                seconds[name].append(took)
                peaks[name] = max(peaks.get(name, 0), peak)
        loss, norm = results["plain_update"]
        for name, a, b in (("loss_gap", results["update"]["loss"], loss),
                           ("grad_norm_gap", results["update"]["grad_norm"], norm)):
            gaps[name] = max(gaps[name], abs(a - b) / abs(b))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    peak, plain_peak = (max(peaks[f"{who}{name}"] for name in ("log_probs", "update")) for who in ("", "plain_"))
    passes = 2 * (int(options["repetitions"]) + 1)
    return {"model": options["model"], "rows": num_rows(batch), "tokens": useful,
            "useful_token_frac": round(useful * passes / plain.computed_tokens, 4),
            **{f"{name}_tokens_per_s": round(useful / took, 1) for name, took in medians.items()},
            "log_probs_speedup": round(medians["plain_log_probs"] / medians["log_probs"], 3),
            "speedup": round(medians["plain_update"] / medians["update"], 3),
            "peak_bytes": peak, "plain_peak_bytes": plain_peak, "peak_bytes_ratio": round(peak / plain_peak, 4),
            **gaps, "threads": torch.get_num_threads()}


if __name__ == "__main__":
    main(sys.argv[1:])
