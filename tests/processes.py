"""Waiting for processes to end: with a deadline, as what was killed may not be gone yet on a busy machine."""

import os
import signal
import time

PATIENCE_S = 60.0


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has collected does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ended(*pids: int, within_s: float = PATIENCE_S) -> bool:
    """Whether processes end before the deadline; returns as soon as they have."""
    patience = time.monotonic() + within_s
    while any(map(alive, pids)):
        if time.monotonic() > patience:
            return False
        time.sleep(0.01)
    return True


def children(pid: int, within_s: float = PATIENCE_S) -> list[int]:
    """The child processes of a process, as soon as it has some."""
    patience = time.monotonic() + within_s
    while True:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            found = [int(word) for word in file.read().split()]
        if found:
            return found
        assert time.monotonic() < patience, f"process {pid} started none within {within_s:g} s"
        time.sleep(0.01)


def exit_code(pid: int, within_s: float = PATIENCE_S) -> int:
    """How a child of this process ends; it is killed at the deadline."""
    if not ended(pid, within_s=within_s):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_for(condition, what: str, within_s: float = PATIENCE_S) -> None:
    """Return as soon as a condition holds."""
    patience = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < patience, f"{what}: not within {within_s:g} s"
        time.sleep(0.01)
