"""Calls of the Linux kernel that Python 3.11 has no functions for."""

import ctypes
import errno
import os
import struct
from collections.abc import Collection

_libc = ctypes.CDLL(None, use_errno=True)

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
"""CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET."""
BIND, RECURSIVE, PRIVATE, NO_SUID, NO_DEVICES = 4096, 16384, 1 << 18, 2, 4
"""MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV."""
_PDEATHSIG, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 36, 38
_MOUNT_SETATTR, _CWD, _AT_RECURSIVE, _ATTR_RDONLY, _ATTR_NOSUID = 442, -100, 0x8000, 1, 2

_SET_FILTER, _FILTER, _X86_64, _X32 = 22, 2, 0xC000003E, 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _RETURN, _ALLOW, _FAIL = 0x20, 0x15, 0x35, 0x06, 0x7FFF0000, 0x00050000


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def signal_when_parent_ends(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends; forgotten when its user changes."""
    _checked(_libc.prctl(_PDEATHSIG, number, 0, 0, 0), "prctl")


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends."""
    _checked(_libc.prctl(_SUBREAPER, 1, 0, 0, 0), "prctl")


def forgo_new_privileges() -> None:
    """No program that this process runs gains rights."""
    _checked(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")


def refuse(calls: Collection[int]) -> None:
    """Have system calls of these x86-64 numbers, and all of other architectures, fail with EPERM from now on.

    Needs `forgo_new_privileges`; programs that are started inherit it. At most 250 calls.
    """
    # The filter is a program: (code, steps to jump if true, if false, value); the last two steps allow and refuse.
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 0, len(calls) + 3, _X86_64), (_LOAD, 0, 0, 0),
             (_AT_LEAST, len(calls) + 1, 0, _X32)]
    steps += [(_EQUAL, len(calls) - i, 0, call) for i, call in enumerate(calls)]
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    filter_ = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(program)))
    _checked(_libc.prctl(_SET_FILTER, _FILTER, filter_, 0, 0), "seccomp")


def unshare(flags: int) -> None:
    """Leave namespaces for new ones."""
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    """Mount a file system, or bind a path to another."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _checked(_libc.mount(*encoded, ctypes.c_ulong(flags), None if data is None else data.encode()), f"mount {target}")


def read_only(target: str) -> None:
    """Make a mount and all below it read-only, set-user-id programs in it powerless; needs Linux 5.12."""
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    _checked(_libc.syscall(_MOUNT_SETATTR, _CWD, os.fsencode(target), _AT_RECURSIVE, attributes,
                           ctypes.c_size_t(ctypes.sizeof(attributes))), f"mount_setattr {target}")
