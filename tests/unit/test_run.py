"""A run's folder: what is in it, and that stopping and resuming changes nothing."""

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import yaml

from hybridrl.batch import make_batch
from hybridrl.config import ClusterConfig, TrainerConfig
from hybridrl.controller.run import Run
from hybridrl.controller.run_folder import LineFile
from hybridrl.errors import CheckpointError, ConfigError
from hybridrl.metrics import deterministic, read_metrics
from tests.unit.fakes import Policy, Prompts

ROOT = Path(__file__).resolve().parents[2]


@dataclass(kw_only=True, slots=True)
class Config:
    seed: int = 0
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


def config(folder, seed=0, **trainer):
    trainer = {"steps": 4, "prompts_per_step": 2, "trackers": [], **trainer}
    return Config(seed=seed, trainer=TrainerConfig(run_dir=str(folder), **trainer))


class Crash(Exception):
    pass


def train(cfg, crash_in=None, crash_at="before log"):
    """The loop of a recipe, over fakes; may crash in a step."""
    policy, prompts = Policy(), Prompts()
    with Run(cfg, "test") as run:
        run.restore(policy=policy, prompts=prompts)
        for step, batch in run.steps(prompts):
            with run.phase("update"):
                metrics = policy.update(batch)
            if step == crash_in and crash_at == "before log":
                raise Crash
            run.log(step, metrics | {"reward/mean": float(batch["rewards"].mean())})
            run.samples(step, batch)
            if step == crash_in and crash_at == "before checkpoint":
                raise Crash
            run.checkpoint(step, policy=policy, prompts=prompts)
            if step == crash_in and crash_at == "after checkpoint":
                raise Crash
    return run


def lines(folder):
    return [deterministic(line) for line in read_metrics(Path(folder) / "metrics.jsonl")]


def samples(folder):
    return [json.loads(line) for line in (Path(folder) / "samples.jsonl").read_text().splitlines()]


# The folder


def test_a_run_writes_its_options_metrics_and_samples(tmp_path):
    run = train(config(tmp_path / "run"))
    assert run.dir == tmp_path / "run" and not run.resumed
    written = yaml.safe_load((run.dir / "config.yaml").read_text())
    assert written["trainer"]["steps"] == 4 and written["trainer"]["run_dir"] == str(tmp_path / "run")
    # weight 1: 1*1.5+2=3.5, 3.5*1.5+4=9.25, 9.25*1.5+6=19.875, 19.875*1.5+8=37.8125
    assert [line["train/weight"] for line in lines(run.dir)] == [3.5, 9.25, 19.875, 37.8125]
    assert [line["step"] for line in lines(run.dir)] == [1, 2, 3, 4]
    assert [s["prompt"] for s in samples(run.dir)] == [f"p{step}.{i}" for step in (1, 2, 3, 4) for i in (0, 1)]
    assert [p.name for p in (run.dir / "checkpoints").iterdir()] == ["step_000004"]


def test_every_step_has_its_times(tmp_path):
    train(config(tmp_path / "run"))
    for line in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert 0 <= line["time/update"] <= line["time/step"]


def test_a_default_folder_is_named_after_recipe_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = {train(config("")).dir for _ in range(2)}
    assert len(folders) == 2, "two runs in one second need two folders"
    assert all(f.parent == tmp_path / "runs" and f.name.startswith("test-20") for f in folders)


