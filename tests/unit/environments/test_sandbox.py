"""The Python sandbox against programs that want out of it. Needs a kernel that permits namespaces."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from hybridrl.environments.tools import sandbox
from hybridrl.environments.tools.calling import call
from hybridrl.environments.tools.sandbox import Python
from hybridrl.environments.tools.tool import tool_from
from hybridrl.errors import ConfigError
from tests.processes import exit_code

PERMITTED = sandbox._succeeds(sandbox._leave)
isolated = pytest.mark.skipif(not PERMITTED, reason="the kernel permits no namespaces")


@pytest.fixture
def refused(monkeypatch):
    """A kernel that permits no namespaces, and a Python that other users can run."""
    monkeypatch.setattr(sandbox, "_succeeds", lambda attempt: False)
    system = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if system is None:
        pytest.skip("no Python of the system")
    folder = Path(tempfile.gettempdir()).resolve()
    if not all(one.stat().st_mode & 1 for one in (folder, *folder.parents)):
        pytest.skip("other users are not let through to temporary files")
    monkeypatch.setattr(sandbox.sys, "executable", system)


def run(code, time_s=20.0, output_chars=2000, **options):
    return call(tool_from({"tool": "python", "options": {"isolate": PERMITTED, **options}}, time_s, output_chars),
                {"code": code})


def processes_with(mark):
    """Ids of processes whose command line has a text."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                found += [int(pid)] if mark.encode() in file.read() else []
        except OSError:
            pass
    return found


def test_what_a_program_prints_is_the_result():
    assert run("print(2 ** 10)") == (True, "1024\n")
    assert run("import math, json; print(json.dumps(math.pi))") == (True, "3.141592653589793\n")
    assert run("x = 1") == (True, "The program printed nothing.")


def test_a_caller_with_more_open_files_than_a_program_may_have():
    files = [open(os.devnull) for _ in range(200)]
    try:
        program = ("import os\nfor number in range(3, 500):\n    try:\n        print(os.fstat(number))\n"
                   "    except OSError:\n        pass")
        assert run(program) == (True, "The program printed nothing.")
    finally:
        for file in files:
            file.close()


def test_errors_are_shown_with_the_exit_status():
    text = run("print('before', flush=True)\n1 / 0")[1]
    assert text.startswith("before\n") and "ZeroDivisionError" in text and text.endswith("[exit status 1]")
    assert run("raise SystemExit(3)") == (True, "\n[exit status 3]")
    assert "SyntaxError" in run("1 +")[1]


def test_nothing_is_kept_between_runs_and_no_environment_is_seen():
    assert run("open('kept', 'w').write('x'); print(open('kept').read())") == (True, "x\n")
    assert "FileNotFoundError" in run("open('kept')")[1]
    assert run("import os; print(sorted(os.environ))")[1] == (
        "['HOME', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH', 'TMPDIR']\n")


def test_an_endless_loop_is_ended_by_time_or_cpu_time():
    assert run("while True: pass", time_s=2.0) == (False, "python took longer than 2 s and was ended.")
    assert "too much CPU time" in run("while True: pass", cpu_s=1, time_s=100.0)[1]


def test_endless_output_is_ended_and_cut():
    text = run("while True: print('x' * 100)", output_chars=50)[1]
    assert text.startswith("x" * 50 + "\n[cut: ") and len(text) < 100


def test_memory_has_a_limit():
    assert "MemoryError" in run("x = bytearray(2 ** 30)", memory_mb=256)[1]
    assert run("x = bytearray(2 ** 26); print(len(x))", memory_mb=256) == (True, "67108864\n")


def test_files_have_a_limit():
    program = "with open('f', 'wb') as f:\n  for _ in range(64): f.write(bytes(2 ** 20))"
    assert run(program, memory_mb=32)[1] != "The program printed nothing."


@isolated
def test_files_without_content_have_a_limit_too():
    program = """
n = 0
try:
    while n < 20000:
        open(str(n), "w").close()
        n += 1
except OSError as error:
    print(error.strerror, 7000 < n < 8192)"""
    assert run(program, memory_mb=128) == (True, "No space left on device True\n")


