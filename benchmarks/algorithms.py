"""Seconds of every estimator and loss on 1,024 x 2,048 tokens, and their ratio to `x.exp().sum().backward()`.

On a CPU the ratio is of processor time; the seconds are on the clock.

    python -m benchmarks.algorithms [--rows 1024] [--width 2048] [--repeats 3] [--device cpu] [--threads N]

Losses are timed forward and backward, aggregation coefficients included in the loss but computed before (once
per mini-batch, as a controller does). The last line is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridrl.algorithms import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    KEEP_MASKS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    aggregate,
    explained_variance,
    loss_weights,
    mismatch_metrics,
    policy_loss,
    token_kl,
    value_loss,
)

GROUP = 8


def make_columns(rows: int, width: int, device: str) -> dict[str, Any]:
    """A batch with uneven lengths, gaps of environment tokens, and 0/1 rewards in groups of 8."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(width // 4, width + 1, (rows,), generator=generator)
    columns = torch.arange(width)
    mask = (columns < lengths[:, None]) & (columns % 512 >= 32)
    old = -torch.rand(rows, width, generator=generator) * 3
    noise = [0.05 * torch.randn(rows, width, generator=generator) for _ in range(4)]
    rewards = torch.randint(0, 2, (rows,), generator=generator).float()
    made: dict[str, Any] = {
        "mask": mask,
        "group_ids": torch.arange(rows) // GROUP,
        "rewards": rewards,
        "greedy_rewards": torch.full((rows,), 0.5),
        "reward_components": torch.stack([rewards, torch.rand(rows, generator=generator)], dim=1),
        "old_log_probs": old,
        "log_probs": old + noise[0],
        "rollout_log_probs": old + noise[1],
        "ref_log_probs": old + noise[2],
        "teacher_log_probs": old + noise[3],
        "values": torch.rand(rows, width, generator=generator),
        "entropies": torch.rand(rows, width, generator=generator),
        "advantages": torch.randn(rows, width, generator=generator),
        "sum_squared_probs": old.exp().square(),
        "returns": torch.rand(rows, width, generator=generator),
    }
    return {name: value.to(device) for name, value in made.items()}


class Timing(NamedTuple):
    """Best of several runs: seconds on the clock, and seconds that count in the ratio."""

    wall: float
    busy: float


def timed(run: Callable[[], Any], repeats: int, device: str) -> Timing:
    """Run once to warm up and then `repeats` times.

    On a CPU the ratio compares processor time, which other programs on the machine disturb less.
    """
    run()
    walls, busys = [], []
    for _ in range(repeats):
        if device != "cpu":
            torch.cuda.synchronize()
        wall, busy = time.perf_counter(), time.process_time()
        run()
        if device != "cpu":
            torch.cuda.synchronize()
        walls.append(time.perf_counter() - wall)
        busys.append(time.process_time() - busy)
    return Timing(min(walls), min(busys if device == "cpu" else walls))


def baseline(x: Tensor) -> None:
    """What everything is compared with."""
    x.detach().requires_grad_().exp().sum().backward()


def loss_run(name: str, columns: dict[str, Any]) -> Callable[[], None]:
    """Forward and backward of a policy loss on the whole batch."""
    prepared = {**columns, **POLICY_LOSSES.prepare(name, None, columns)}
    weights = loss_weights(POLICY_LOSSES[name].aggregation or "token-mean", columns)

    def run() -> None:
        prepared["log_probs"] = columns["log_probs"].detach().requires_grad_()
        aggregate(policy_loss(name, prepared).loss, weights, columns["mask"]).backward()

    return run


def runs(columns: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Everything that is timed."""
    mask = columns["mask"]
    weights = loss_weights("token-mean", columns)
    made: dict[str, Callable[[], Any]] = {}
    for name in ADVANTAGES:
        made[f"advantage/{name}"] = lambda name=name: ADVANTAGES.call(name, None, columns)
    discounted = {"gamma": 0.99, "lam": 0.95}
    made["advantage/gae_discounted"] = lambda: ADVANTAGES.call("gae", discounted, columns)
    for name in POLICY_LOSSES:
        made[f"loss/{name}"] = loss_run(name, columns)
    for name in POLICY_LOSSES:
        if POLICY_LOSSES[name].prepare:
            made[f"prepare/{name}"] = lambda name=name: POLICY_LOSSES.prepare(name, None, columns)
    for name in KL_ESTIMATORS:

        def kl(name: str = name) -> None:
            lp = columns["log_probs"].detach().requires_grad_()
            losses = token_kl(name, lp, columns["ref_log_probs"], mask, columns["old_log_probs"])
            aggregate(losses, weights, mask).backward()

        made[f"kl/{name}"] = kl

    def value() -> None:
        values = columns["values"].detach().requires_grad_()
        result = value_loss(values, columns["values"] + 0.1, columns["returns"], mask)
        aggregate(result.loss, weights, mask).backward()

    made["loss/value"] = value
    for name in AGGREGATIONS:
        options = {"max_response_length": mask.shape[1]} if "norm" in name else None
        made[f"aggregation/{name}"] = lambda name=name, options=options: loss_weights(name, columns, options)
    for name in CORRECTIONS:
        made[f"correction/{name}"] = lambda name=name: CORRECTIONS.call(name, None, columns)
    for name in KEEP_MASKS:
        made[f"keep_mask/{name}"] = lambda name=name: KEEP_MASKS.call(name, None, columns)
    pair = (columns["old_log_probs"], columns["rollout_log_probs"], mask)
    made["metrics/mismatch"] = lambda: mismatch_metrics(*pair)
    made["metrics/explained_variance"] = lambda: explained_variance(columns["values"], columns["returns"], mask)
    return made


def main() -> None:
    """Time everything, print a table, and one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves PyTorch's choice")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    columns = make_columns(args.rows, args.width, args.device)
    unit = timed(lambda: baseline(columns["log_probs"]), 3 * args.repeats, args.device)
    print(f"{'x.exp().sum().backward()':36s} {unit.wall:8.4f} s")
    results = {}
    for name, run in runs(columns).items():
        took = timed(run, args.repeats, args.device)
        results[name] = {"seconds": round(took.wall, 5), "ratio": round(took.busy / unit.busy, 2)}
        print(f"{name:36s} {took.wall:8.4f} s {took.busy / unit.busy:8.2f} x", flush=True)
    summary = {
        "benchmark": "algorithms",
        "rows": args.rows,
        "width": args.width,
        "device": args.device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "baseline_seconds": round(unit.wall, 5),
        "results": results,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
