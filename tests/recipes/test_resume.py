"""A run that was stopped and resumed gives the metrics of the run that was not stopped, bit for bit."""

import os
import signal
import time
from pathlib import Path

import pytest

from hybridrl.controller.checkpoints import Checkpoints
from tests.recipes.command import TIMEOUT_S, Command, metrics, samples

pytestmark = pytest.mark.slow

STEPS = 4


@pytest.fixture(scope="module")
def gate(tmp_path_factory) -> Path:
    """Folder of the gate: while `hold` names a prompt, that prompt's reward waits, and `held` says that it does."""
    return tmp_path_factory.mktemp("gate")


@pytest.fixture(scope="module")
def words(grpo, gate) -> list[str]:
    """vLLM on one local rank. In the order of the file, step s has prompts 2s-2 and 2s-1 (modulo ten)."""
    function = f"{{name:'tests.recipes.reward_functions:gated',options:{{gate:'{gate}'}}}}"
    return [*grpo, f"reward.functions=[{function}]", "reward.timeout_s=300", "data.shuffle=false",
            "trainer.prompts_per_step=2", f"trainer.steps={STEPS}", "trainer.trackers=[]", "trainer.export=false"]


@pytest.fixture(scope="module")
def unbroken(run, words, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    run(*words, f"trainer.run_dir={folder}")
    return folder


def stop_at_the_gate(command: Command, gate: Path, how: signal.Signals) -> None:
    """Send a signal to the whole process group, as a terminal does, while a reward waits."""
    ends = time.monotonic() + TIMEOUT_S
    while not (gate / "held").exists():
        assert command.process.poll() is None and time.monotonic() < ends, command.out + command.err
        time.sleep(0.02)
    os.killpg(command.process.pid, how)
    (gate / "hold").unlink()
    (gate / "held").unlink()


def hold(gate: Path, step: int) -> None:
    """Close the gate for the second prompt of a step."""
    (gate / "hold").write_text(f"{2 * step - 1}+{2 * step}=")


def compare(folder: Path, unbroken: Path) -> None:
    assert metrics(folder) == metrics(unbroken)  # bit for bit, NaN does not occur
    assert samples(folder) == samples(unbroken)


def saved(folder: Path) -> list[str]:
    return [path.name for path in Checkpoints(folder / "checkpoints", 9).newest_first()]


def test_the_unbroken_run_learns_and_changes(unbroken):
    rows = metrics(unbroken)
    assert list(rows) == [1, 2, 3, 4]
    assert len({row["train/loss"] for row in rows.values()}) == STEPS
    assert len({sample["response"] for sample in samples(unbroken)}) > 8


def test_stopped_by_ctrl_c_in_mid_step(start, run, words, unbroken, gate, tmp_path):
    folder = tmp_path / "run"
    hold(gate, step=2)
    command = start(*words, f"trainer.run_dir={folder}")
    stop_at_the_gate(command, gate, signal.SIGINT)
    assert command.wait() == 130
    assert command.left() == []
    assert "Stopping after step 2" in command.err
    assert command.err.splitlines()[-1] == "grpo: stopped after step 2"
    assert f"--config {folder}/config.yaml" in command.out
    assert saved(folder) == ["step_000002"] and list(metrics(folder)) == [1, 2]
    resumed = run("recipes.grpo", "--config", str(folder / "config.yaml"))
    assert "restored step 2" in resumed.out
    compare(folder, unbroken)


def test_killed_in_mid_step_and_extended(start, run, words, unbroken, gate, tmp_path):
    """Killed in the third of three steps, resumed, then given a fourth."""
    folder = tmp_path / "run"
    three = [*words, "trainer.checkpoint_every=1", "trainer.steps=3", f"trainer.run_dir={folder}"]
    hold(gate, step=3)
    command = start(*three)
    stop_at_the_gate(command, gate, signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    assert command.left() == []
    assert saved(folder) == ["step_000002", "step_000001"]
    extended = run(*words, "trainer.checkpoint_every=1", f"trainer.steps={STEPS}", f"trainer.run_dir={folder}")
    assert "restored step 2" in extended.out
    assert "option changed: trainer.steps: 3 -> 4" in extended.out
    compare(folder, unbroken)
    assert saved(folder) == ["step_000004", "step_000003"]


def test_ctrl_c_while_ray_starts(start, grpo, tmp_path):
    """Inside `ray.init`, which must not be cut in two: nothing is left, and the folder can be used again."""
    words = [*grpo, "cluster.backend=ray", "cluster.ranks=2", f"trainer.run_dir={tmp_path / 'run'}"]
    command = start(*words)
    ends = time.monotonic() + TIMEOUT_S
    while not any(b"raylet" in command_line(process) for process in command.processes()):
        assert command.process.poll() is None and time.monotonic() < ends, command.out + command.err
        time.sleep(0.02)
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.wait() == 130
    assert command.err.splitlines() == ["grpo: interrupted"]
    assert command.left() == []
    assert metrics(tmp_path / "run") == {} and saved(tmp_path / "run") == []


def command_line(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""