def test_a_folder_that_is_no_run_is_refused_untouched(tmp_path):
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match="exists and is no run's folder"):
        train(config(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(ConfigError, match="exists and is no run's folder"):
        train(config(tmp_path / "thesis.txt"))


def test_a_folder_that_cannot_be_made_is_named():
    with pytest.raises(ConfigError, match="trainer.run_dir=/proc/x/run can't be made"):
        train(config("/proc/x/run"))


def test_a_folder_in_use_is_refused(tmp_path):
    with Run(config(tmp_path / "run"), "test"):
        with pytest.raises(ConfigError, match=rf"is in use by another process \(pid {os.getpid()}\)"):
            train(config(tmp_path / "run"))
    train(config(tmp_path / "run"))


def test_a_missing_tracker_names_the_extra(tmp_path):
    with pytest.raises(ConfigError, match=r'no_such is not installed; run pip install "hybridrl\[no_such\]"'):
        train(config(tmp_path / "run", trackers=["no_such"]))
    assert not (tmp_path / "run").exists(), "found before anything is made"


def test_tensorboard_has_every_value_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cfg = config(tmp_path / "run", trackers=["tensorboard"], checkpoint_every=2)
    with pytest.raises(Crash):
        train(cfg, crash_in=3, crash_at="before checkpoint")
    train(cfg)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_what_json_cannot_say_is_null(tmp_path):
    with Run(config(tmp_path / "run"), "test") as run:
        run.log(0, {"a": float("nan"), "b": torch.tensor(float("inf")), "c": torch.tensor(2), "d": 0.1})
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 0, "a": None, "b": None, "c": 2.0, "d": 0.1}


def test_samples_are_spread_over_the_batch(tmp_path):
    batch = make_batch(
        prompt=[f"p{i}" for i in range(8)], response=[f"r{i}" for i in range(8)], answer=[None] * 8,
        rewards=[float("nan"), *range(1, 8)], reward_error=["timed out", *[None] * 7], finish_reason=["stop"] * 8,
        weight_versions=[[3, 3, 4], *[[4]] * 7],
    )
    with Run(config(tmp_path / "run", save_samples=2), "test") as run:
        run.samples(1, batch)
    with Run(config(tmp_path / "all", save_samples=99), "test") as run:
        run.samples(1, batch)
    with Run(config(tmp_path / "none", save_samples=0), "test") as run:
        run.samples(1, batch)
    first, second = samples(tmp_path / "run")
    assert first == {"step": 1, "prompt": "p0", "response": "r0", "answer": None, "reward_error": "timed out",
                     "finish_reason": "stop", "reward": None, "weight_versions": [3, 4]}
    assert (second["prompt"], second["reward"]) == ("p4", 4.0)
    assert [s["prompt"] for s in samples(tmp_path / "all")] == [f"p{i}" for i in range(8)]
    assert samples(tmp_path / "none") == []


def test_logs_and_warnings_go_to_the_file_and_our_warnings_to_the_user(tmp_path, capsys):
    with Run(config(tmp_path / "run"), "test") as run:
        logging.getLogger("some.library").info("noise")
        logging.getLogger("some.library").warning("more noise")
        warnings.warn("a warning", stacklevel=1)
        logging.getLogger("hybridrl.data").warning("3 rows left out")
    written = (run.log_dir / "controller.log").read_text()
    shown = capsys.readouterr()
    assert all(text in written for text in ("noise", "more noise", "a warning", "3 rows left out"))
    assert "3 rows left out" in shown.out and "noise" not in shown.out + shown.err
    logging.getLogger("some.library").warning("later")
    assert "later" not in (run.log_dir / "controller.log").read_text()


def test_progress_without_a_terminal_is_a_line_a_step(tmp_path, capsys):
    train(config(tmp_path / "run", steps=2))
    assert [line.split("  s ")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"run {tmp_path}/run", "step 1/2  reward 1", "step 2/2  reward 2"]
    with Run(config(tmp_path / "evaluated", steps=2), "test") as run:
        run.log(0, {"eval/accuracy": 0.25})
    assert capsys.readouterr().out.splitlines()[1] == "step 0/2  accuracy 0.25"


# Resume


@pytest.mark.parametrize("crash_at", ["before log", "before checkpoint", "after checkpoint"])
@pytest.mark.parametrize("crash_in", [1, 2, 3, 4])
def test_a_crashed_and_resumed_run_equals_an_unbroken_one(tmp_path, crash_in, crash_at):
    train(config(tmp_path / "unbroken", checkpoint_every=2))
    cfg = config(tmp_path / "crashed", checkpoint_every=2)
    with pytest.raises(Crash):
        train(cfg, crash_in, crash_at)
    assert train(cfg).resumed
    assert lines(tmp_path / "crashed") == lines(tmp_path / "unbroken")
    assert samples(tmp_path / "crashed") == samples(tmp_path / "unbroken")


def test_every_step_is_a_place_to_stop_and_go_on(tmp_path):
    train(config(tmp_path / "unbroken"))
    for steps in (1, 2, 3, 4, 4):
        train(config(tmp_path / "pieces", steps=steps))
    assert lines(tmp_path / "pieces") == lines(tmp_path / "unbroken")


def test_a_damaged_checkpoint_costs_its_steps_only(tmp_path, capsys):
    train(config(tmp_path / "unbroken"))
    cfg = config(tmp_path / "run", checkpoint_every=1)
    with pytest.raises(Crash):
        train(cfg, crash_in=3, crash_at="after checkpoint")
    os.truncate(tmp_path / "run" / "checkpoints" / "step_000003" / "policy" / "rank0.txt", 2)
    train(cfg)
    out = capsys.readouterr().out
    assert "Checkpoint step_000003 is damaged (policy/rank0.txt has 2 bytes instead of 6)" in out
    assert "restored step 2" in out
    assert lines(tmp_path / "run") == lines(tmp_path / "unbroken")


def test_a_run_that_ended_before_its_first_checkpoint_starts_over(tmp_path):
    for _ in range(2):
        with Run(config(tmp_path / "run"), "test") as run:
            assert run.restore(prompts=Prompts()) == 0
            run.log(0, {"eval/accuracy": 0.25})
    assert lines(tmp_path / "run") == [{"step": 0, "eval/accuracy": 0.25}]


def test_a_line_cut_by_a_crash_is_dropped(tmp_path):
    train(config(tmp_path / "run", steps=2))
    with open(tmp_path / "run" / "metrics.jsonl", "a") as out:
        out.write('{"step": 2, "rew')
    train(config(tmp_path / "run", steps=3))
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.parametrize("damage", [b"5\n", b"null\n", b"[]\n", b'{"step": "x"}\n', b"\xff\xfe\n"])
def test_a_damaged_line_is_dropped_on_resume(tmp_path, damage):
    train(config(tmp_path / "run", steps=2))
    with open(tmp_path / "run" / "metrics.jsonl", "ab") as out:
        out.write(damage)
    train(config(tmp_path / "run", steps=3))
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3]


