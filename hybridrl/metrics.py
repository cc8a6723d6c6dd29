"""Metrics: named numbers, `group/name`, one set a step.

Names under `time/`, `memory/` and `cache/` describe how a result came about; all others are the same in a run repeated
with one seed.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hybridrl.errors import DataError

MACHINE = ("time/", "memory/", "cache/")
"""Prefixes of metrics that differ from one execution to the next."""

PEAK = "_peak_bytes"
"""Ending of metrics of which the largest counts."""

WATCHED = {"reward": ("reward/mean",), "accuracy": ("eval/accuracy",), "tokens": ("response/length_mean",),
           "kl": ("policy/ref_kl", "policy/approx_kl_k3"), "s": ("time/step",)}
"""What the progress line shows: label, and the metric, or where it is missing the next one."""


def average(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each metric over the dictionaries that have it, the largest if its name ends in PEAK; {} for none."""
    names = dict.fromkeys(name for part in parts for name in part)
    values = {name: [float(part[name]) for part in parts if name in part] for name in names}
    return {name: max(given) if name.endswith(PEAK) else math.fsum(given) / len(given)
            for name, given in values.items()}


def deterministic(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are the same whenever a run is repeated."""
    return {name: value for name, value in metrics.items() if not name.startswith(MACHINE)}


def format_metrics(metrics: Mapping[str, float], watched: Mapping[str, Sequence[str]] = WATCHED) -> str:
    """The watched metrics that are present, as `label value` with three significant digits."""
    found = ((label, next((metrics[name] for name in names if metrics.get(name) is not None), None))
             for label, names in watched.items())
    return "  ".join(f"{label} {value:.3g}" for label, value in found if value is not None)


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """The metrics with None, null in JSON, for what JSON has no number for: NaN and infinity."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def to_line(step: int, metrics: Mapping[str, float]) -> str:
    """One line of `metrics.jsonl`."""
    return json.dumps({"step": step, **finite({name: float(value) for name, value in metrics.items()})})


def read_metrics(path: str | Path) -> list[dict[str, float | None]]:
    """The lines of a `metrics.jsonl`; an unfinished last line is left out. Raises DataError."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise DataError(f"Can't read metrics from {path}: {error.strerror}.") from None
    return list(_parsed(lines, path))


def _parsed(lines: list[str], path: str | Path) -> Iterable[dict[str, float | None]]:
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError:
            if number < len(lines):
                raise DataError(f"{path}, line {number}: not a JSON object: {line[:60]!r}.") from None
