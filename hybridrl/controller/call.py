"""A call on a worker group and its future, whatever the backend."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from hybridrl import errors
from hybridrl.controller.host import Failure
from hybridrl.dispatch import Dispatch
from hybridrl.errors import HybridRLError, WorkerError


@dataclass(slots=True)
class Call:
    """What a pool needs to run one method of a role on its ranks."""

    role: str
    method: str
    dispatch: Dispatch
    peers: int
    """Consecutive ranks of one shard."""
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
