"""What an evaluation writes: the results of its suites, and every scored response.

    results.json    metrics of each suite; null where a value is no number
    samples.jsonl   the responses, with their suite; `hybridrl show` prints them
    config.yaml     every option
"""

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import yaml

from hybridrl.config import EvaluateConfig
from hybridrl.controller.evaluation import OWN, Answers
from hybridrl.metrics import finite


class EvaluationOutput:
    """Writes what `cfg.output` says, suite by suite; a context manager that closes its files.

    `results` has the metrics of each suite by name; with one suite alone that has no name, its metrics.
    """

    def __init__(self, cfg: EvaluateConfig):
        self.cfg = cfg
        self.results: dict[str, Any] = {}
        self._folder: Path | None = None
        self._samples: TextIO | None = None
        self._files = ExitStack()

    def __enter__(self) -> "EvaluationOutput":
        path = Path(self.cfg.output).expanduser()
        if not self.cfg.output:
            return self
        if path.suffix != ".jsonl":
            self._folder = path
            path.mkdir(exist_ok=True)
            options = yaml.safe_dump(asdict(self.cfg), sort_keys=False, allow_unicode=True)
            (path / "config.yaml").write_text(options)
            path = path / "samples.jsonl"
        self._samples = self._files.enter_context(path.open("w"))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._files.close()

    def add(self, suite: str, answers: Answers) -> None:
        """Keep the metrics of a suite and write its responses; what was added before an error is on disk."""
        metrics = finite(answers.metrics)
        self.results = {**self.results, suite or OWN: metrics} if self.cfg.suites else metrics
        if self._samples is not None:
            for line in answers.samples(0, suite or OWN):
                self._samples.write(line + "\n")
            self._samples.flush()
        if self._folder is not None:
            (self._folder / "results.json").write_text(json.dumps(self.results, indent=2) + "\n")
