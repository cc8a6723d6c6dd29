"""One GRPO step against TRL's GRPOTrainer on this machine; the last line is JSON.

    make benchmark-trl                     (installs TRL into .venv-trl, then runs the line below)
    python -m benchmarks.versus_trl [model=smollm2|demo] [lengths=uniform|mixed] [engine=vllm|transformers]
                                    [repetitions=N] [trl=PYTHON]

Both sides have the same model, prompts, responses per prompt, response lengths and threads, float32, AdamW, no
reference, one optimizer step per batch. They take turns, one step each, after two steps that don't count; figures are
medians. TRL generates with transformers (which on CPU is faster than its vLLM mode), pads, makes no separate log-prob
pass, and runs without activation checkpointing. Ours generates with `engine`, packs, feeds a prompt of several
responses once, takes the old log-probs from the update's own forward pass, and syncs weights after the update.

`stages` pairs seconds by stage: `generate`, and `rest` (everything else in the step, our weight sync included).
`of_floor` is the seconds that the model's matrix products take at the rate of bare products of the same shapes,
measured in the same run, over our seconds.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM

from benchmarks import matrix_rate
from benchmarks.versus_trl.workload import Workload, make_workload

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = {"model": "smollm2", "lengths": "uniform", "engine": "vllm",
            "repetitions": "5", "trl": str(ROOT / ".venv-trl/bin/python")}
WARM_UP = 2


class Side:
    """A process that takes a step when asked."""

    def __init__(self, name: str, command: list[str], log: Path):
        self.name, self.log = name, log
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=open(log, "w"), text=True)

    def step(self) -> dict[str, float]:
        """Seconds by stage of one step."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("STEP "):
                return json.loads(line.removeprefix("STEP "))
        sys.exit(f"{self.name} ended:\n{self.log.read_text()[-3000:]}")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()


def floor_seconds(workload: Workload) -> dict[str, float]:
    """Seconds of the bare matrix products: of generation, and of one forward and backward pass; prompts count once."""
    model = AutoModelForCausalLM.from_pretrained(workload.folder, dtype="float32")
    prompts, responses = workload.prompt_lengths, workload.response_lengths
    alive = [sum(n > t for n in responses) for t in range(1, max(responses))]
    decode = matrix_rate.linear_shapes(model, [sum(prompts), *alive], [len(responses), *alive])
    fed = sum(prompts) + sum(responses) - len(responses)  # all responses to a prompt are in one micro-batch
    update = matrix_rate.linear_shapes(model, [fed], [sum(responses)])
    return {"generate": matrix_rate.seconds(decode, backward=False),
            "rest": matrix_rate.seconds(update, backward=True)}


def stages(report: dict[str, float]) -> dict[str, float]:
    return {"generate": report["generate"], "rest": report["step"] - report["generate"], "step": report["step"]}


def main(words: list[str]) -> None:
    """Run both sides in turns and print the JSON line."""
    options = DEFAULTS | dict(word.partition("=")[::2] for word in words)
    if set(options) != set(DEFAULTS) or options["lengths"] not in ("uniform", "mixed") \
            or options["engine"] not in ("vllm", "transformers"):
        sys.exit(__doc__)
    if not Path(options["trl"]).exists():
        sys.exit(f"No {options['trl']}: `make benchmark-trl` installs TRL into an environment of its own.")
    workload = make_workload(options["model"], options["lengths"] == "mixed")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "workload.json"
        path.write_text(json.dumps(workload.to_dict()))
        here = Path(__file__).parent
        sides = {"ours": Side("ours", [sys.executable, "-m", "benchmarks.versus_trl.our_side", str(path),
                                       options["engine"]],
                              Path(scratch) / "ours.log"),
                 "trl": Side("TRL", [options["trl"], str(here / "trl_side.py"), str(path), scratch],
                             Path(scratch) / "trl.log")}
        try:
            print(json.dumps(compare(sides, workload, options)))
        finally:
            for side in sides.values():
                side.close()


def compare(sides: dict[str, Side], workload: Workload, options: dict[str, str]) -> dict[str, object]:
    """All fields of the JSON line."""
    reports: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for repetition in range(WARM_UP + int(options["repetitions"])):
        for name, side in sides.items():
            report = side.step()
            if repetition >= WARM_UP:
                reports[name].append(report)
    threads = {report["threads"] for rows in reports.values() for report in rows}
    assert len(threads) == 1, f"both sides must use the same threads, got {threads}"
    medians = {name: {key: statistics.median(stages(r)[key] for r in rows) for key in ("generate", "rest", "step")}
               for name, rows in reports.items()}
    ours, trl = medians["ours"], medians["trl"]
    floor = floor_seconds(workload)
    inside = [{key: r[key] for key in r if key not in ("threads", "step")} for r in reports["ours"]]
    return {"model": options["model"], "lengths": options["lengths"], "engine": options["engine"],
            "rows": len(workload.response_lengths),
            "tokens": workload.tokens, "ours_s": ours, "trl_s": trl,
            "ours_stages_s": {key: statistics.median(r[key] for r in inside) for key in inside[0]},
            "tokens_per_s": workload.tokens / ours["step"], "trl_tokens_per_s": workload.tokens / trl["step"],
            "speedup": trl["step"] / ours["step"],
            "stage_speedup": {key: trl[key] / ours[key] for key in ("generate", "rest")},
            "floor_s": floor, "of_floor": sum(floor.values()) / ours["step"], "threads": threads.pop()}


if __name__ == "__main__":
    main(sys.argv[1:])
