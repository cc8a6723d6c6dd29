"""A sandbox for Python programs that the policy writes.

    caller ─fork─> outside: new namespaces ─fork─> inside: new root, limits, another user ─exec─> python main.py

Inside there is no network, none of the machine's processes, and of its files only the Python installation, to be
read. docs/environments.md says what that protects from.
"""

import contextlib
import os
import resource
import select
import signal
import stat
import sys
from collections.abc import Callable
from typing import NoReturn

from hybridrl.environments.tools import kernel

_NAMESPACES = kernel.NEW_MOUNTS | kernel.NEW_IPC | kernel.NEW_PIDS | kernel.NEW_NETWORK
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
_HOME = "/sandbox"
_REFUSED = {
    "semget": 64, "shmget": 29, "msgget": 68, "memfd_create": 319, "memfd_secret": 447, "ptrace": 101, "add_key": 248,
    "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298, "process_vm_readv": 310,
    "process_vm_writev": 311, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427}
"""System calls that are refused: memory that no limit counts, and rarely used parts of the kernel."""
LEAST_FILES, BYTES_PER_FILE = 1024, 1 << 14
"""Most files are one for so many bytes of memory: those without content take some, too."""
MAX_OUTPUT_BYTES = 1 << 18
"""A program that writes more is ended; what a tool may return is a limit of its own."""
FIRST_USER = 1_000_000
"""Root gives each program a user id of its own, this plus a process id: limits count processes by user."""


class Python:
    """Runs a program in a sandbox and returns what it printed.

    Args:
        memory_mb: address space of each process, in MiB; of the files written, too.
        processes: most processes and threads at a time.
        cpu_s: CPU time of each process, in seconds.
        isolate: use namespaces, and refuse to start where the kernel does not permit them. false does without where
            it has to: then the program has the network, and reads whatever its user may.
    Raises:
        ValueError: a limit is not positive, or `isolate` is not possible here.
    """

    def __init__(self, memory_mb: int = 512, processes: int = 16, cpu_s: int = 10, isolate: bool = True):
        if min(memory_mb, processes, cpu_s) < 1:
            raise ValueError(f"limits must be at least 1, got {memory_mb}, {processes} and {cpu_s}")
        self._memory, self._processes, self._cpu_s = memory_mb << 20, processes, cpu_s
        self.isolated = _succeeds(_confine)
        """Whether programs have namespaces of their own."""
        if isolate and not self.isolated:
            raise ValueError("the kernel does not permit namespaces to this user; isolate=false runs programs with "
                             "limits of resources only, with the network open")

    def __call__(self, code: str) -> str:
        """
        Run a Python program and return what it prints. Nothing is kept between runs.

        Args:
            code: the program; results must be printed
        """
        with open("main.py", "w", encoding="utf-8", errors="replace") as file:
            file.write(code)
            os.fchmod(file.fileno(), 0o644)  # for another user, whatever this one's umask
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(writing, 1)
                os.dup2(writing, 2)
                self._outside(code)
            except BaseException as error:
                os.write(1, f"the sandbox failed: {error}\n".encode())
            finally:
                os._exit(1)
        os.close(writing)
        output, status = _read(reading, pid)
        text = output.decode(errors="replace")
        if len(output) > MAX_OUTPUT_BYTES:
            return text + "\n[ended: too much output]"
        return text + _ending(status) if status else text or "The program printed nothing."

    def _outside(self, code: str) -> None:
        """Enter new namespaces; the child is the first process of its own, and takes all others with it."""
        kernel.signal_when_parent_ends(signal.SIGKILL)
        if self.isolated:
            _leave()
        user = FIRST_USER + os.getpid() % FIRST_USER
        pid = os.fork()
        if pid == 0:
            try:
                self._inside(code, user)
            except BaseException as error:
                os.write(1, f"the sandbox failed: {error}\n".encode())
            finally:
                os._exit(1)
        status = os.waitpid(pid, 0)[1]
        # A status above 128 stands for a signal, as shells have it.
        os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))

    def _inside(self, code: str, user: int) -> NoReturn:
        folder = os.getcwd()
        os.umask(0o022)
        if self.isolated:
            _new_root(folder, self._memory)
            folder = _HOME
            with open(f"{_HOME}/main.py", "w", encoding="utf-8", errors="replace") as file:
                file.write(code)
        changed = _another_user(folder, user)
        kernel.signal_when_parent_ends(signal.SIGKILL)
        kernel.forgo_new_privileges()
        kernel.refuse(_REFUSED.values())
        os.chdir(folder)
        # Before the limit on open files: the caller may have more open than a program is allowed.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        for limit, value in ((resource.RLIMIT_AS, self._memory), (resource.RLIMIT_CPU, self._cpu_s),
                             (resource.RLIMIT_FSIZE, self._memory), (resource.RLIMIT_NOFILE, 64),
                             (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NPROC, self._processes)):
            hard = resource.getrlimit(limit)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            if limit != resource.RLIMIT_NPROC or self.isolated or changed:
                resource.setrlimit(limit, (value, value))
        os.execve(sys.executable, [sys.executable, "-I", "-B", "main.py"],
                  {"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1",
                   "OPENBLAS_NUM_THREADS": "1", "TMPDIR": folder})


