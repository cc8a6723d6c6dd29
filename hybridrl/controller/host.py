"""One process of a pool: holds workers by role, joins the process group, runs methods, reports failures.

Plain Python without Ray until an argument is a reference: the `local` backend uses the same class in the
controller's own process.
"""

import os
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from hybridrl.batch import num_rows
from hybridrl.controller.wire import Wire, pack, unpack
from hybridrl.dispatch import Axis, overlaps, row_range
from hybridrl.errors import BatchError, HybridRLError
from hybridrl.workers.base import Worker, WorkerContext


class Failure(Exception):
    """A failure of one rank in plain strings, so that it crosses processes whatever the original holds.

    `harmless` says that the worker refused (an error of hybridrl.errors) or never started the call: when every
    rank says so, no rank is ahead of another and the pool can go on.
    """

    def __init__(self, role: str, rank: int, step: int | None, kind: str, message: str, text: str,
                 harmless: bool, when: float):
        super().__init__(role, rank, step, kind, message, text, harmless, when)
        self.role, self.rank, self.step, self.kind, self.message = role, rank, step, kind, message
        self.text, self.harmless, self.when = text, harmless, when


def most_threads() -> int | None:
    """Threads that the user allows a process: the environment variable OMP_NUM_THREADS; None without.

    To be read in the controller: Ray sets the variable in its workers.
    """
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None


@dataclass(slots=True)
class Part:
    """A packed batch or a reference to one, with its row count or a reference to that."""

    wire: Any
    rows: Any


@dataclass(slots=True)
class Rows:
    """Argument: the share of `shard` out of `shards` of all rows of `parts`, laid end to end.

    `total` is the row count before the controller split (None: the rows of all parts).
    """

    parts: list[Part]
    shard: int = 0
    shards: int = 1
    total: int | None = None


@dataclass(slots=True)
class Values:
    """Argument: references to results of another call, one or a list of them."""

    refs: Any


