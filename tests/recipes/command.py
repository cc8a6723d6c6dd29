"""The real command line as a subprocess, on tiny models and files, with a deadline on every wait."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hybridrl.metrics import deterministic, read_metrics

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 400
"""Longest run of one command; on an idle machine none takes a tenth of it."""
MARK = "HYBRIDRL_TEST_MARK"
NOISE = ("mismatch/", "sync/max_log_prob_gap")
"""Prefixes of the metrics that measure rounding, which no two layouts and no two orders of requests share."""
GAP = 1e-4
"""Between log-probs of two engines with equal weights. Here it is 1.5e-6; other processors round otherwise, and an
update that did not arrive makes it hundreds of times as large."""
LAYOUT = {"train/balance_ranks", "train/balance_micro_batches", "sync/bytes", "sync/received_bytes"}
"""Metrics that say how work and weights are spread over ranks."""


@dataclass
class Command:
    """A started command and everything it starts: its processes carry `mark` in their environment."""

    words: list[str]
    output: Path
    cwd: Path = ROOT
    prefix: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        self.mark = uuid.uuid4().hex
        env = {**os.environ, "OMP_NUM_THREADS": "1", **self.env, MARK: self.mark}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([env["PYTHONPATH"]] if env.get("PYTHONPATH") else [])])
        command = [*self.prefix, sys.executable, *self.flags, "-m", *self.words]
        self.began = time.monotonic()
        with open(self.output, "w") as out, open(f"{self.output}.err", "w") as err:
            self.process = subprocess.Popen(command, cwd=self.cwd, env=env, stdout=out, stderr=err,
                                            stdin=subprocess.DEVNULL, start_new_session=True)

    @property
    def out(self) -> str:
        return self.output.read_text()

    @property
    def err(self) -> str:
        return Path(f"{self.output}.err").read_text()

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """The exit code; whatever still runs at the deadline is killed, and the test fails."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout_s} s:\n{self.out}\n{self.err}") from None

    def wait_for(self, text: str, file: Path | None = None, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until `text` is in the output, or in `file`."""
        ends = time.monotonic() + timeout_s
        while text not in (self.out if file is None else file.read_text() if file.exists() else ""):
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.out}\n{self.err}"
            if time.monotonic() > ends:
                self.kill()
                raise AssertionError(f"no {text!r} after {timeout_s} s:\n{self.out}\n{self.err}")
            time.sleep(0.02)

    def processes(self) -> list[int]:
        """Ids of the processes that this command started, directly or not, and that still run."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                    found += [int(folder.name)] if state != "Z" else []
            except OSError:  # it has just ended
                continue
        return found

    def left(self, grace_s: float = 60.0) -> list[int]:
        """The processes that still run `grace_s` seconds from now; returns at once when there is none."""
        ends = time.monotonic() + grace_s
        while (found := self.processes()) and time.monotonic() < ends:
            time.sleep(0.1)
        return found

    def kill(self) -> None:
        """End the command and everything that it started."""
        for _ in range(3):  # what was starting others when it was listed
            for process in self.processes():
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        self.process.wait(30)


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    """Step -> its metrics, those that describe the machine left out."""
    return {int(row["step"]): deterministic(row) for row in read_metrics(folder / "metrics.jsonl")}


def assert_same_numbers(found: dict[str, float], expected: dict[str, float]) -> None:
    """Equal names and values; those that describe the `LAYOUT` or measure `NOISE` may differ.

    For runs that batch the same work differently: a log-prob, and what is a mean of differences of two of them, such
    as `policy/approx_kl_k1`, may be off by some 1e-7, however near zero it is.
    """
    assert found.keys() == expected.keys()
    for name in found.keys() - LAYOUT:
        near = GAP if name.startswith(NOISE) else 2e-6
        assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=near), name


def samples(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def write_jsonl(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
