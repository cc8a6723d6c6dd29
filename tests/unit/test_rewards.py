"""Rewards: the functions by hand-made cases, and real processes that misbehave."""

import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from fractions import Fraction
from types import SimpleNamespace

import pytest
import reasoning_gym as gym
import torch

from hybridrl.batch import make_batch, num_rows, rows_of
from hybridrl.config import JudgeConfig, RewardConfig, RewardFunctionConfig, RewardModelConfig, validate_all
from hybridrl.errors import BatchError, ConfigError, ModelError, RewardError
from hybridrl.rewards import REWARDS, Rewarder
from hybridrl.rewards.binding import bind
from hybridrl.rewards.cache import ScoreCache, content_key
from hybridrl.rewards.functions import exact, math_verify, numeric, reasoning_gym
from hybridrl.rewards.numbers import final_number, final_number_text
from hybridrl.rewards.pool import Outcome
from tests.models import tiny_model
from tests.processes import ended

# Numbers


@pytest.mark.parametrize(("text", "value"), [
    ("42", 42), ("So 3 + 4 = 7.", 7), ("x=-3", -3), ("5-3", 3), ("5 - 3", 3), ("(2)-3", 3), ("from 5 to -3", -3),
    ("−8", -8), ("+8", 8), ("-$1,234.50", Fraction("-1234.5")), ("$5$", 5), ("1,2", 2), ("1,2345", 2345),
    ("12,345,678", 12345678), ("1{,}234", 1234), (".5", Fraction(1, 2)), ("007", 7), ("3.", 3), ("1.5e3", 1500),
    ("2E-2", Fraction(1, 50)), ("3/4", Fraction(3, 4)), ("-3 / 4", Fraction(-3, 4)), ("1/0", None), ("v2", 2),
    ("\\frac{3}{4}", Fraction(3, 4)), ("-\\dfrac{ 3 }{-4}", Fraction(3, 4)), ("\\frac{-1}{2}", Fraction(-1, 2)),
    ("\\boxed{5} is less than 9", 5), ("\\boxed{1} no, \\boxed{\\frac{1}{2}}, 9", Fraction(1, 2)),
    ("\\boxed{x} 4", None),
    ("\\boxed{7", 7), ("Answer: 6\nfor 2 people", 6), ("**Answer:**\n 6", 6), ("answer : 1, Answer: 2", 2),
    ("Answer: none, of 3 tried\n4", 3), ("GSM8K: 3+4\n#### 7", 7), ("nothing", None), ("", None), ("9" * 2000, None),
])
def test_the_final_number(text, value):
    assert final_number(text) == value


@pytest.mark.parametrize(("text", "plain"), [
    ("it costs -$1,234.50 now", "-1234.50"), ("+3", "3"), ("\\frac{3}{4}", "3/4"), ("no", None),
])
def test_the_final_number_as_text(text, plain):
    assert final_number_text(text) == plain


# Functions


def test_exact_compares_stripped_texts():
    assert [exact(" 12\n", 12), exact("12", " 12"), exact("12.", "12"), exact("", "x")] == [1, 1, 0, 0]
    with pytest.raises(ValueError, match="no reference answer"):
        exact("", None)


def test_numeric_compares_values_with_a_tolerance():
    assert numeric("it is 0.50", "1/2") == 1
    assert numeric("123456789012345678", "123456789012345679") == 0  # equal as floats
    assert numeric("I don't know", "4") == 0
    assert numeric("3.14", "3.14159", tolerance=0.01) == 1
    assert numeric("3.14", "3.14159", tolerance=0.001) == 0
    assert numeric("72 clips", "48/2 = 24, 48+24 = 72\n#### 72") == 1
    assert numeric("0.1", 0.1) == 1
    with pytest.raises(ValueError, match="'four' holds no number"):
        numeric("4", "four")


def test_math_verify_compares_expressions():
    assert math_verify("so $\\boxed{\\frac{2}{4}}$", "1/2") == 1
    assert math_verify("$x = 1 + y$", "$y + 1$") == 1
    assert math_verify("$(x+1)^2$", "x^2 + 2x + 1") == 1
    assert math_verify("$1$", "x^2 + 2x + 1") == 0  # taken as text, the answer's last number would be its expression
    assert math_verify("so 1,234.", "it is \\(1234\\)") == 1
    assert math_verify("$x - 1$", "x + 1") == 0
    assert math_verify("no idea", "1/2") == 0
    with pytest.raises(ValueError, match="no expression in the reference answer"):
        math_verify("1", "")


