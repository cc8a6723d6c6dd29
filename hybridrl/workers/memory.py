"""What a process holds on its device, at most and at present, and what is left there.

On CUDA: bytes of torch's allocator. On a CPU: the process's resident memory, everything in the process included; its
high-water mark is the kernel's, set back before the work that is measured (Linux keeps one a process, so that two
measurements can't run at the same time). Where the kernel does not allow that, a thread looks every few milliseconds.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

PROCESS = Path("/proc/self")
CGROUP = Path("/sys/fs/cgroup")
_SAMPLED_EVERY_S = 0.005
_C_LIBRARY = ctypes.CDLL(None)


@dataclass(slots=True)
class Peak:
    """`before_bytes` held when the work began, `bytes` at most during it."""

    before_bytes: int
    bytes: int = 0


def held_bytes(device: torch.device) -> int:
    """Held now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure what runs inside; the peak is there when it ends, also by an exception."""
    peak = Peak(held_bytes(device))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        try:
            yield peak
        finally:
            peak.bytes = torch.cuda.max_memory_allocated(device)
    elif _reset_high_water():
        try:
            yield peak
        finally:
            peak.bytes = _high_water()
    else:
        with _sampled(device, peak):
            yield peak


def free_bytes(device: torch.device) -> int:
    """What this process could still take: of the device, or of the machine and of the control group it runs in."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - held_bytes(device)
    room = _room_of_the_group()
    available = psutil.virtual_memory().available
    return available if room is None else min(available, room)


def give_back(device: torch.device) -> None:
    """Return to the system what the C library keeps of freed memory, which tensors of ever other sizes break up.

    Without it a process on a CPU grows slowly. It costs page faults later on: not for every step.
    """
    if device.type == "cpu" and hasattr(_C_LIBRARY, "malloc_trim"):
        _C_LIBRARY.malloc_trim(0)


def gib(size: float) -> str:
    """A number of bytes for people."""
    return f"{size / 2**30:.2f} GiB"


def _reset_high_water() -> bool:
    try:
        (PROCESS / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _high_water() -> int:
    lines = (PROCESS / "status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


@contextmanager
def _sampled(device: torch.device, peak: Peak) -> Iterator[None]:
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(_SAMPLED_EVERY_S):
            peak.bytes = max(peak.bytes, held_bytes(device))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        peak.bytes = max(peak.bytes, peak.before_bytes, held_bytes(device))


def _room_of_the_group() -> int | None:
    """Bytes left under the control group's limit, files that may be dropped counted as left; None without a limit."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(counts.get("inactive_file", 0))