def test_a_sample_with_other_line_breaks_survives_a_resume(tmp_path):
    file = LineFile(tmp_path / "samples.jsonl")
    line = json.dumps({"step": 1, "response": "a\x85b\u2028c\u2029"}, ensure_ascii=False)
    file.write(line)
    file.cut(1)
    file.close()
    assert file.path.read_text(encoding="utf-8") == line + "\n"


def test_changed_options_are_named_on_resume(tmp_path, capsys):
    train(config(tmp_path / "run", steps=1))
    capsys.readouterr()
    train(config(tmp_path / "run", steps=2, seed=5))
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if "option changed" in line] == [
        "option changed: seed: 0 -> 5", "option changed: trainer.steps: 1 -> 2"]
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["seed"] == 5


def test_a_run_of_another_recipe_is_left_alone(tmp_path):
    train(config(tmp_path / "run", steps=1))
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    message = "run is a run of 'test', which 'ppo' can't resume; choose a new path"
    with pytest.raises(ConfigError, match=message), Run(config(tmp_path / "run", steps=2), "ppo"):
        pass
    assert {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()} == before
    options = tmp_path / "run" / "config.yaml"
    options.write_text(options.read_text().partition("\n")[2])  # as a folder without the recipe's name
    train(config(tmp_path / "run", steps=2))
    assert options.read_text().startswith("# recipe: test\n")


def test_only_due_steps_are_saved(tmp_path):
    saved = []

    class Watched(Prompts):
        def state_dict(self):
            saved.append(self.drawn)
            return super().state_dict()

    for every, expected in ((0, [5]), (2, [2, 4, 5]), (5, [5])):
        saved.clear()
        with Run(config(tmp_path / f"run{every}", steps=5, checkpoint_every=every), "test") as run:
            prompts = Watched()
            run.restore(prompts=prompts)
            for step, _ in run.steps(prompts):
                run.checkpoint(step, prompts=prompts)
        assert saved == expected