def entry_of(task: str, **options) -> dict:
    return gym.create_dataset(task, seed=1, size=1, **options)[0]


def test_reasoning_gym_scores_the_extracted_answer_with_the_tasks_scorer():
    entry = entry_of("chain_sum")
    reply = f"The sum is {entry['answer']}"
    assert reasoning_gym(f" {entry['answer']}\n", entry) == 1
    assert reasoning_gym(reply, entry) < 1  # the scorer wants the bare answer
    assert reasoning_gym(reply, entry, extract="last_number") == 1
    assert reasoning_gym("no number", entry, extract="last_number") == 0
    assert reasoning_gym(f"<a>0</a> so <a> {entry['answer']} </a> and 5", entry, extract="tag:a") == 1
    assert reasoning_gym(f"<b>{entry['answer']}</b>", entry, extract="tag:a") == 0
    assert reasoning_gym(f"<a>{entry['answer']}", entry, extract="tag:a") == 0  # never closed


def test_reasoning_gym_scorers_get_the_options_of_the_task():
    # 3.1416 is 3.1412 to three places, and not to four.
    entry = {"answer": "3.1416", "metadata": {"source_dataset": "decimal_arithmetic"}}
    loose = reasoning_gym("3.1412", entry | {"task_options": {"max_num_decimal_places": 3}})
    strict = reasoning_gym("3.1412", entry | {"task_options": {"max_num_decimal_places": 6}})
    assert loose == 1 and strict < 1


def test_reasoning_gym_refuses_scorers_that_run_the_answer_as_code(tmp_path):
    entry = entry_of("countdown")
    proof = tmp_path / "ran"
    attack = f"[open({str(proof)!r}, 'w'), 1][1]"
    with pytest.raises(ValueError, match="scorer of countdown runs the answer as Python code"):
        reasoning_gym(attack, entry)
    assert not proof.exists()
    assert reasoning_gym(entry["metadata"]["expression"], entry, allow_eval=True) == 1
    assert reasoning_gym("1", entry, extract="last_number") < 1  # a number is harmless
    assert reasoning_gym(entry_of("letter_counting")["answer"], entry_of("letter_counting")) == 1


@pytest.mark.parametrize("task", [None, {}, {"metadata": {}}, "x"])
def test_reasoning_gym_needs_an_entry(task):
    with pytest.raises(ValueError, match="no reasoning-gym entry"):
        reasoning_gym("1", task)


# Configuration

