"""A call of a tool under its limits of time and output, in a process that ends with all that it started.

    this process ─fork─> supervisor ─fork─> the tool ─> whatever it starts

The supervisor adopts what its descendants leave behind, and kills it all when the tool is through, when it is told
to (SIGTERM), and when this process dies. Tools may hang, crash and leave processes; nothing of that reaches the
episode but a text.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from hybridrl.environments.tools.kernel import adopt_orphans, signal_when_parent_ends
from hybridrl.environments.tools.tool import Tool

SWEEP_S = 5.0
"""Longest killing of what a tool left."""
OK, RAISED = b"+", b"-"


def call(tool: Tool, arguments: Mapping[str, Any]) -> tuple[bool, str]:
    """Call a tool; whether it returned, and what the policy is told: its result, cut if too long, or what went wrong.

    A tool runs in an empty folder of its own, which is deleted.
    """
    answer, in_time = _answer(lambda: _worked(tool, arguments), tool.time_s, 4 * tool.output_chars + 1000)
    if not in_time:
        return False, f"{tool.name} took longer than {tool.time_s:g} s and was ended."
    if not answer:
        return False, f"{tool.name} ended without a result."
    return answer[:1] == OK, answer[1:].decode(errors="replace")


def cut(text: str, limit: int) -> str:
    """A text of at most `limit` characters and a note of how many are left out."""
    return text if len(text) <= limit else f"{text[:limit]}\n[cut: {len(text) - limit} more characters]"


def _worked(tool: Tool, arguments: Mapping[str, Any]) -> bytes:
    try:
        result = tool.function(**arguments)
        text = result if isinstance(result, str) else json.dumps(result, default=str)
    except BaseException as error:  # sys.exit in a tool is its failure, too
        text = f"{tool.name} failed: {error if isinstance(error, ValueError) and str(error) else repr(error)}"
        return RAISED + cut(text, tool.output_chars).encode(errors="replace")
    return OK + cut(text, tool.output_chars).encode(errors="replace")


def _answer(work: Callable[[], bytes], time_s: float, max_bytes: int) -> tuple[bytes, bool]:
    """What `work` returns in a process of its own, and whether it did in time."""
    reading, writing = os.pipe()
    parent = os.getpid()
    supervisor = os.fork()
    if supervisor == 0:
        try:
            os.close(reading)
            _supervise(work, writing, parent)
        finally:
            os._exit(1)
    os.close(writing)
    answer, in_time, deadline = bytearray(), False, time.monotonic() + time_s
    try:
        while len(answer) < max_bytes and (left := deadline - time.monotonic()) > 0:
            if select.select([reading], [], [], left)[0]:
                piece = os.read(reading, 1 << 16)
                if not piece:
                    in_time = True
                    break
                answer += piece
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor, signal.SIGTERM)
        os.waitpid(supervisor, 0)
    return bytes(answer), in_time or len(answer) >= max_bytes


def _supervise(work: Callable[[], bytes], writing: int, parent: int) -> None:
    signal.signal(signal.SIGTERM, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.setpgid(0, 0)
    adopt_orphans()
    signal_when_parent_ends(signal.SIGTERM)
    folder = tempfile.mkdtemp(prefix="tool-")
    try:
        try:
            if os.getppid() != parent:
                return
            tool = os.fork()
            if tool == 0:
                try:
                    _work(work, folder, writing)
                finally:
                    os._exit(1)
            os.close(writing)
            os.waitpid(tool, 0)
        finally:  # the caller's word to stop often comes just as the tool ends: before this, or never
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except _Stopped:
        pass
    finally:
        _end_descendants()
        shutil.rmtree(folder, ignore_errors=True)


class _Stopped(BaseException):
    """The supervisor was told to end."""


def _stop(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Stopped


def _work(work: Callable[[], bytes], folder: str, writing: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal_when_parent_ends(signal.SIGKILL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.chdir(folder)
    os.environ["HOME"] = folder
    answer = memoryview(work())
    while answer:
        answer = answer[os.write(writing, answer):]
    os._exit(0)


def _end_descendants() -> None:
    """Kill and reap until there are none: the orphans of one round are children in the next."""
    deadline = time.monotonic() + SWEEP_S
    while time.monotonic() < deadline:
        for pid in _children(os.getpid()):
            _kill_tree(pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _kill_tree(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGSTOP)  # so that it starts no more while its children are listed
    for child in _children(pid):
        _kill_tree(child)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found
