"""The demo: train a tiny model with GRPO and show what it learned.

    python -m recipes.demo [any option of recipes.grpo]

Sums of two three-digit numbers; see README.md in this folder. The last line is JSON.
"""

import json
import sys
import time
from datetime import datetime
from pathlib import Path

from hybridrl.config import GRPOConfig
from hybridrl.config_loading import load
from hybridrl.errors import HybridRLError
from hybridrl.metrics import read_metrics
from hybridrl.plot import plot_metrics
from recipes import grpo


def main(words: list[str]) -> None:
    """Run the demo with overrides."""
    started = time.perf_counter()
    folder = Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        cfg = load("grpo", GRPOConfig, ["experiment=demo", f"trainer.run_dir={folder}", *words])
        grpo.main(cfg)
    except HybridRLError as error:
        sys.exit(f"demo: {error}")
    folder = Path(cfg.trainer.run_dir)
    scores = [row["eval/accuracy"] for row in read_metrics(folder / "metrics.jsonl") if "eval/accuracy" in row]
    curve = folder / "curve.png"
    plot_metrics(folder / "metrics.jsonl", curve,
                 {"reward of the samples": "reward/mean", "held-out accuracy": "eval/accuracy"},
                 title="GRPO on sums of three-digit numbers")
    print(f"\nHeld-out accuracy on {cfg.trainer.eval_prompts} sums never trained on: "
          f"{scores[0]:.1%} before, {scores[-1]:.1%} after {cfg.trainer.steps} steps.")
    print(f"Curve: {curve}   Trained model: {folder / 'model'}")
    print(json.dumps({"accuracy_before": scores[0], "accuracy_after": scores[-1],
                      "seconds": round(time.perf_counter() - started, 1)}))


if __name__ == "__main__":
    main(sys.argv[1:])
