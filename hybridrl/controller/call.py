"""A call on a worker group and its future, whatever the backend."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

from tensordict import TensorDict

from hybridrl import errors
from hybridrl.batch import num_rows
from hybridrl.controller.host import Failure
from hybridrl.dispatch import Axis, Dispatch
from hybridrl.errors import BatchError, HybridRLError, WorkerError
from hybridrl.workers.base import Worker


@dataclass(slots=True)
class Call:
    """What a pool needs to run one method of a role on its ranks."""

    role: str
    method: str
    dispatch: Dispatch
    axis: Axis
    """Consecutive ranks of one shard, and what rows cost."""
    step: int | None
    args: tuple
    kwargs: dict[str, Any]
    timeout_s: float
    keep: bool = False
    """The result may stay with the workers, for a future."""


class Future(ABC):
    """The result of a call that may still run. Other groups accept it as an argument without waiting for it."""

    @abstractmethod
    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the result and return it.

        Raises WorkerError when a worker failed. Raises DeadlineError when `timeout_s` ran out (the call goes on),
        or when the call's own deadline did (the pool is stopped).
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether `result` would return or raise at once."""


class DevicePool(Protocol):
    """Reserved devices with a host process on each; what the two backends have in common."""

    ranks: int
    call_timeout_s: float
    roles: set[str]
    """Roles of the groups that live here."""
    failure: HybridRLError | None
    """Why it takes no more calls; None while it does."""

    def build(self, role: str, worker_cls: type[Worker], args: tuple, kwargs: dict, axes: list[str]) -> dict[str, Axis]:
        """Build the worker of a role on every rank; returns what it says of each axis."""

    def submit(self, call: Call) -> Future:
        """Start a call."""

    def drop(self, role: str) -> None:
        """Close the workers of a role."""

    def close(self) -> None:
        """Close all workers and end the processes."""


def is_rows(value: Any) -> bool:
    """Whether an argument of an `over_rows` call is split: a batch, a future, or a list of these."""
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, TensorDict | Future) for item in value)
    return isinstance(value, TensorDict | Future)


def check_rows(call: Call) -> None:
    """Raise BatchError unless an `over_rows` call has rows to split, equally many in all its batches."""
    values = [*call.args, *call.kwargs.values()]
    if not any(map(is_rows, values)):
        raise BatchError(f"{call.role}.{call.method} splits a batch by rows, but no argument is a batch or a future.")
    totals = {num_rows(value) for value in values if isinstance(value, TensorDict)}
    if len(totals) > 1:
        raise BatchError(f"batches of one call need the same number of rows, got {sorted(totals)}.")


def worker_error(failure: Failure) -> WorkerError:
    """The error to raise for a failure; `__cause__` is the original when it is an error of hybridrl."""
    first_line = (failure.message.splitlines() or [""])[0]
    error = WorkerError(failure.role, failure.rank, failure.step, f"{failure.kind}: {first_line}", failure.text)
    original = getattr(errors, failure.kind, None)
    if failure.__cause__ is not None:
        error.__cause__ = failure.__cause__
    elif isinstance(original, type) and issubclass(original, HybridRLError) and original is not WorkerError:
        error.__cause__ = original(failure.message)
    return error


def stopped_error(first: HybridRLError) -> HybridRLError:
    """The error of every call on a pool that was stopped by `first`."""
    if not isinstance(first, WorkerError):
        return HybridRLError(f"this pool can't be used any more: {first}")
    text = f"this pool was stopped by an earlier failure ({first.cause})"
    return WorkerError(first.role, first.rank, first.step, text, first.remote_traceback)
