"""The saved responses of a run, read back from its `samples.jsonl`. Older files lack fields: each is optional."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.errors import DataError

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Token:
    """A response token. `trained`, `version` and `gap` (log-prob of training minus that of the rollout, in nats) are
    None where the run did not write them; `version` is -1 for a token that no weights produced."""

    id: int
    trained: bool | None
    version: int | None
    gap: float | None


@dataclass(frozen=True, slots=True)
class Turn:
    """What was shown, what was written, and where that lies: response tokens `start` to `stop`, without the last."""

    shown: list[Message]
    written: str
    start: int
    stop: int
    reward: float | None
    info: dict[str, Any] | None = None


class Sample:
    """One line of the file. `row` counts the lines of its step from 0."""

    def __init__(self, line: dict[str, Any], row: int):
        self.line, self.row = line, row
        self.step: int = line["step"]
        self.reward: float | None = line.get("reward")

    @property
    def prompt(self) -> list[Message]:
        """As messages; what the first turn showed where the row has no prompt."""
        prompt = self.line.get("prompt")
        if prompt is None:
            turns = self.line.get("turns") or [{}]
            prompt = turns[0].get("observation") or []
        return prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]

    @property
    def tokens(self) -> list[Token]:
        """Of the response; empty where the run wrote none."""
        columns = self.line.get("tokens") or {"ids": []}
        count = len(columns["ids"])
        mask, versions = (_spread(columns.get(name), count) for name in ("mask", "versions"))
        gaps = columns.get("log_prob_gaps") or [None] * count
        return [Token(*values) for values in zip(columns["ids"], mask, versions, gaps, strict=True)]

    @property
    def turns(self) -> list[Turn]:
        """In order; a row that was not played in an environment has one."""
        turns = self.line.get("turns")
        if turns is None:
            count = len((self.line.get("tokens") or {"ids": []})["ids"])
            return [Turn(self.prompt, str(self.line.get("response") or ""), 0, count, None)]
        shown = [turn.get("observation") or [] for turn in turns]
        if shown:
            shown[0] = shown[0] or self.prompt
        return [Turn(messages, str(turn.get("action") or ""), turn.get("start", 0), turn.get("stop", 0),
                     turn.get("reward"), turn.get("info")) for messages, turn in zip(shown, turns, strict=True)]


def read_samples(run: str | Path, evaluation: bool = False) -> list[Sample]:
    """The samples of a run's folder in order, or those of its evaluations; lines that were cut short are left out.

    Raises DataError when the folder is none of a run, or has no samples.
    """
    folder = Path(run).expanduser()
    file = folder / ("eval_samples.jsonl" if evaluation else "samples.jsonl")
    if not file.is_file():
        raise DataError(_no_samples(folder, file.name))
    counts: dict[int, int] = {}
    samples = []
    for line in _objects(file):
        row = counts[line["step"]] = counts.get(line["step"], -1) + 1
        samples.append(Sample(line, row))
    if not samples:
        raise DataError(f"{file} has no samples yet: a step writes trainer.save_samples of them when it ends.")
    return samples


def choose(samples: Sequence[Sample], step: int | None, row: int | None) -> list[Sample]:
    """Those of a step, or the one row of it; a row without a step is of the last step.

    Raises DataError saying which there are.
    """
    steps = sorted({sample.step for sample in samples})
    if step is None and row is not None:
        step = steps[-1]
    if step is None:
        return list(samples)
    found = [sample for sample in samples if sample.step == step]
    if not found:
        raise DataError(f"There are no samples of step {step}; there are some of {_span('step', steps)}.")
    if row is None:
        return found
    if not 0 <= row < len(found):
        raise DataError(f"Step {step} has no row {row}; it has {_span('row', range(len(found)))}.")
    return [found[row]]


def _objects(file: Path) -> Iterator[dict[str, Any]]:
    # not splitlines(): a response may hold other characters that it would break a line at
    for text in file.read_text(errors="replace").split("\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            yield line


def _spread(runs: list[list[Any]] | None, count: int) -> list[Any]:
    """One value a token, from runs [value, count]."""
    return [None] * count if runs is None else [value for value, times in runs for _ in range(times)]


def _no_samples(folder: Path, file: str) -> str:
    if (folder / "config.yaml").is_file():
        return f"Run {folder} has no {file}; it has {', '.join(sorted(f.name for f in folder.iterdir()))}."
    what = "is no run's folder: it has no samples.jsonl" if folder.is_dir() else "is no folder"
    near = folder if folder.is_dir() else folder.parent
    runs = sorted(str(file.parent) for file in near.glob("*/samples.jsonl"))
    return f"{folder} {what}. Runs in {near}: {', '.join(runs) or 'none'}."


def _span(name: str, numbers: Sequence[int]) -> str:
    return f"{name} {numbers[0]}" if len(numbers) == 1 else f"{name}s {numbers[0]} to {numbers[-1]}"