MODULE = '''
import ctypes, os, re, signal, subprocess, sys, time

def length(response):
    return len(response)

def everything(**row):
    return sorted(row) == ["answer", "prompt", "response", "task", "times"] and row["times"]

def scaled(response, answer, *, factor, offset=0):
    return factor * (response == answer) + offset

def positional(response, /):
    return 1.0

def unknown(completion):
    return 1.0

def torch_loaded(response):
    return float("torch" in sys.modules or "vllm" in sys.modules)

def pid(response):
    return os.getpid()

def noted(response, answer=None, task=None):
    """The number of calls so far, noted in a file; `fail once` fails at its first call."""
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(response + "\\n")
    calls = open(os.environ["NOTES"]).read().split("\\n")[:-1]
    if response == "fail once" and calls.count(response) == 1 or response == "fail":
        raise ValueError("failed")
    return len(calls)

def changes_its_row(response, task):
    task["seen"] = task.get("seen", 0) + 1
    return task["seen"]

def misbehave(response):
    if response == "raise":
        raise KeyError("no\\nsuch key")
    if response == "sys.exit":
        sys.exit(2)
    if response == "os._exit":
        os._exit(3)
    if response == "segfault":
        ctypes.string_at(0)
    if response == "sleep":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
    if response == "loop":
        re.match("(a+)+$", "a" * 64 + "b")  # in C code, with the interpreter's lock held
    if response == "close":
        os.closerange(3, 4096)
        time.sleep(3600)
    if response == "child":
        child = subprocess.Popen(["sleep", "3600"])
        open(os.environ["CHILD_FILE"], "w").write(str(child.pid))
        time.sleep(3600)
    bad = {"nan": float("nan"), "inf": float("inf"), "huge": -1e31, "text": "1", "none": None, "list": [1.0]}
    return bad.get(response, 0.25)

value = 3
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Name of an importable module that holds MODULE."""
    name = f"own_rewards_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def config(*functions: str | RewardFunctionConfig, **options) -> RewardConfig:
    named = [RewardFunctionConfig(name=f) if isinstance(f, str) else f for f in functions]
    return RewardConfig(functions=named, **options)


@pytest.mark.parametrize(("name", "options", "message"), [
    ("exakt", {}, r"Unknown reward function 'exakt'\. Did you mean exact\?.*package\.module:name"),
    ("nowhere.at_all:f", {}, r"can't import 'nowhere\.at_all' of 'nowhere\.at_all:f': ModuleNotFoundError"),
    ("__main__:f", {}, r"'__main__:f' can't be imported by other processes"),
    ("OWN:lenght", {}, r"Unknown reward function in module 'OWN' 'lenght'\. Did you mean length\?"),
    ("OWN:value", {}, r"'OWN:value' must be a function, got int"),
    ("OWN:positional", {}, r"'OWN:positional' needs 'response', which is neither"),
    ("OWN:unknown", {}, r"'OWN:unknown' needs 'completion', which is neither .* response, answer, prompt, task"),
    ("OWN:scaled", {}, r"'OWN:scaled' needs 'factor'"),
    ("OWN:scaled", {"factr": 1}, r"Unknown option of reward function 'OWN:scaled' 'factr'\. Did you mean factor\?"),
    ("OWN:scaled", {"factor": 1, "answer": 1}, r"Unknown option of reward function 'OWN:scaled' 'answer'\."),
    ("numeric", {"tolerence": 1}, r"Did you mean tolerance\?"),
    ("reasoning_gym", {"extract": "number"}, r"must be none, last_number or tag:NAME, got 'number'"),
])
def test_a_wrong_function_or_option_fails_at_construction(own, name, options, message):
    function = RewardFunctionConfig(name=name.replace("OWN", own), options=options)
    with pytest.raises(ConfigError, match=message.replace("OWN", own)):
        Rewarder(config(function))


def test_a_module_that_fails_to_import_is_a_config_error(tmp_path, monkeypatch):
    (tmp_path / "broken_rewards.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"can't import 'broken_rewards' .*ZeroDivisionError"):
        bind("broken_rewards:f", {})


def test_functions_get_the_columns_that_they_take(own):
    row = {"response": "a", "answer": "a", "prompt": "p", "task": None}
    assert bind(f"{own}:everything", {"times": 3})(row) == 3
    assert bind(f"{own}:scaled", {"factor": 2.0, "offset": 1})(row) == 3
    assert bind(f"{own}:length", {}).inputs == ("response",)
    assert {name: bind(name, {}).inputs for name in REWARDS} == {
        "exact": ("response", "answer"), "numeric": ("response", "answer"), "math_verify": ("response", "answer"),
        "reasoning_gym": ("response", "task")}


# Batches through real processes


def test_rewards_come_in_the_order_of_the_rows():
    responses = [f"it is {i}" for i in range(300)]
    batch = make_batch(response=responses, answer=[str(i if i % 3 else -1) for i in range(300)])
    with Rewarder(config("numeric", workers=3)) as rewarder:
        for _ in range(2):
            scored = rewarder(batch)
            assert scored["rewards"].tolist() == [float(i % 3 > 0) for i in range(300)]
            assert rows_of(scored["reward_error"]) == [None] * 300
            assert rewarder.metrics.keys() == {"reward/failed", "reward/timed_out", "time/reward_workers"}
            assert rewarder.metrics["reward/failed"] == rewarder.metrics["reward/timed_out"] == 0
    assert scored["rewards"].dtype == torch.float32
    assert set(batch.keys()) == {"response", "answer"}  # the batch that was given is left as it was


def test_a_batch_without_rows_starts_nothing():
    with Rewarder(config("exact")) as rewarder:
        scored = rewarder(make_batch(response=[], answer=[]))
        assert scored["rewards"].shape == (0,) and num_rows(scored) == 0
        assert rewarder._pool._workers == []


def test_several_functions_are_summed_with_their_weights(own):
    weights = [("exact", 2.0), (f"{own}:length", -0.5), ("exact", 0.0)]
    functions = [RewardFunctionConfig(name=name, weight=weight) for name, weight in weights]
    batch = make_batch(response=["a", "bcd", "e"], answer=["a", "b", None])
    with Rewarder(config(*functions)) as rewarder:
        scored = rewarder(batch)
        # 2 * 1 - 0.5 * 1; 2 * 0 - 0.5 * 3; the third row has no answer, so that `exact` fails
        assert scored["rewards"][:2].tolist() == [1.5, -1.5]
        assert scored["reward/exact_1"][:2].tolist() == [1, 0]
        assert scored["reward/length"][:2].tolist() == [1, 3]
        for name in ("rewards", "reward/exact_1", "reward/length", "reward/exact_3"):
            assert scored[name][2].isnan()
        assert rewarder.metrics["reward/length"] == 2 and rewarder.metrics["reward/exact_1"] == 0.5
        assert rewarder.metrics["reward/failed"] == 1


def test_a_function_that_fails_ends_its_row_and_shifts_no_other(own):
    responses = ["x" * i for i in range(1, 61)]
    batch = make_batch(response=responses, answer=[None if i % 2 else "x" for i in range(1, 61)])
    with Rewarder(config("exact", f"{own}:length", workers=1)) as rewarder:
        scored = rewarder(batch)
    rows = zip(scored["rewards"].tolist(), rows_of(scored["reward_error"]), strict=True)
    for i, (reward, error) in enumerate(rows, start=1):
        if i % 2:
            assert math.isnan(reward) and "no reference answer" in error
        else:
            assert (reward, error) == (i, None)


def test_one_function_does_not_see_what_another_did_to_the_row(own):
    functions = [f"{own}:changes_its_row"] * 2
    with Rewarder(config(*functions)) as rewarder:
        assert rewarder(make_batch(response=["a"], task=[{}]))["rewards"].tolist() == [2]


REASONS = {
    "raise": r"KeyError: 'no\\nsuch key' \(own_rewards_\d+\.py:\d+\)",
    "nan": r"returned nan, must be finite and at most 1e\+30 in size$",
    "inf": r"returned inf, must be finite",
    "huge": r"returned -1e\+31, must be finite",
    "text": r"returned '1' \(str\), must be a number$",
    "none": r"returned 'None' \(NoneType\), must be a number$",
    "list": r"returned '\[1\.0\]' \(list\), must be a number$",
    "sys.exit": r"SystemExit: 2",
    "os._exit": r"ended its process \(exit status 3\)",
    "segfault": r"ended its process \(signal SIGSEGV\)",
    "close": r"ended its process \(signal SIGKILL\)",
    "sleep": r"gave no result within 8 s",
    "loop": r"gave no result within 8 s",
}


def test_each_failure_is_marked_and_touches_no_other_row(own):
    responses = ["fine"] * 20
    for i, response in enumerate(REASONS):
        responses.insert(2 * i, response)
    # A row that ends its process must be seen to do so before its time is up, on a busy machine too.
    with Rewarder(config(f"{own}:misbehave", workers=2, timeout_s=8)) as rewarder:
        scored = rewarder(make_batch(response=responses))
        again = rewarder(make_batch(response=["fine", "nan"]))
    for response, reward, error in zip(responses, scored["rewards"].tolist(), rows_of(scored["reward_error"]),
                                       strict=True):
        if response == "fine":
            assert (reward, error) == (0.25, None)
        else:
            assert math.isnan(reward), response
            assert error.startswith(f"{own}:misbehave: "), error
            assert re.search(REASONS[response], error), error
    assert again["rewards"][0] == 0.25 and again["rewards"][1].isnan()


def test_failures_are_counted(own):
    with Rewarder(config(f"{own}:misbehave", timeout_s=3)) as rewarder:
        rewarder(make_batch(response=["sleep", "nan", "raise", "fine"]))
        assert (rewarder.metrics["reward/failed"], rewarder.metrics["reward/timed_out"]) == (3, 1)
        rewarder(make_batch(response=["fine"]))
        assert (rewarder.metrics["reward/failed"], rewarder.metrics["reward/timed_out"]) == (0, 0)


def test_a_batch_on_which_every_row_fails_is_an_error(own):
    with Rewarder(config(f"{own}:misbehave")) as rewarder:
        with pytest.raises(RewardError, match=rf"none of 2 responses could be scored; the first: {own}:.*: KeyError"):
            rewarder(make_batch(response=["raise", "nan"]))
        assert rewarder(make_batch(response=["fine"]))["rewards"].tolist() == [0.25]


def test_math_verify_is_cut_off_by_our_limit_and_not_scored():
    batch = make_batch(response=["$9^{9^{9^{9}}}$", "$2$"], answer=["$8^{8^{8^{8}}}$", "2"])
    with Rewarder(config("math_verify", timeout_s=4)) as rewarder:
        scored = rewarder(batch)
    assert scored["rewards"][0].isnan() and scored["rewards"][1] == 1
    assert rows_of(scored["reward_error"])[0] == "math_verify: gave no result within 4 s"


def test_a_missing_column_names_its_writer():
    with Rewarder(config("exact")) as rewarder, pytest.raises(BatchError, match=r"'answer'.*written by data"):
        rewarder(make_batch(response=["a"]))


def test_a_row_that_can_not_be_sent_is_marked(own):
    batch = make_batch(response=["a", "b"], task=[{}, {"f": lambda: 0}])
    with Rewarder(config(f"{own}:changes_its_row")) as rewarder:
        scored = rewarder(batch)
    assert scored["rewards"][0] == 1 and scored["rewards"][1].isnan()
    assert "can't be sent to another process" in rows_of(scored["reward_error"])[1]


# The life of the processes


def test_reward_processes_stay_without_torch(own):
    with Rewarder(config(f"{own}:torch_loaded")) as rewarder:
        assert rewarder(make_batch(response=["a"]))["rewards"].tolist() == [0]


def test_workers_are_as_many_as_asked_for_and_end_with_the_rewarder(own):
    with Rewarder(config(f"{own}:pid", workers=2)) as rewarder:
        pids = {int(pid) for pid in rewarder(make_batch(response=["a"] * 200))["rewards"].tolist()}
        assert len(rewarder._pool._workers) == 2
        assert pids <= {worker.process.pid for worker in rewarder._pool._workers}
    assert ended(*pids)
    with Rewarder(config(f"{own}:pid", workers=8)) as rewarder:
        rewarder(make_batch(response=["a"]))
        assert len(rewarder._pool._workers) == 1  # one row needs one worker


def test_a_worker_that_died_between_batches_is_replaced_without_loss(own):
    with Rewarder(config(f"{own}:pid", workers=1)) as rewarder:
        first = int(rewarder(make_batch(response=["a"]))["rewards"][0])
        os.kill(first, signal.SIGKILL)
        assert ended(first)
        scored = rewarder(make_batch(response=["a"] * 3))
        assert rows_of(scored["reward_error"]) == [None] * 3
        assert first not in scored["rewards"].tolist()


def test_a_killed_call_takes_its_children_along(own, tmp_path, monkeypatch):
    monkeypatch.setenv("CHILD_FILE", str(tmp_path / "pid"))
    with Rewarder(config(f"{own}:misbehave", timeout_s=3)) as rewarder:
        rewarder(make_batch(response=["child", "fine"]))
        assert ended(int((tmp_path / "pid").read_text()))


def test_an_interrupted_batch_leaves_nothing_for_the_next_one(own, monkeypatch):
    with Rewarder(config(f"{own}:length", workers=1)) as rewarder:
        rewarder(make_batch(response=["a"]))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("hybridrl.rewards.pool.wait", interrupt)
            rewarder(make_batch(response=["ab"] * 5))
        assert rewarder(make_batch(response=["abc"] * 5))["rewards"].tolist() == [3] * 5


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_worker_that_can_not_start_is_an_error(own, tmp_path):
    with Rewarder(config(f"{own}:length")) as rewarder:
        (tmp_path / f"{own}.py").write_text("def other(response): return 1")
        with pytest.raises(RewardError, match=r"a reward worker can't start: ConfigError: .*'length'"):
            rewarder(make_batch(response=["a"]))
        (tmp_path / f"{own}.py").write_text("import os; os._exit(5)")
        with pytest.raises(RewardError, match=r"a reward worker can't start: it ended its process \(exit status 5\)"):
            rewarder(make_batch(response=["a"]))


@pytest.mark.parametrize("response", ["loop", "sleep", "fine"])
def test_a_controller_that_is_killed_leaves_no_process(own, tmp_path, response):
    script = textwrap.dedent(f"""
        import sys, threading, time
        sys.path.insert(0, {str(tmp_path)!r})
        from hybridrl.rewards.pool import WorkerPool
        pool = WorkerPool([("{own}:misbehave", {{}})], 1, 3600.0)
        pool.run([{{"response": "fine"}}])
        print(pool._workers[0].process.pid, flush=True)
        pool.run([{{"response": {response!r}}}])
        time.sleep(3600)
    """)
    controller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(controller.stdout.readline())
        time.sleep(0.5)  # for the call to start; without it the test would pass for another reason, not fail
    finally:
        controller.kill()
        controller.wait()
        controller.stdout.close()
    assert ended(pid)


# Model and judge


class Scored:
    """In the place of a worker group: gives the same scores and errors to every batch, and keeps the last batch."""

    def __init__(self, scores, errors):
        self.scores, self.errors = scores, errors
        self.score = self

    def future(self, batch):
        self.batch = batch
        return self

    def result(self):
        return make_batch(scores=torch.tensor(self.scores, dtype=torch.float32), score_errors=self.errors)


def learned(folder, functions=("exact",), **options) -> Rewarder:
    """A rewarder with a model (weight 0.5) and a judge (weight 2), whose groups are still to be set."""
    from tests.models import tiny_model

    if not (folder / "model").exists():
        tiny_model(folder / "model", classifier=True)
        tiny_model(folder / "judge")
    cfg = config(*functions, model=RewardModelConfig(path=str(folder / "model"), weight=0.5),
                 judge=JudgeConfig(path=str(folder / "judge"), weight=2.0), **options)
    validate_all(cfg, "reward")
    return Rewarder(cfg)


def test_a_reward_is_the_weighted_sum_of_its_components(tmp_path):
    nan = math.nan
    with learned(tmp_path) as rewarder:
        rewarder.groups = {"model": Scored([1.0, -2.0, nan, 4.0], [None, None, "too long", None]),
                           "judge": Scored([0.25, 3.0, 1.0, nan], [None, None, None, "no verdict in ''"])}
        assert rewarder.components == ["exact", "model", "judge"] and rewarder.weights == [1.0, 0.5, 2.0]
        batch = make_batch(response=["1", "2", "3", "4"], answer=["1"] * 4, prompt=["?"] * 4, prompt_ids=[[5]] * 4,
                           seeds=torch.arange(4), rewards=torch.zeros(4))
        scored = rewarder(batch)
        assert scored["rewards"][:2].tolist() == [2.0, 5.0] and scored["rewards"][2:].isnan().all()
        assert rows_of(scored["reward_error"]) == [None, None, "model: too long", "judge: no verdict in ''"]
        assert scored["reward_components"].dtype == torch.float32
        assert scored["reward_components"][:2].tolist() == [[1.0, 1.0, 0.25], [0.0, -2.0, 3.0]]
        assert scored["reward_components"][2:].isnan().all(), "a row without a reward has no components"
        assert scored["reward/judge"][:2].tolist() == [0.25, 3.0]
        expected = {"reward/failed": 2, "reward/timed_out": 0, "reward/model_failed": 1, "reward/judge_failed": 1,
                    "reward/exact": 0.5, "reward/model": -0.5, "reward/judge": 1.625}
        assert {name: rewarder.metrics[name] for name in expected} == expected
        assert set(rewarder.groups["judge"].batch.keys()) == {"response", "answer", "prompt", "prompt_ids", "seeds"}


def test_a_function_that_fails_keeps_its_reason(tmp_path, own):
    with learned(tmp_path, [f"{own}:misbehave"]) as rewarder:
        rewarder.groups = {"model": Scored([1.0, math.nan], [None, "too long"]),
                           "judge": Scored([1.0, 1.0], [None, None])}
        scored = rewarder(make_batch(response=["fine", "nan"]))
        assert scored["rewards"][0] == 0.25 + 0.5 + 2
        assert rows_of(scored["reward_error"])[1].startswith(f"{own}:misbehave: ValueError: returned nan")
        assert (rewarder.metrics["reward/failed"], rewarder.metrics["reward/model_failed"]) == (1, 1)


def test_a_model_alone_and_when_it_fails_on_every_row(tmp_path):
    with learned(tmp_path, functions=[]) as rewarder:
        rewarder.groups = {"model": Scored([1.0], [None]), "judge": Scored([0.5], [None])}
        assert rewarder(make_batch(response=["x"]))["rewards"].tolist() == [1.5]
        rewarder.groups = {"model": Scored([math.nan], ["too long"]), "judge": Scored([0.5], [None])}
        with pytest.raises(RewardError, match="none of 1 responses could be scored; the first: model: too long"):
            rewarder(make_batch(response=["x"]))
        rewarder.groups = {"model": rewarder.groups["model"]}
        with pytest.raises(RewardError, match=r"reward\.judge has no worker group"):
            rewarder(make_batch(response=["x"]))


def test_components_of_functions_alone():
    twice = config("exact", RewardFunctionConfig(name="numeric", weight=3.0), "exact")
    with Rewarder(twice) as rewarder:
        scored = rewarder(make_batch(response=["1", "1.0", "2"], answer=["1"] * 3))
        assert rewarder.components == ["exact_1", "numeric", "exact_3"]
        assert scored["reward_components"].tolist() == [[1, 1, 1], [0, 1, 0], [0, 0, 0]]
        assert scored["rewards"].tolist() == [5, 3, 0]
    with Rewarder(config("exact")) as rewarder:
        scored = rewarder(make_batch(response=["1"], answer=["1"]))
        assert scored["reward_components"].tolist() == [[1]] and "reward/exact" not in scored.keys()


def test_folders_are_checked_before_anything_starts(tmp_path):
    from tests.models import tiny_model

    plain, two = tiny_model(tmp_path / "plain"), tiny_model(tmp_path / "two", classifier=True, num_labels=2)
    for path, message in ((plain, "is no sequence classifier"), (two, "classifier of 2 labels"),
                          (tmp_path / "gone", "is neither a folder")):
        with pytest.raises(ModelError, match=message):
            Rewarder(config("exact", model=RewardModelConfig(path=str(path))))
    with pytest.raises(ModelError, match="is neither a folder"):
        Rewarder(config("exact", judge=JudgeConfig(path=str(tmp_path / "gone"))))


# Scores by content


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """`notes()`: the calls of `noted` since the last time, sorted."""
    file = tmp_path / "notes"
    monkeypatch.setenv("NOTES", str(file))

    def calls():
        found = file.read_text().splitlines() if file.exists() else []
        file.write_text("")
        return sorted(found)

    calls()
    return calls


def test_equal_content_is_scored_once(own, notes):
    with Rewarder(config(f"{own}:noted", workers=1, cache=["functions"])) as rewarder:
        batch = make_batch(response=["a", "b", "a", "a"], answer=["1", "1", "1", "2"], task=[{"x": [1]}] * 4)
        first = rewarder(batch)["rewards"].tolist()
        assert notes() == ["a", "a", "b"] and first[0] == first[2] and len(set(first)) == 3
        assert rewarder.metrics["cache/reward_functions"] == 1
        assert rewarder(batch)["rewards"].tolist() == first
        assert notes() == [] and rewarder.metrics["cache/reward_functions"] == 4
        # 1 is not "1", and another task is another content, too
        rewarder(make_batch(response=["a", "a"], answer=["1", 1], task=[{"x": [2]}, {"x": [1]}]))
        assert notes() == ["a", "a"] and rewarder.metrics["cache/reward_functions"] == 0


def test_failures_are_not_remembered_and_not_shared(own, notes):
    with Rewarder(config(f"{own}:noted", workers=1, cache=["functions"])) as rewarder:
        scored = rewarder(make_batch(response=["fail once", "a", "fail", "fail once", "fail", "fail once"],
                                     answer=[None] * 6, task=[None] * 6))
        assert notes() == ["a", "fail", "fail", "fail once", "fail once", "fail once"]
        assert [error is None for error in rows_of(scored["reward_error"])] == [False, True, False, True, False, True]
        assert rewarder.metrics["reward/failed"] == 3 and rewarder.metrics["cache/reward_functions"] == 0
        scored = rewarder(make_batch(response=["fail", "fail once"], answer=[None] * 2, task=[None] * 2))
        assert notes() == ["fail"] and not scored["rewards"][1].isnan()


def test_rows_that_can_not_be_told_apart_are_scored_each(own, notes):
    task = {"f": threading.Lock()}
    with Rewarder(config(f"{own}:length", f"{own}:noted", cache=["functions"])) as rewarder:
        scored = rewarder(make_batch(response=["a", "a", "b"], answer=[None] * 3, task=[task, task, {}]))
        assert notes() == ["b"] and rewarder.metrics["cache/reward_functions"] == 0
        assert "can't be sent to another process" in rows_of(scored["reward_error"])[1]


def test_only_so_many_scores_are_remembered():
    cache = ScoreCache(2)
    keys = [content_key([text]) for text in "abc"]
    assert cache.unknown([keys[0], keys[1], keys[0], None, None]) == [0, 1, 3, 4]
    cache.complete(keys[:2], {0: Outcome([1.0]), 1: Outcome([2.0])})
    assert cache.complete([keys[0]], {})[0].scores == [1.0]  # met again
    full = cache.complete([keys[2], keys[0], keys[1]], {0: Outcome([3.0])})
    assert [outcome.scores for outcome in full] == [[3.0], [1.0], [2.0]]
    assert cache.unknown(keys) == [0], "the one that was not met for longest went"


def test_contents_are_told_apart():
    contents = [("ab", "c"), ("a", "bc"), ("abc",), (1,), (1.0,), (True,), ("1",), (None,), ([1, 2],), ([[1], 2],),
                ({"a": 1},), ({"a": 2},), ()]
    assert len({content_key(content) for content in contents}) == len(contents)
    assert content_key(["x", [1, {"a": "b"}]]) == content_key(("x", [1, {"a": "b"}]))


class Scorer:
    """A worker group that scores the length of the response and notes which it was given; "?" has no score."""

    def __init__(self):
        self.asked = []
        self.score = SimpleNamespace(future=self._score)

    def _score(self, batch):
        responses = rows_of(batch["response"])
        self.asked.append(responses)
        found = make_batch(scores=torch.tensor([math.nan if r == "?" else float(len(r)) for r in responses]),
                           score_errors=["no verdict" if r == "?" else None for r in responses])
        return SimpleNamespace(result=lambda: found)


def test_models_and_judges_are_asked_once_about_equal_content(tmp_path):
    folder = tiny_model(tmp_path / "judge", "llama")
    cfg = RewardConfig(functions=[], judge=JudgeConfig(path=str(folder), weight=2.0), cache=["judge"])
    batch = make_batch(response=["aa", "?", "aa", "b", "?"], prompt=["p"] * 5, answer=[None] * 5, seeds=[1, 2, 3, 4, 5],
                       prompt_ids=[[1, 2]] * 5, response_ids=[[3], [4, 4], [5], [6], [7]])
    with Rewarder(cfg) as rewarder:
        rewarder.groups = {"judge": Scorer()}
        for asked, hits in (([["aa", "?", "b"], ["?"]], 1), ([["?"], ["?"]], 3)):
            scored = rewarder(batch)
            assert rewarder.groups["judge"].asked == asked
            assert scored["rewards"].nan_to_num(-1).tolist() == [4, -1, 4, 2, -1]
            assert rewarder.metrics["cache/reward_judge"] == hits and rewarder.metrics["reward/judge_failed"] == 2
            rewarder.groups["judge"].asked.clear()


def test_a_reward_model_is_asked_again_about_other_tokens(tmp_path):
    folder = tiny_model(tmp_path / "model", "llama", classifier=True)
    cfg = RewardConfig(functions=[], model=RewardModelConfig(path=str(folder)), cache=["model"])
    batch = make_batch(response=["a"] * 3, prompt=["p"] * 3, prompt_ids=[[1]] * 3, response_ids=[[3], [4], [3]])
    with Rewarder(cfg) as rewarder:
        rewarder.groups = {"model": Scorer()}
        assert rewarder(batch)["rewards"].tolist() == [1, 1, 1]
        assert rewarder.groups["model"].asked == [["a", "a"]] and rewarder.metrics["cache/reward_model"] == 1


@pytest.mark.parametrize(("options", "message"), [
    ({"cache": ["function"]}, r"reward\.cache: Unknown choice 'function'\. Did you mean functions\?"),
    ({"cache": ["judge"]}, r"reward\.cache must be without judge, as there is none, got \['judge'\]"),
    ({"functions": [], "judge": JudgeConfig(path="j"), "cache": ["functions"]}, "without functions, as there is none"),
    ({"cache": ["functions"], "cache_size": 0}, r"reward\.cache_size must be at least 1, got 0")])
def test_options_of_the_cache(options, message):
    with pytest.raises(ConfigError, match=message):
        validate_all(RewardConfig(**options), "reward")
    judge = JudgeConfig(path="j")
    judge.rollout.temperature = 0.7
    with pytest.raises(ConfigError, match="without judge while reward.judge.rollout.temperature draws each"):
        validate_all(RewardConfig(judge=judge, cache=["judge"]), "reward")
