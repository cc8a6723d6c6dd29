"""Ctrl-C while Ray starts: it must neither be lost nor cut `ray.init` in two; and where its files go."""

import signal
import tempfile
import threading
from pathlib import Path

import pytest

from hybridrl.controller.cluster import deferred_interrupt, make_temp_dir


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_waits_for_the_end_of_the_block(number):
    seen = []
    before = signal.signal(number, lambda *_: seen.append("handler"))
    try:
        with deferred_interrupt():
            signal.raise_signal(number)
            seen.append("end of the block")
        assert seen == ["end of the block", "handler"]
        signal.raise_signal(number)
        assert seen[2:] == ["handler"], "the handler is back"
    finally:
        signal.signal(number, before)


def test_the_second_signal_comes_through():
    # A job that a shell started in the background ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), deferred_interrupt():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the block went on")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_of_the_block_is_the_one_that_counts():
    with pytest.raises(ZeroDivisionError), deferred_interrupt():
        signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError


def test_a_handler_set_in_the_block_stays():
    def rays_own(number, frame):
        raise AssertionError

    before = signal.getsignal(signal.SIGTERM)
    try:
        with deferred_interrupt():
            signal.signal(signal.SIGTERM, rays_own)
        assert signal.getsignal(signal.SIGTERM) is rays_own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_change_no_handler():
    handlers = []

    def work():
        with deferred_interrupt():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert handlers == [signal.getsignal(signal.SIGINT)]


def test_a_folder_for_ray_leaves_room_for_the_paths_of_sockets(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 30)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = Path(make_temp_dir())
    folder.rmdir()
    assert folder.parent == Path("/tmp") and not list(deep.iterdir())
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        assert Path(make_temp_dir()).parent == Path(short)
