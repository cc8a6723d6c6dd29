"""The installer chooses an interpreter, refuses what cannot work, and says what to do about a failed step."""

import ast
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "install.py"
FACTS = {"version": [3, 12, 1], "venv": True, "pip": True, "cc": "sh", "include": None}


@pytest.fixture()
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture()
def facts(tmp_path) -> dict:
    (tmp_path / "Python.h").touch()
    return {**FACTS, "include": str(tmp_path)}


@pytest.fixture()
def fake_python(tmp_path):
    """Write an interpreter that answers the probe with a version, on a PATH of its own."""

    def write(name: str, version: list[int]) -> Path:
        path = tmp_path / name
        answer = f'{{"version": {version}, "venv": true, "pip": true, "cc": "cc", "include": "/"}}'
        path.write_text(f"#!/bin/sh\necho '{answer}'\n")
        path.chmod(0o755)
        return path

    return write


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("ERROR: Failed building wheel for pycosat", "compiler"),
        ("error: command 'x86_64-linux-gnu-gcc' failed: No such file or directory", "compiler"),
        ("NewConnectionError('Name or service not known')\nERROR: No matching distribution found", "not reached"),
        ("ERROR: No matching distribution found for ray==2.60.0", "PIP_NO_INDEX"),
        ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]'))", "PIP_CERT"),
        ("error: Request failed after 3 retries\n  cause: dns error", "not reached"),
        ("died with signal 4", "AVX2"),
        ("ValueError: something new", "tries again"),
    ],
)
def test_advice_fits_what_the_step_printed(install, output, expected):
    assert expected in install.advice(output)


def test_failed_step_shows_its_last_lines_and_raises(install, capfd):
    code = "print('first line'); [print(i) for i in range(30)]; raise SystemExit('Connection refused')"
    with pytest.raises(install.StepFailed, match="'a step' failed. A package index was not reached"):
        install.run("a step", sys.executable, "-c", code)
    printed = capfd.readouterr().err
    assert "Connection refused" in printed and "first line" not in printed


def test_old_interpreter_falls_back_to_a_supported_one_on_the_path(install, fake_python, tmp_path, monkeypatch):
    monkeypatch.setattr(install.sys, "executable", str(fake_python("python3", [3, 9, 18])))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(install.SetupError, match=r"Python 3\.11 to 3\.14 is needed"):
        install.choose_python()
    fake_python("python3.12", [3, 12, 1])
    assert install.choose_python()[0] == "python3.12"


@pytest.mark.parametrize("version", [[3, 10, 9], [3, 15, 0]])
def test_unsupported_versions_are_refused(install, fake_python, tmp_path, monkeypatch, version):
    monkeypatch.setattr(install.sys, "executable", str(fake_python("python3", version)))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(install.SetupError, match="is needed"):
        install.choose_python()


def test_machine_that_fits_passes(install, facts):
    install.check_machine(facts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"venv": False}, "python3.12-venv"),
        ({"cc": "no-such-compiler -pthread"}, "No C compiler 'no-such-compiler'"),
        ({"include": "/nowhere"}, "python3.12-dev"),
    ],
)
def test_what_the_interpreter_lacks_is_named(install, facts, change, message, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(install.SetupError, match=message):
        install.check_machine({**facts, **change})


def test_other_machines_are_refused(install, facts, monkeypatch):
    monkeypatch.setattr(install.platform, "machine", lambda: "aarch64")
    with pytest.raises(install.SetupError, match="aarch64"):
        install.check_machine(facts)


def test_small_disk_is_refused_before_anything_is_made(install, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=2 * 10**9)
    monkeypatch.setattr(install, "VENV_PYTHON", str(tmp_path / "none"))
    monkeypatch.setattr(install.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(install, "run", lambda *command: pytest.fail(f"ran {command}"))
    with pytest.raises(install.SetupError, match=r"2\.0 GB are free"):
        install.create_environment(sys.executable)


class Steps:
    """Records the installer's commands and fails the first with an output."""

    def __init__(self, install: ModuleType, output: str):
        self.commands: list[tuple] = []
        self._failure = install.StepFailed("a step", output)

    def __call__(self, title: str, *command: str) -> None:
        self.commands.append(command)
        if len(self.commands) == 1:
            raise self._failure


def test_torch_missing_from_pips_indexes_comes_from_its_own(install, monkeypatch):
    steps = Steps(install, "ERROR: No matching distribution found for torch==2.13.0+cpu")
    monkeypatch.setattr(install, "run", steps)
    install.install_torch(["pip", "install"])
    assert steps.commands[0] == ("pip", "install", "torch==2.13.0+cpu")
    assert steps.commands[1] == ("pip", "install", install.UV)
    assert {"--no-deps", "--torch-backend=cpu", "torch==2.13.0+cpu"} <= set(steps.commands[2])


def test_torch_that_fails_for_another_reason_is_not_tried_elsewhere(install, monkeypatch):
    steps = Steps(install, "No space left on device")
    monkeypatch.setattr(install, "run", steps)
    with pytest.raises(install.StepFailed, match="disk is full"):
        install.install_torch(["pip", "install"])
    assert len(steps.commands) == 1


def test_only_modules_that_do_not_import_are_uninstalled(install, tmp_path, monkeypatch):
    (tmp_path / "sound.py").write_text("")
    (tmp_path / "broken.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(install, "VENV_PYTHON", sys.executable)
    monkeypatch.setattr(install, "OPTIONAL_MODULES", ("sound", "broken", "absent"))
    removed = []
    monkeypatch.setattr(install, "run", lambda title, *command: removed.append(command[-1]))
    install.drop_broken_modules()
    assert removed == ["broken"]


def test_script_parses_as_python_3_6():
    ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 6))


def test_failure_reaches_make_as_one_line_and_a_status():
    code = f"import runpy, shutil; shutil.which = lambda _: None; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr.startswith("setup: No C compiler") and result.stderr.count("\n") == 1