def test_memory_that_no_limit_counts_is_refused():
    """Memory of files without a name, and segments of System V: neither is address space unless it is mapped."""
    program = """
import ctypes, os
try:
    os.memfd_create("x")
except PermissionError:
    print("refused")
libc = ctypes.CDLL(None, use_errno=True)
print(libc.shmget(0, 1 << 20, 0o1600), ctypes.get_errno(), libc.msgget(0, 0o1600))
print(libc.syscall(425, 8, bytes(200)), libc.syscall(0x40000000 | 39))  # io_uring; getpid as x32 numbers it"""
    assert run(program) == (True, "refused\n-1 1 -1\n-1 -1\n")


def test_a_fork_bomb_runs_out_of_processes_and_leaves_none():
    mark = f"bomb{os.getpid()}"
    program = f"""
import os, subprocess, sys
children = []
try:
    while True:
        children.append(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600) # {mark}']))
except OSError:
    print(len(children))
"""
    started = int(run(program, processes=8)[1])
    assert 1 <= started <= 7 and processes_with(mark) == []
    endless = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass\n"
    assert not run(endless, time_s=3.0, processes=8)[0]


@isolated
def test_daemons_end_with_the_program():
    mark = f"daemon{os.getpid()}"
    program = (f"import os, subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600) "
               f"# {mark}'], start_new_session=True)\nprint('left')")
    assert run(program) == (True, "left\n")
    assert processes_with(mark) == []


@isolated
def test_there_is_no_network():
    import socket
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        text = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)")[1]
    assert "OSError: [Errno 101] Network is unreachable" in text
    assert "Errno" in run("import urllib.request; urllib.request.urlopen('http://192.0.2.1', timeout=2)")[1]


@isolated
def test_files_of_the_machine_are_neither_seen_nor_written(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    secret.chmod(0o666)
    for path in (secret, "/etc/passwd", "/proc/1/environ"):
        assert "FileNotFoundError" in run(f"open({str(path)!r}).read()")[1]
    program = """
import os, sys
for path in ('/usr/x', os.path.join(sys.prefix, 'x'), '/x', os.path.join(os.path.dirname(os.__file__), 'os.py')):
    try:
        open(path, 'w')
        print('wrote', path)
    except OSError:
        print('no')
"""
    written = run(program)[1]
    # The root itself is a file system in memory that goes with the program.
    assert "wrote /usr" not in written and written.count("no\n") >= 3
    assert not os.path.exists("/x")


@isolated
def test_processes_of_the_machine_are_not_there():
    program = f"""
import os
print(os.getpid())
try:
    os.kill({os.getpid()}, 0)
except ProcessLookupError:
    print('not there')
"""
    assert run(program) == (True, "1\nnot there\n")


@isolated
def test_it_gains_no_rights():
    program = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.unshare(0x10000000), libc.mount(b'none', b'/usr', b'tmpfs', 0, None), libc.chroot(b'/usr'),
      libc.setuid(0) if libc.getuid() else -1)
"""
    assert run(program) == (True, "-1 -1 -1 -1\n")


def test_without_namespaces_it_refuses_unless_told(refused):
    with pytest.raises(ConfigError, match="isolate=false"):
        tool_from("python", 1.0, 100)
    assert run("print(1)", isolate=False) == (True, "1\n")
    with pytest.raises(ValueError, match="at least 1"):
        Python(processes=0)


def test_without_namespaces_limits_and_cleaning_up_are_left(refused):
    mark = f"loose{os.getpid()}"
    program = (f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600) "
               f"# {mark}'], start_new_session=True)\nx = bytearray(2 ** 30)")
    assert "MemoryError" in run(program, isolate=False, processes=4096)[1]
    assert processes_with(mark) == []


@pytest.mark.parametrize("isolate", [pytest.param(True, marks=isolated), False])
def test_a_caller_whose_files_are_nobody_elses(isolate, request):
    if not isolate:
        request.getfixturevalue("refused")
    before = os.umask(0o077)
    try:
        assert run("open('x', 'w').write('1'); print(open('x').read())", isolate=isolate) == (True, "1\n")
    finally:
        os.umask(before)


def test_many_at_a_time_do_not_share_a_limit_of_processes():
    """Each is a user of its own: twelve processes in all, where each program may have three."""
    program = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(1)'])\nprint(1)"
    children = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(0 if run(program, processes=3) == (True, "1\n") else 1)
            finally:
                os._exit(1)
        children.append(pid)
    assert [exit_code(pid) for pid in children] == [0] * 4
