"""What an evaluation writes: the results of its suites, and every scored response.

    results.json    metrics of each suite; null where a value is no number
    samples.jsonl   the responses, with their suite; `hybridrl show` prints them
    config.yaml     every option
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from hybridrl.config import EvaluateConfig
from hybridrl.controller.evaluation import OWN, Answers
from hybridrl.metrics import finite


class EvaluationOutput:
    """Writes what `cfg.output` says, suite by suite; what is there from before is kept until the first is through.

    `results` has the metrics of each suite by name; with one suite alone that has no name, its metrics.
    """

    def __init__(self, cfg: EvaluateConfig):
        self.cfg = cfg
        self.results: dict[str, Any] = {}
        path = Path(cfg.output).expanduser()
        self._folder = path if cfg.output and path.suffix != ".jsonl" else None
        self._samples = path / "samples.jsonl" if self._folder else path if cfg.output else None

    def add(self, suite: str, answers: Answers) -> None:
        """Keep the metrics of a suite and write its responses; on disk when this returns."""
        first, suite, metrics = not self.results, suite or OWN, finite(answers.metrics)
        self.results = {**self.results, suite: metrics} if self.cfg.suites else metrics
        if self._folder is not None:
            self._folder.mkdir(exist_ok=True)
            options = yaml.safe_dump(asdict(self.cfg), sort_keys=False, allow_unicode=True)
            (self._folder / "config.yaml").write_text(options)
            (self._folder / "results.json").write_text(json.dumps(self.results, indent=2) + "\n")
        if self._samples is not None:
            with self._samples.open("w" if first else "a") as file:
                file.writelines(f"{line}\n" for line in answers.samples(0, suite))
