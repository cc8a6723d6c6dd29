"""Algorithms side by side on the demo task: held-out accuracy by step over several seeds; the last line is JSON.

    python -m benchmarks.curves [algorithms=grpo,rloo,...] [seeds=0,1,2] [steps=20] [runs=FOLDER] [jobs=1]

Every run has the same model, data and budget: RESPONSES responses a step in MINI_BATCHES optimizer steps, so that the
losses differ (with one optimizer step a batch all ratios are 1, and most losses have the same gradient). Estimators
without groups draw as many prompts as the others draw responses. A run that is in `runs` already is not made again.
Prints a Markdown table: mean accuracy over the seeds, and the range.
"""

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hybridrl.config import GRPOConfig
from hybridrl.config_loading import load
from hybridrl.metrics import read_metrics

RESPONSES, MINI_BATCHES, EVALUATIONS = 256, 4, 4
MAIN = "grpo,dr_grpo,dapo,gspo,gmpo,cispo,sapo,rloo,remax,reinforce,reinforce_pp,reinforce_pp_baseline,opo,gpg,ppo"
DEFAULTS = {"algorithms": MAIN, "seeds": "0,1,2", "steps": "20", "runs": "", "jobs": "1"}


def command(algorithm: str, seed: str, steps: int, folder: Path) -> list[str]:
    """The command line of one run."""
    name, chosen = ("recipes.ppo", []) if algorithm == "ppo" else ("recipes.grpo", [f"algorithm={algorithm}"])
    cfg = load("grpo", GRPOConfig, [*chosen, "experiment=demo"])
    prompts = RESPONSES // cfg.algorithm.responses_per_prompt
    if algorithm == "remax":  # a greedy response a prompt counts, too
        prompts //= 2
    return [sys.executable, "-m", name, *chosen, "experiment=demo", f"seed={seed}", f"trainer.steps={steps}",
            f"trainer.eval_every={max(1, steps // EVALUATIONS)}", f"trainer.prompts_per_step={prompts}",
            f"algorithm.mini_batches={MINI_BATCHES}", "trainer.export=false", "trainer.trackers=[]",
            "trainer.save_samples=0", f"trainer.run_dir={folder}"]


def accuracies(algorithm: str, seed: str, steps: int, runs: Path) -> dict[int, float]:
    """Held-out accuracy by step; makes the run if it is not there in full."""
    folder = runs / f"{algorithm}-{seed}"
    path = folder / "metrics.jsonl"
    if not path.exists() or read_metrics(path)[-1]["step"] != steps:
        finished = subprocess.run(command(algorithm, seed, steps, folder), capture_output=True, text=True)
        if finished.returncode:
            sys.exit(f"{algorithm}, seed {seed}:\n{finished.stdout}{finished.stderr}")
    return {int(row["step"]): row["eval/accuracy"] for row in read_metrics(path) if "eval/accuracy" in row}


def main(words: list[str]) -> None:
    """Make the runs, print the table and the JSON line."""
    options = DEFAULTS | dict(word.split("=", 1) for word in words)
    if set(options) != set(DEFAULTS):
        sys.exit(__doc__)
    names, seeds, steps = options["algorithms"].split(","), options["seeds"].split(","), int(options["steps"])
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(int(options["jobs"])) as pool:
        runs = Path(options["runs"] or scratch)
        pending = {(name, seed): pool.submit(accuracies, name, seed, steps, runs) for seed in seeds for name in names}
        found = {key: future.result() for key, future in pending.items()}
    curves = {name: [found[name, seed] for seed in seeds] for name in names}
    at = sorted(curves[names[0]][0])
    print("| algorithm | " + " | ".join(f"step {step}" for step in at) + " |\n|" + " --- |" * (len(at) + 1))
    for name, by_seed in curves.items():
        print(f"| {name} | " + " | ".join(cell([curve[step] for curve in by_seed]) for step in at) + " |")
    print(json.dumps({name: [list(curve.values()) for curve in by_seed] for name, by_seed in curves.items()}))


def cell(values: list[float]) -> str:
    """Mean and range in percent."""
    mean, low, high = (100 * x for x in (sum(values) / len(values), min(values), max(values)))
    return f"{mean:.1f}" + (f" ({low:.1f} to {high:.1f})" if high > low else "")


if __name__ == "__main__":
    main(sys.argv[1:])
