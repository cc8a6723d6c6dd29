"""Processes that score rows in parallel and can be killed at any time.

A worker gets a chunk of rows and reports each call as it ends, so that the row that hangs or kills its worker is known:
that row alone is marked, and the rest of the chunk goes to another worker. All reports on a chunk are read before the
worker gets the next one, so neither side waits for the other to empty a full socket.
"""

import contextlib
import json
import os
import pickle
import socket
import struct
import subprocess
import time
from collections import deque
from dataclasses import dataclass, field
from math import ceil, inf
from multiprocessing.connection import Connection, wait
from typing import Any

from hybridrl import child_process
from hybridrl.errors import RewardError

START_TIMEOUT_S = 60
"""Longest start of a worker, imports of reward functions included."""
TRANSFER_TIMEOUT_S = 10
"""Longest transfer of one message to or from a worker."""
MAX_CHUNK_ROWS = 32


@dataclass(slots=True)
class Outcome:
    """What became of a row: one score a function, as far as it got; `error` says why it stopped early."""

    scores: list[float] = field(default_factory=list)
    error: str | None = None
    timed_out: bool = False


class WorkerPool:
    """Up to `num_workers` processes that run reward functions, started on first use.

    Args:
        functions: name and options of each reward function, for `bind`.
        timeout_s: longest run of one call, in seconds.
    """

    def __init__(self, functions: list[tuple[str, dict[str, Any]]], num_workers: int, timeout_s: float):
        self.functions, self.num_workers, self.timeout_s = functions, num_workers, timeout_s
        self._workers: list[_Worker] = []

    def run(self, rows: list[dict[str, Any]]) -> list[Outcome]:
        """Score rows; outcomes in the same order. Raises RewardError when no worker can be started."""
        batch = _Batch(rows, [name for name, _ in self.functions])
        try:
            while batch.unfinished:
                self._assign(batch)
                patience_s = min((worker.deadline for worker in self._workers), default=0.0) - time.monotonic()
                ready = wait([worker.connection for worker in self._workers], max(0.0, patience_s))
                for worker in list(self._workers):
                    if worker.connection in ready:
                        self._read(worker, batch)
                    elif worker.deadline <= time.monotonic():
                        self._lost(worker, batch, f"gave no result within {worker.limit_s:g} s", timed_out=True)
        finally:
            # After an interrupt, late reports would be taken for those of the next batch.
            for worker in [worker for worker in self._workers if worker.rows]:
                self._stop(worker)
        return batch.outcomes

    def close(self) -> None:
        """Kill every worker and whatever it started."""
        for worker in list(self._workers):
            self._stop(worker)

    def _assign(self, batch: "_Batch") -> None:
        """Give waiting rows to idle workers; start workers while more rows wait than workers are free."""
        for worker in [worker for worker in self._workers if worker.idle and worker.process.poll() is not None]:
            self._stop(worker)
        free = sum(not worker.rows for worker in self._workers)
        for _ in range(min(self.num_workers - len(self._workers), len(batch.waiting) - free)):
            self._workers.append(_Worker(self.functions))
        for worker in [worker for worker in self._workers if worker.idle]:
            # Smaller chunks towards the end let the workers finish together.
            for _ in range(min(MAX_CHUNK_ROWS, ceil(len(batch.waiting) / (4 * self.num_workers)))):
                worker.rows.append(batch.waiting.popleft())
            if worker.rows:
                worker.expect_within(self.timeout_s)
                try:
                    worker.connection.send([batch.payloads[row] for row in worker.rows])
                except OSError as error:
                    self._lost(worker, batch, f"could not be handed to a worker: {error}")

    def _read(self, worker: "_Worker", batch: "_Batch") -> None:
        """Take all reports that have arrived."""
        try:
            while worker.connection.poll():
                score, error = json.loads(worker.connection.recv_bytes())
                if worker.ready:
                    if batch.record(worker.rows[0], score, error):
                        worker.rows.popleft()
                    worker.expect_within(self.timeout_s if worker.rows else inf)
                elif error:
                    self._stop(worker)
                    raise RewardError(f"a reward worker can't start: {error}")
                else:
                    worker.ready = True
                    worker.expect_within(inf)
        except (EOFError, OSError):
            self._lost(worker, batch, "ended its process")

    def _lost(self, worker: "_Worker", batch: "_Batch", reason: str, timed_out: bool = False) -> None:
        """Kill a worker; mark the row it was at and give the others back."""
        self._stop(worker)
        if not timed_out:
            reason += f" ({worker.exit_status()})"
        if not worker.ready:
            raise RewardError(f"a reward worker can't start: it {reason}.")
        if worker.rows:
            batch.record(worker.rows.popleft(), None, reason, timed_out)
            batch.waiting.extendleft(reversed(worker.rows))

    def _stop(self, worker: "_Worker") -> None:
        self._workers.remove(worker)
        worker.kill()


class _Batch:
    """Rows on their way: which wait for a worker, and what became of the others."""

    def __init__(self, rows: list[dict[str, Any]], functions: list[str]):
        self.functions = functions
        self.outcomes = [Outcome() for _ in rows]
        self.waiting: deque[int] = deque()
        self.payloads: list[bytes] = []
        self.unfinished = len(rows)
        for i, row in enumerate(rows):
            try:
                self.payloads.append(pickle.dumps(row))
                self.waiting.append(i)
            except Exception as error:  # pickling runs methods of whatever the row holds
                self.payloads.append(b"")
                self.record(i, None, f"the row can't be sent to another process: {error!r}")

    def record(self, row: int, score: float | None, error: str | None, timed_out: bool = False) -> bool:
        """Note the end of a call; whether it ends the row, too."""
        outcome = self.outcomes[row]
        if score is None:
            outcome.error = f"{self.functions[len(outcome.scores)]}: {error}"
            outcome.timed_out = timed_out
        else:
            outcome.scores.append(score)
        ended = score is None or len(outcome.scores) == len(self.functions)
        self.unfinished -= ended
        return ended


class _Worker:
    """A process with its connection; `rows` are those it was given and has not finished."""

    def __init__(self, functions: list[tuple[str, dict[str, Any]]]):
        ours, theirs = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # a worker that stops reading must not stop the run
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", TRANSFER_TIMEOUT_S, 0))
        try:
            self.process, self._lifeline = child_process.start("hybridrl.rewards.worker", [theirs.fileno()])
        finally:
            theirs.close()
        self.connection = Connection(ours.detach())
        with contextlib.suppress(BrokenPipeError):  # it has died; the first read says how
            self.connection.send(functions)
        self.ready = False
        self.rows: deque[int] = deque()
        self.expect_within(START_TIMEOUT_S)

    @property
    def idle(self) -> bool:
        return self.ready and not self.rows

    def expect_within(self, limit_s: float) -> None:
        """The next report is due within `limit_s` seconds from now."""
        self.limit_s = limit_s
        self.deadline = time.monotonic() + limit_s

    def kill(self) -> None:
        """End the process and those it started, whatever they are doing."""
        child_process.kill_group(self.process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel; it dies when it comes back
            self.process.wait(TRANSFER_TIMEOUT_S)
        self.connection.close()
        os.close(self._lifeline)

    def exit_status(self) -> str:
        """How the process ended, in words."""
        return child_process.exit_status(self.process.returncode)
