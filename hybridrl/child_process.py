"""Child processes that run what users wrote: started without torch, killed with all that they started.

A child is the leader of a session of its own, so that one signal ends its whole process group, and it has the kernel
kill that group once the parent's end of a pipe closes: no child outlives a parent that was killed.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys


def start(module: str, descriptors: list[int], arguments: tuple[str, ...] = ()) -> tuple[subprocess.Popen, int]:
    """Run `python -m module LIFELINE DESCRIPTOR... ARGUMENT...` with the parent's import paths.

    Returns the process and the lifeline: closing it kills the process group, once the child called `die_with`.
    """
    alive, lifeline = os.pipe()
    try:
        # Not multiprocessing: its children import the parent's main module, and torch with it.
        process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, [alive, *descriptors]), *arguments],
            pass_fds=(alive, *descriptors), stdin=subprocess.DEVNULL, stdout=2, start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ,
                 "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)})
    except BaseException:
        os.close(lifeline)
        raise
    finally:
        os.close(alive)
    return process, lifeline


def die_with(lifeline: int) -> None:
    """Have the kernel kill this process's group once the parent's end of the pipe closes.

    A thread that watches would not run while the interpreter's lock is held in C code.
    """
    # Opened anew: the owner of the signal belongs to the open file, which forked processes share.
    own = os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)


def kill_group(pid: int) -> None:
    """Kill a process group that was not reaped yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def exit_status(code: int | None) -> str:
    """How a process ended, in words; `code` as of `Popen.returncode`."""
    if code is None:
        return "killed, not ended yet"
    return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