def test_a_full_disk_under_the_metrics_is_said(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    cfg = config(tmp_path / "run")
    with pytest.raises(CheckpointError, match="No space left while writing .*metrics.jsonl"), Run(cfg, "test") as run:
        run._metrics._file.close()
        run._metrics._file = open("/dev/full", "w")
        run.log(1, {"a": 1.0})


# Ctrl-C

LOOP = """
import sys, time
from tests.unit.test_run import config, Policy, Prompts
from hybridrl.command_line import recipe
from hybridrl.controller.run import Run

@recipe("test", object)
def main(cfg):
    policy, prompts = Policy(), Prompts()
    with Run(cfg, "test") as run:
        run.restore(policy=policy, prompts=prompts)
        for step, batch in run.steps(prompts):
            print("begin", step, flush=True)
            if step == 2:
                until = time.monotonic() + 60
                while time.monotonic() < until and not (sys.argv[2] == "once" and run._stopping):
                    time.sleep(0.01)
            run.log(step, policy.update(batch) | {"reward/mean": float(batch["rewards"].mean())})
            run.checkpoint(step, policy=policy, prompts=prompts)
try:
    main(config(sys.argv[1]))
except KeyboardInterrupt as stop:
    print("interrupted:", stop, flush=True)
"""


class Process:
    """The loop in a process of its own, with its lines and a deadline on each."""

    def __init__(self, *words):
        self.process = subprocess.Popen([sys.executable, "-c", LOOP, *map(str, words)], cwd=ROOT, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.lines: queue.Queue = queue.Queue()
        self.seen: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line.rstrip("\n"))
        self.lines.put(None)

    def until(self, text):
        while True:
            line = self.lines.get(timeout=120)
            assert line is not None, f"ended before {text!r}: {self.seen}"
            self.seen.append(line)
            if text in line:
                return

    def end(self):
        try:
            while (line := self.lines.get(timeout=120)) is not None:
                self.seen.append(line)
            return self.process.wait(timeout=60)
        finally:
            self.process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_finishes_the_step_and_saves_it(tmp_path, number, capsys):
    train(config(tmp_path / "unbroken"))
    loop = Process(tmp_path / "run", "once")
    loop.until("begin 2")
    loop.process.send_signal(number)
    assert loop.end() == 0
    assert "Stopping after step 2; press Ctrl-C again to stop at once." in loop.seen
    assert any(f"--config {tmp_path}/run/config.yaml" in line for line in loop.seen)
    assert loop.seen[-1] == "interrupted: stopped after step 2"
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2]
    train(config(tmp_path / "run"))
    assert "restored step 2" in capsys.readouterr().out
    assert lines(tmp_path / "run") == lines(tmp_path / "unbroken")


def test_two_signals_stop_at_once_and_the_run_stays_resumable(tmp_path):
    loop = Process(tmp_path / "run", "never")
    loop.until("begin 2")
    loop.process.send_signal(signal.SIGINT)
    loop.until("Stopping after step 2")
    loop.process.send_signal(signal.SIGINT)
    assert loop.end() == 0 and loop.seen[-1].startswith("interrupted:")
    assert [line["step"] for line in lines(tmp_path / "run")] == [1]
    train(config(tmp_path / "run"))
    assert [line["train/weight"] for line in lines(tmp_path / "run")] == [3.5, 9.25, 19.875, 37.8125]


def test_a_killed_run_can_be_resumed_at_once(tmp_path):
    loop = Process(tmp_path / "run", "never")
    loop.until("begin 2")
    loop.process.kill()
    loop.end()
    train(config(tmp_path / "run"))
    assert [line["train/weight"] for line in lines(tmp_path / "run")] == [3.5, 9.25, 19.875, 37.8125]


def test_the_signal_handlers_are_given_back(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Crash):
        train(config(tmp_path / "run"), crash_in=2)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
