"""What a process holds, at most and at present: of memory that is really touched."""

import threading

import pytest
import torch

from hybridrl.workers import memory

CPU = torch.device("cpu")
MIB = 2**20


def take_and_free(mib: int, seen=lambda: None) -> None:
    block = torch.ones(mib * MIB // 4)  # large enough for a mapping of its own, which goes back when freed
    seen()
    del block


@pytest.mark.parametrize("kernel_counts", [True, False])
def test_the_peak_is_that_of_the_work_inside(monkeypatch, kernel_counts):
    looks = threading.Semaphore(0)

    def held_bytes(device):
        held = measure(device)
        looks.release()
        return held

    def seen():
        """Until the thread that looks has looked; the first look may have begun before there was anything to see."""
        while looks.acquire(blocking=False):
            pass
        assert kernel_counts or looks.acquire(timeout=60) and looks.acquire(timeout=60)

    measure = memory.held_bytes
    monkeypatch.setattr(memory, "held_bytes", held_bytes)
    if not kernel_counts:
        monkeypatch.setattr(memory, "_reset_high_water", lambda: False)
    take_and_free(200)
    with memory.peak_memory(CPU) as peak:
        take_and_free(100, seen)
    assert 95 * MIB < peak.bytes - peak.before_bytes < 130 * MIB
    with memory.peak_memory(CPU) as idle:
        seen()
    assert idle.bytes - idle.before_bytes < 20 * MIB, "what came before does not count"


def test_a_peak_is_there_after_an_exception():
    with pytest.raises(ValueError, match="inside"), memory.peak_memory(CPU) as peak:
        raise ValueError("inside")
    assert peak.bytes >= peak.before_bytes - MIB > 0


def test_freed_memory_goes_back():
    """Small blocks, every other one freed: the C library keeps their pages until it is told."""
    blocks = [torch.ones(25_000) for _ in range(2000)]  # 100 kB each, below what gets a mapping of its own
    last = blocks[-1]
    del blocks
    kept = memory.held_bytes(CPU)
    memory.give_back(CPU)
    assert kept - memory.held_bytes(CPU) > 100 * MIB and last.sum() == 25_000


def test_free_memory_is_limited_by_the_control_group(monkeypatch, tmp_path):
    available = memory.free_bytes(CPU)
    assert 0 < available
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    for name, text in (("max", "1000\n"), ("current", "700"), ("stat", "anon 1\ninactive_file 50\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory.free_bytes(CPU) == 350
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes(CPU) > 1000
