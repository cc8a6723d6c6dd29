"""Every error the library raises on purpose.

HybridRLError
├── ConfigError          a configuration key, value or combination        (also ValueError)
├── DataError            a file, row or field of a dataset                (also ValueError)
├── ModelError           a model folder, tokenizer or checkpoint of one   (also ValueError)
├── BatchError           a batch that breaks the field table              (also ValueError)
├── PhaseError           a policy method called in the wrong phase        (also RuntimeError)
├── TrainingError        an update that can't go on                       (also ArithmeticError)
├── SyncError            weights that did not arrive, or arrived changed  (also RuntimeError)
│   └── PatchError       a weight patch that was refused; nothing of it was written
│       ├── DamagedPatchError   truncated, corrupted or malformed
│       └── PatchBaseError      for weights other than those held: one was missed, or came late
├── CheckpointError      a checkpoint that can't be written or read       (also RuntimeError)
├── RewardError          reward functions that score nothing             (also RuntimeError)
├── EpisodeError         environments that can't start, or fail too often (also RuntimeError)
├── DeadlineError        a wait that ran out                              (also TimeoutError)
└── WorkerError          a failure inside a worker, with role, rank, step (also RuntimeError)
"""

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class HybridRLError(Exception):
    """Base of all errors raised by hybridrl."""


class ConfigError(HybridRLError, ValueError):
    """A configuration key, value or combination that is not accepted."""


class DataError(HybridRLError, ValueError):
    """A dataset file, row or field that can't be used."""


class ModelError(HybridRLError, ValueError):
    """A model or tokenizer folder that can't be used."""


class BatchError(HybridRLError, ValueError):
    """A batch whose fields don't fit the field table or each other."""


class PhaseError(HybridRLError, RuntimeError):
    """A policy method called in a phase or at a weight version it can't work in."""


class TrainingError(HybridRLError, ArithmeticError):
    """An update that can't go on, for instance after repeated non-finite gradients."""


class SyncError(HybridRLError, RuntimeError):
    """A weight sync that was incomplete or that the fingerprint contradicts."""


class PatchError(SyncError):
    """A weight patch that was refused; nothing of it was written. A full state repairs the receiver."""


class DamagedPatchError(PatchError):
    """A weight patch that is truncated, corrupted or malformed, or that doesn't fit the receiver's tensors."""


class PatchBaseError(PatchError):
    """A weight patch for another state than the one held."""


class CheckpointError(HybridRLError, RuntimeError):
    """A checkpoint that can't be written or read."""


class RewardError(HybridRLError, RuntimeError):
    """Reward functions that can't be started, or that fail on every row."""


class EpisodeError(HybridRLError, RuntimeError):
    """Environments that can't be started, or that failed in more episodes than a step can spare."""


class DeadlineError(HybridRLError, TimeoutError):
    """A wait that ran out; the message names what was waited for."""


class WorkerError(HybridRLError, RuntimeError):
    """A failure inside a worker.

    Attributes: role, rank, step (None before the first step), cause (one line), remote_traceback (text).
    """

    def __init__(self, role: str, rank: int, step: int | None, cause: str, remote_traceback: str = ""):
        self.role, self.rank, self.step = role, rank, step
        self.cause, self.remote_traceback = cause, remote_traceback
        where = f"{role} rank {rank}" + ("" if step is None else f" at step {step}")
        super().__init__(f"{where}: {cause}")

    def __reduce__(self):
        return type(self), (self.role, self.rank, self.step, self.cause, self.remote_traceback)


def unknown(kind: str, name: object, choices: Iterable[str]) -> str:
    """One line saying that `name` is no `kind`, with near matches and the choices."""
    choices = sorted(choices)
    near = difflib.get_close_matches(str(name), choices, n=3, cutoff=0.6)
    hint = f" Did you mean {', '.join(near)}?" if near else ""
    shown = repr(name) if "\n" not in repr(name) else type(name).__name__
    return f"Unknown {kind} {shown}.{hint} Choices: {', '.join(choices) or 'none'}."


@contextlib.contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """Around the imports of a package that the extra `name` installs; ConfigError says that `what` needs it."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f'{what} needs a package that is not installed ({error}); run pip install '
                          f'"hybridrl[{name}]".') from error
