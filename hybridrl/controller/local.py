"""The `local` backend: one worker per role inside the controller's process, no Ray; a breakpoint just works."""

from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict

from hybridrl.batch import concat
from hybridrl.config import ClusterConfig
from hybridrl.controller.call import Call, Future, check_rows, is_rows, stopped_error, worker_error
from hybridrl.controller.host import Failure, Host, most_threads
from hybridrl.dispatch import Axis
from hybridrl.errors import HybridRLError
from hybridrl.workers.base import Worker, WorkerContext


class LocalFuture(Future):
    """A finished call: `local` runs a call when it is made."""

    def __init__(self, value: Any, error: HybridRLError | None):
        self._value, self._error = value, error

    def result(self, timeout_s: float | None = None) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def done(self) -> bool:
        return True


class LocalPool:
    """One device, one process: the controller's."""

    def __init__(self, cfg: ClusterConfig):
        self.ranks, self.call_timeout_s = 1, cfg.call_timeout_s
        self.roles: set[str] = set()
        self.failure: HybridRLError | None = None
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self._host = Host(WorkerContext(0, 1, device, ""), 1, cfg.call_timeout_s, most_threads=most_threads())
        self._host.join(self._host.listen("127.0.0.1"), cfg.start_timeout_s)

    def build(self, role: str, worker_cls: type[Worker], args: tuple, kwargs: dict, axes: list[str]) -> dict[str, Axis]:
        """Build the worker of a role; returns what it says of each axis."""
        self._check()
        try:
            return self._host.build(role, worker_cls, args, kwargs, axes)
        except Failure as failure:
            raise self._record(failure) from failure.__cause__

    def submit(self, call: Call) -> LocalFuture:
        """Run a call; an error is raised by the future."""
        self._check()
        try:
            args, kwargs = _arguments(call)
            value = self._host.call(call.role, call.method, call.step, args, kwargs, "value")
        except Failure as failure:
            return LocalFuture(None, self._record(failure))
        return LocalFuture([value] if call.dispatch.split == "all" else value, None)

    def drop(self, role: str) -> None:
        """Close the worker of a role."""
        self._host.drop(role)

    def close(self) -> None:
        """Close the workers."""
        self.failure = self.failure or HybridRLError("it was closed.")
        self._host.close()

    def _check(self) -> None:
        if self.failure is not None:
            raise stopped_error(self.failure)

    def _record(self, failure: Failure) -> HybridRLError:
        error = worker_error(failure)
        if not failure.harmless:
            self.failure = error
        return error


def _arguments(call: Call) -> tuple[tuple, dict[str, Any]]:
    """Arguments as a worker sees them under Ray: futures by value, lists of batches laid end to end."""
    rows = call.dispatch.split == "rows"
    if rows:
        check_rows(call)
    args = tuple(_argument(value, rows) for value in call.args)
    kwargs = {name: _argument(value, rows) for name, value in call.kwargs.items()}
    if rows:
        check_rows(replace(call, args=args, kwargs=kwargs))
    return args, kwargs


def _argument(value: Any, rows: bool) -> Any:
    if isinstance(value, list | tuple) and rows and is_rows(value):
        return concat([_argument(item, rows) for item in value])
    if isinstance(value, Future):
        value = value.result()
    # All of its columns, in a batch of its own: those that the worker adds don't come to the caller's.
    return value.select(*value.keys()) if isinstance(value, TensorDict) else value