class Host:
    """Workers of one rank. `local_size` ranks share this machine's cores, with at most `most_threads` each."""

    def __init__(self, context: WorkerContext, local_size: int, timeout_s: float, log_file: Path | None = None,
                 most_threads: int | None = None):
        if log_file is not None:
            _send_output_to(log_file)
        self.context, self.timeout_s = context, timeout_s
        self.workers: dict[str, Worker] = {}
        self.failure: Failure | None = None
        self.store: dist.Store | None = None
        self.joined = False
        os.environ.update(RANK=str(context.rank), WORLD_SIZE=str(context.world_size))
        # Ray shows a process its own GPU alone, as device 0; libraries that read LOCAL_RANK take it for an index.
        os.environ["LOCAL_RANK"] = "0" if context.device.type == "cuda" else str(context.local_rank)
        if context.device.type == "cpu":
            threads = max(1, len(os.sched_getaffinity(0)) // local_size)
            threads = min(threads, most_threads or threads)
            os.environ["OMP_NUM_THREADS"] = str(threads)
            torch.set_num_threads(threads)
        else:
            torch.cuda.set_device(context.device)

    def ping(self, value: Any = None) -> Any:
        """Give back the value: what a bare call on this process costs."""
        return value

    def listen(self, address: str) -> tuple[str, int]:
        """Rank 0: open the store that the ranks meet at; returns its address."""
        self.store = dist.TCPStore(address, 0, self.context.world_size, is_master=True, wait_for_workers=False,
                                   timeout=timedelta(seconds=self.timeout_s))
        return address, self.store.port

    def join(self, address: tuple[str, int], timeout_s: float) -> None:
        """Join the process group of the pool."""
        os.environ.update(MASTER_ADDR=address[0], MASTER_PORT=str(address[1]))
        if dist.is_initialized():  # `local` in a process that already has a group
            return
        if self.store is None:
            self.store = dist.TCPStore(*address, self.context.world_size, is_master=False,
                                       timeout=timedelta(seconds=timeout_s))
        backend = "cpu:gloo,cuda:nccl" if self.context.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=self.store, rank=self.context.rank,
                                world_size=self.context.world_size, timeout=timedelta(seconds=self.timeout_s))
        self.joined = True

    def build(self, role: str, worker_cls: type[Worker], args: tuple, kwargs: dict, axes: list[str]) -> dict[str, Axis]:
        """Build the worker of a role; returns what it says of each axis."""
        self._check()
        context = WorkerContext(self.context.rank, self.context.world_size, self.context.device, role,
                                self.context.local_rank)
        try:
            worker = self.workers[role] = worker_cls(context, *args, **kwargs)
            return {axis: Axis(worker.peers(axis), worker.costs(axis)) for axis in axes}
        except (Exception, SystemExit) as error:
            raise self._failed(role, None, error) from error

    def call(self, role: str, method: str, step: int | None, args: tuple, kwargs: dict, reply: str) -> Any:
        """Run a method. `reply`: `value`, `wire` (batches packed), `counted` (row count, then packed) or `none`."""
        self._check()
        if args or kwargs:
            args, kwargs = self._fetch_arguments(role, step, args, kwargs)
        worker = self.workers[role]
        worker.step = step
        try:
            value = getattr(worker, method)(*args, **kwargs)
            return _reply(value, reply)
        except (Exception, SystemExit) as error:
            raise self._failed(role, step, error) from error

    def drop(self, role: str) -> None:
        """Close the worker of a role, if there is one."""
        if role in self.workers:
            self.workers.pop(role).close()

    def close(self) -> None:
        """Close the workers, newest first, and leave the process group that this host joined."""
        while self.workers:
            self.workers.popitem()[1].close()
        if self.joined and dist.is_initialized():
            dist.destroy_process_group()
        self.store, self.joined = None, False

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _failed(self, role: str, step: int | None, error: BaseException) -> Failure:
        harmless = isinstance(error, HybridRLError)
        failure = Failure(role, self.context.rank, step, type(error).__name__, str(error),
                          "".join(traceback.format_exception(error)), harmless, time.time())
        if not harmless:
            self.failure = failure
        return failure

    def _fetch_arguments(self, role: str, step: int | None, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Arguments with references and shares replaced by what they stand for."""
        places = [value for value in (*args, *kwargs.values()) if isinstance(value, Rows | Values)]
        if not places:
            return args, kwargs
        try:
            totals = {total for place in places if isinstance(place, Rows) for total in [_count(place, self.timeout_s)]}
            if len(totals) > 1:
                raise BatchError(f"batches of one call need the same number of rows, got {sorted(totals)}.")
            fetch = lambda value: _fetch(value, self.timeout_s)  # noqa: E731
            return tuple(map(fetch, args)), {name: fetch(value) for name, value in kwargs.items()}
        except Failure:
            raise
        except Exception as error:
            failure = self._failed(role, step, error)
            # The method never ran: the worker is as it was, whatever the error is.
            failure.harmless, self.failure = True, None
            raise failure from error


def _reply(value: Any, reply: str) -> Any:
    if reply == "value":
        return value
    if reply == "none":
        return None
    packed = pack(value) if isinstance(value, TensorDict) else value
    if reply == "wire":
        return packed
    count = num_rows(value) if isinstance(value, TensorDict) else len(value) if hasattr(value, "__len__") else 0
    return count, packed


def _count(place: Rows, timeout_s: float) -> int:
    """Fill in the row counts of all parts; returns the rows before the split."""
    counts = _get([part.rows for part in place.parts], timeout_s)
    for part, count in zip(place.parts, counts, strict=True):
        part.rows = count
    return sum(counts) if place.total is None else place.total


def _fetch(value: Any, timeout_s: float) -> Any:
    if isinstance(value, Values):
        return _get(value.refs, timeout_s) if isinstance(value.refs, list) else _get([value.refs], timeout_s)[0]
    if not isinstance(value, Rows):
        return value
    counts = [part.rows for part in value.parts]
    pieces = overlaps(counts, *row_range(sum(counts), value.shards, value.shard))
    # Without rows, one empty piece still says which fields there are.
    pieces = pieces or [(0, 0, 0)]
    wires = _get([value.parts[part].wire for part, _, _ in pieces], timeout_s)
    for wire in wires:
        if not isinstance(wire, Wire):
            raise BatchError(f"a batch was expected from the future, its call returned {type(wire).__name__}.")
    return unpack([wire.part(start, stop) for wire, (_, start, stop) in zip(wires, pieces, strict=True)])


def _get(values: list[Any], timeout_s: float) -> list[Any]:
    """Values of references among `values`; the failure of the call that should have made one is raised as it was."""
    if not any(type(value).__name__ == "ObjectRef" for value in values):
        return values
    import ray  # only under the ray backend, where the process has it already

    refs = [value for value in values if isinstance(value, ray.ObjectRef)]
    try:
        found = iter(ray.get(refs, timeout=timeout_s))
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Failure) else error) from None
    return [next(found) if isinstance(value, ray.ObjectRef) else value for value in values]


def _send_output_to(log_file: Path) -> None:
    """Append what this process and its libraries print to a file."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(descriptor, number)
    os.close(descriptor)
