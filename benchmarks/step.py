"""Where a training step's time goes, how soon the first token comes, and what it all weighs; the last line is JSON.

    python -m benchmarks.step [experiment=NAME] [any other option of recipes.grpo]

Runs `python -m recipes.grpo` for a few steps in a folder of its own and reads its metrics. Seconds are medians over
the steps after the first. `overhead_frac` is the share of a step in none of the phases; `startup_s` runs from the
command to the first generated token; `peak_bytes` is the largest proportional memory (PSS) of all its processes.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from hybridrl.metrics import read_metrics

PHASES = ("generate", "reward", "log_probs", "update", "sync")
MARK = "HYBRIDRL_BENCHMARK"
STEPS = 4


def marked_processes(mark: str) -> list[int]:
    """Processes that inherited the mark in their environment: everything the command started, however detached."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                pass  # gone, or another user's
    return found


def pss_bytes(pid: int) -> int:
    """Proportional set size: shared pages are divided among the processes that share them."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def main(words: list[str]) -> None:
    """Run with the options of `recipes.grpo`."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "recipes.grpo", *words, f"trainer.steps={STEPS}",
                   f"trainer.run_dir={folder}/run", "trainer.export=false", "trainer.eval_every=0",
                   "eval_data.source=jsonl", "eval_data.path=''", "eval_data.task=''"]
        started, peak = time.time(), 0
        with open(f"{folder}/output", "w") as output:
            process = subprocess.Popen(command, env={**os.environ, MARK: mark}, stdout=output, stderr=output)
            while process.poll() is None:
                peak = max(peak, sum(map(pss_bytes, marked_processes(mark))))
                time.sleep(0.25)
        if process.returncode:
            sys.exit(Path(f"{folder}/output").read_text())
        rows = [row for row in read_metrics(f"{folder}/run/metrics.jsonl") if row["step"]]
    steady = rows[1:]
    seconds = {name: statistics.median(row[f"time/{name}"] for row in steady) for name in (*PHASES, "step")}
    spent = [sum(row[f"time/{name}"] for name in PHASES) / row["time/step"] for row in steady]
    print(json.dumps({**seconds, "overhead_frac": 1 - statistics.median(spent),
                      "startup_s": rows[0]["time/first_token_unix_s"] - started, "peak_bytes": peak}))


if __name__ == "__main__":
    main(sys.argv[1:])