def _leave() -> None:
    """Enter new namespaces; without rights of its own, as the one user of a new user namespace."""
    if os.geteuid() == 0:
        kernel.unshare(_NAMESPACES)
        return
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(_NAMESPACES | kernel.NEW_USER)
    for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{file}", "w") as opened:
            opened.write(text)


def _confine() -> None:
    """What an isolated program is confined with and a kernel may lack."""
    _leave()
    kernel.forgo_new_privileges()
    kernel.refuse(_REFUSED.values())


def _new_root(folder: str, size: int) -> None:
    """Make an empty file system in memory the root, with the Python installation in it, which can only be read."""
    kernel.mount("none", "/", None, kernel.RECURSIVE | kernel.PRIVATE)
    kernel.mount("tmpfs", folder, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES,
                 f"size={size},nr_inodes={max(LEAST_FILES, size // BYTES_PER_FILE)},mode=755")
    installation = {sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))}
    for path in sorted({*_SYSTEM, *_DEVICES, *installation}):
        target = folder + path
        if not os.path.lexists(path) or os.path.lexists(target):
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
            continue
        if os.path.isdir(path):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT))
        kernel.mount(path, target, None, kernel.BIND | kernel.RECURSIVE)
        if not stat.S_ISCHR(os.stat(path).st_mode):
            kernel.read_only(target)
    os.mkdir(folder + _HOME)
    os.chroot(folder)
    os.chdir("/")


def _another_user(folder: str, preferred: int) -> bool:
    """Root becomes a user who owns nothing but the folder; whether it did."""
    if os.geteuid() != 0:
        return False
    for user in (preferred, 65534):
        with contextlib.suppress(OSError):
            os.chown(folder, user, user)
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            return True
    return False


def _read(reading: int, pid: int) -> tuple[bytes, int]:
    """Output of a process until it ends, or writes too much and is killed; and its exit status."""
    output, ended = bytearray(), os.pidfd_open(pid)
    while len(output) <= MAX_OUTPUT_BYTES:
        # Without namespaces, what it left behind may hold the pipe open.
        if reading not in select.select([reading, ended], [], [])[0]:
            break
        piece = os.read(reading, 1 << 16)
        if not piece:
            break
        output += piece
    os.close(reading)
    os.close(ended)
    if len(output) > MAX_OUTPUT_BYTES:
        os.kill(pid, signal.SIGKILL)
    return bytes(output[:MAX_OUTPUT_BYTES + 1]), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _ending(status: int) -> str:
    if status <= 128:
        return f"\n[exit status {status}]"
    reasons: dict[int, str] = {
        signal.SIGXCPU: "too much CPU time", signal.SIGKILL: "killed: too much CPU time or memory",
        signal.SIGXFSZ: "a file too large", signal.SIGSEGV: "crashed: SIGSEGV"}
    return f"\n[{reasons.get(status - 128, f'ended by signal {status - 128}')}]"


def _succeeds(attempt: Callable[[], None]) -> bool:
    """Whether a function returns in a process of its own."""
    pid = os.fork()
    if pid == 0:
        try:
            attempt()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0
