"""Whatever goes wrong: one clear line, the right exit code, and a run that can be resumed, or nothing."""

import json
import math
import os
import shutil
import signal
import statistics
import subprocess
from pathlib import Path

import pytest

from tests.models import tiny_tokenizer
from tests.recipes.command import assert_same_numbers, metrics, samples, write_jsonl

pytestmark = pytest.mark.slow


# Options


def test_a_misspelt_option_is_refused_before_anything_heavy(start, grpo, tmp_path):
    command = start(*grpo, "trainer.stepz=3", f"trainer.run_dir={tmp_path / 'run'}", flags=["-X", "importtime"])
    assert command.wait() == 2
    imported = {line.rpartition("|")[2].strip() for line in command.err.splitlines() if line.startswith("import time:")}
    assert "hybridrl.config" in imported and not imported & {"vllm", "ray", "datasets", "reasoning_gym"}
    said = [line for line in command.err.splitlines() if not line.startswith("import time:")]
    assert said == ["grpo: Unknown option 'trainer.stepz'. Did you mean trainer.steps?"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words, message", [
    (["cluster.backend=ray", "cluster.ranks=3", "policy.rollout.tensor_parallel=2"],
     "cluster.ranks must be a multiple of policy.rollout.tensor_parallel=2, got 3."),
    (["cluster.backend=ray", "cluster.ranks=4000"], "cluster.ranks must be between 1 and the "),
    (["cluster.ranks=2"], "cluster.ranks must be 1 with cluster.backend=local, got 2."),
    (["algorithm.responses_per_prompt=1"], "responses_per_prompt"),
    (["algorithm=rloo", "algorithm.responses_per_prompt=1"], "responses_per_prompt"),
    (["algorithm=grop"], "Unknown algorithm 'grop'. Did you mean grpo"),
    (["trainer.steps=many"], "trainer.steps must be a whole number, got 'many'"),
    (["policy.rollout.temperature=3"], "policy.rollout.temperature must be 0, or from 0.01 to 2, got 3.0."),
    (["trainer.eval_temperature=1e-3"], "trainer.eval_temperature must be 0, or from 0.01 to 2, got 0.001."),
    (["policy.training.learning_rate=inf"], "policy.training.learning_rate must be at least 0 and finite, got inf."),
    (["seed=-1"], "seed must be from 0 to 4294967295, got -1."),
    (["seed=4294967296"], "seed must be from 0 to 4294967295, got 4294967296."),
    (["reward.functions=[{name:exact,weight:nan}]"], "reward.functions[0].weight must be finite, got nan."),
    (["policy.training.micro_batch_tokens=43"], "policy.training.micro_batch_tokens must be at least 44, the tokens "),
    (["policy.rollout.temperature=0"], "policy.rollout.temperature must be positive to train, got 0.0."),
    (["reward.functions=[{name:'tests.recipes.reward_functions:digitz'}]"], "digitz"),
    (["reward.functions=[{name:exat}]"], "Did you mean exact"),
])
def test_options_that_cannot_be(refusal, grpo, tmp_path, words, message):
    code, (line,) = refusal([*grpo, f"trainer.run_dir={tmp_path / 'run'}", *words])
    assert code == 2 and line.startswith("grpo: ") and message in line


# Models and data


def damaged(folder: Path, what: str) -> Path:
    weights = folder / "model.safetensors"
    if what == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif what == "no weights":
        weights.unlink()
    elif what == "half a config":
        (folder / "config.json").write_text((folder / "config.json").read_text()[:50])
    elif what == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif what == "no template":
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = None
        shutil.rmtree(folder / "chat_template.jinja", ignore_errors=True)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer.save_pretrained(folder)
    elif what == "missing":
        shutil.rmtree(folder)
    return folder


@pytest.mark.parametrize("what, message", [
    ("missing", "is neither a folder nor a known name"),
    ("truncated weights", "model.safetensors is half-written"),
    ("no weights", "has no model.safetensors"),
    ("half a config", "config.json is half-written or damaged"),
    ("no tokenizer", "has no tokenizer"),
    ("no template", "has no chat template: add chat_template.jinja"),
])
@pytest.mark.parametrize("recipe", ["grpo", "sft", "evaluate"])
def test_models_that_cannot_be_used(refusal, model, sums, tmp_path, recipe, what, message):
    folder = damaged(Path(shutil.copytree(model, tmp_path / "model")), what)
    trainer = [f"trainer.run_dir={tmp_path / 'run'}"] if recipe != "evaluate" else []
    short = ["max_tokens=64"] if recipe == "sft" else ["policy.rollout={max_prompt_tokens:64,max_response_tokens:64}"]
    code, (line,) = refusal([f"recipes.{recipe}", "cluster.backend=local", f"policy.model.path={folder}",
                             f"data.path={sums}", *short, *trainer])
    assert code == 1 and line.startswith(f"{recipe}: ") and str(folder) in line and message in line


def test_weights_that_do_not_fit_the_config(refusal, model, sums, tmp_path):
    """Found before a worker starts."""
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    code, (line,) = refusal(["recipes.sft", f"policy.model.path={folder}", f"data.path={sums}",
                             "data.response_field=answer", f"trainer.run_dir={tmp_path / 'run'}"])
    assert code == 1 and line.startswith(f"sft: Model folder {folder} ")
    assert "lacks weights that its config asks for: model.layers.2." in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rows, words, message", [
    ([{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2="}], [], "row 2: field 'answer' is missing"),
    ([{"promt": "1+1=", "answer": "2"}], [], "row 1: field 'prompt' is missing. Did you mean promt?"),
    ([{"prompt": 7, "answer": "2"}], [], "row 1: field 'prompt' must be text or a list of chat messages, got int"),
    ([], [], "is empty: it has no rows."),
    ([{"prompt": "1" * 40, "answer": "2"}], [], "none of its 1 rows can be used: 1 over 32 tokens"),
    ([{"prompt": "1" * 40, "answer": "2"}, {"answer": "2"}], ["data.bad_rows=skip"],
     "none of its 2 rows can be used: 1 over 32 tokens (the shortest of them has 42, the longest 42), 1 malformed"),
    (None, [], "does not exist"),
])
def test_data_that_cannot_be_used(refusal, grpo, tmp_path, rows, words, message):
    file = tmp_path / "rows.jsonl"
    if rows is not None:
        write_jsonl(file, rows)
    code, (line,) = refusal([*grpo, f"data.path={file}", f"trainer.run_dir={tmp_path / 'run'}", *words])
    assert code == 1 and line.startswith("grpo: ") and str(file) in line and message in line


def test_evaluation_on_the_training_prompts_is_refused(refusal, grpo, sums, tmp_path):
    code, (line,) = refusal([*grpo, f"eval_data.path={sums}", f"trainer.run_dir={tmp_path / 'run'}"])
    assert code == 1 and line == "grpo: none of the 10 evaluation prompts is held out: all are trained on."


# Rewards


@pytest.fixture(scope="module")
def small(grpo) -> list[str]:
    """The GRPO run on the transformers engine, without curves and export."""
    return [*grpo, "policy.rollout.engine=transformers", "trainer.trackers=[]", "trainer.export=false"]


def group_advantages(rows: list[dict]) -> list[float]:
    """(r - mean) / std over the scored rows of each group of four."""
    found = []
    for group in (rows[i:i + 4] for i in range(0, len(rows), 4)):
        rewards = [row["reward"] for row in group if row["reward"] is not None]
        if len(rewards) > 1:
            spread = statistics.stdev(rewards) + 1e-6
            found += [(reward - statistics.mean(rewards)) / spread for reward in rewards]
    return found


def test_rewards_that_fail_are_counted_and_left_out(start, run, small, tmp_path):
    """First on every row, which stops the run; then, resumed, on some: raising, NaN, text and without an end."""
    words = [*small, f"trainer.run_dir={tmp_path / 'run'}", "trainer.save_samples=16"]
    command = start(*words, "reward.functions=[{name:'tests.recipes.reward_functions:broken'}]")
    assert command.wait() == 1
    assert command.err.splitlines()[-1].startswith(
        "grpo: none of 16 responses could be scored; the first: tests.recipes.reward_functions:broken: "
        "LookupError: no grader here (reward_functions.py:")
    assert "Traceback" not in command.err
    run(*words, "reward.functions=[{name:'tests.recipes.reward_functions:troubled'}]", "reward.timeout_s=1")
    everything, reasons = samples(tmp_path / "run"), set()
    assert len(everything) == 32
    for step, measured in metrics(tmp_path / "run").items():
        rows = [row for row in everything if row["step"] == step]
        scored = [row["reward"] for row in rows if row["reward"] is not None]
        assert [row["reward_error"] is None for row in rows] == [row["reward"] is not None for row in rows]
        failed = [row["reward_error"] for row in rows if row["reward_error"]]
        assert 2 <= len(failed) <= 12
        assert measured["reward/failed"] == len(failed)
        assert measured["reward/unscorable_frac"] == len(failed) / 16
        assert measured["reward/timed_out"] == sum("within 1 s" in reason for reason in failed)
        assert measured["reward/mean"] == pytest.approx(statistics.mean(scored), rel=1e-5)
        assert measured["reward/min"] == pytest.approx(min(scored)) and measured["reward/max"] == max(scored)
        advantages = group_advantages(rows)
        assert measured["advantage/max"] == pytest.approx(max(advantages), rel=1e-4)
        assert measured["advantage/min"] == pytest.approx(min(advantages), rel=1e-4)
        assert math.isfinite(measured["train/loss"]) and measured["train/grad_norm"] > 0
        reasons |= {word for word in ("no such thing", "nan", "'seven' (str)", "within 1 s")
                    if any(word in reason for reason in failed)}
    assert len(reasons) == 4, "each kind of failure occurred"


# Checkpoints


@pytest.fixture(scope="module")
def sft(model, sums) -> list[str]:
    return ["recipes.sft", "cluster.backend=local", f"policy.model.path={model}", f"data.path={sums}",
            "data.response_field=answer", "max_tokens=64", "policy.training.learning_rate=1e-2",
            "trainer.prompts_per_step=3", "trainer.trackers=[]", "trainer.export=false",
            "trainer.checkpoint_every=1", "trainer.keep_checkpoints=9"]


@pytest.fixture(scope="module")
def four_steps(run, sft, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("four") / "run"
    run(*sft, "trainer.steps=4", f"trainer.run_dir={folder}")
    return folder


def test_damaged_checkpoints_are_passed_over(run, start, sft, four_steps, tmp_path):
    """The newest truncated, the one before it without its data: the run goes on from step 2, and comes out the same."""
    folder = Path(shutil.copytree(four_steps, tmp_path / "run"))
    newest = folder / "checkpoints" / "step_000004"
    (shard,) = (newest / "policy").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    (folder / "checkpoints" / "step_000003" / "examples.json").unlink()
    resumed = run(*sft, "trainer.steps=4", f"trainer.run_dir={folder}")
    said = resumed.out.splitlines()
    assert any(line.startswith(f"Checkpoint step_000004 is damaged (policy/{shard.name} has ") for line in said)
    assert "Checkpoint step_000003 is damaged (examples.json is missing); trying the one before it." in said
    assert "restored step 2" in said
    assert metrics(folder) == metrics(four_steps)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        "step_000001", "step_000002", "step_000003", "step_000004", "step_000003.damaged", "step_000004.damaged"}

    for checkpoint in (folder / "checkpoints").glob("step_00000[1-4]"):
        (checkpoint / "policy" / "training.json").unlink()
    command = start(*sft, "trainer.steps=5", f"trainer.run_dir={folder}")
    assert command.wait() == 1
    last = command.err.splitlines()[-1]
    assert last.startswith(f"sft: No checkpoint in {folder}/checkpoints can be read (step_000004: ")
    assert last.count("policy/training.json is missing") == 4
    assert metrics(folder) == metrics(four_steps), "nothing is lost, and the run did not start over"


def own_mounts() -> list[str] | None:
    """A command prefix under which this user may mount; None where the system allows no such thing."""
    for prefix in (["unshare", "-rm"], ["unshare", "-m"]):
        tried = [*prefix, "mount", "-t", "tmpfs", "none", "/mnt"]
        if shutil.which("unshare") and not subprocess.run(tried, capture_output=True, timeout=20).returncode:
            return prefix
    return None


def test_a_full_disk_while_saving(start, sft, four_steps, tmp_path):
    """A disk with room for two checkpoints: the third is not there, the second is, and with more room it goes on."""
    prefix = own_mounts()
    if prefix is None:
        pytest.skip("this system lets nobody mount a small disk")
    checkpoint = four_steps / "checkpoints" / "step_000004"
    room = int(2.7 * sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()))
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    script = tmp_path / "full.sh"
    script.write_text(f"""
        mount -t tmpfs -o size={room} none {disk}
        "$@"; echo "exit code $?"
        ls -A {disk}/run/checkpoints
        rm -r {disk}/run/checkpoints/step_000001
        mount -o remount,size={4 * room} {disk}
        "$@"; echo "exit code $?"
        cp -r {disk}/run {copy}
    """)
    command = start(*sft, "trainer.steps=4", f"trainer.run_dir={disk / 'run'}", prefix=[*prefix, "sh", str(script)])
    assert command.wait() == 0
    said = command.out.splitlines()
    first = said.index("exit code 1")
    assert said[first + 1:first + 3] == ["step_000001", "step_000002"], "nothing of the third"
    (line,) = [line for line in command.err.splitlines() if line.startswith("sft: ")]
    assert line.startswith(f"sft: No space left while saving the checkpoint of step 3 in {disk}/run/checkpoints: ")
    assert line.endswith("The partial one was removed; step_000002 is intact.") and "needs about" in line
    assert "Traceback" not in command.err
    assert "restored step 2" in said and said[-1] == "exit code 0"
    assert metrics(copy) == metrics(four_steps)


# Workers that die


def test_a_worker_killed_in_each_phase_is_named_and_the_run_goes_on(start, run, small, tmp_path):
    """Two ranks on Ray. Each run ends with a killed rank 1, and the next one resumes it; Ctrl-C ends the fifth.

    The metrics that this leaves are those of one rank that nobody disturbed.
    """
    small = [*small, "algorithm.mini_batches=2", "trainer.checkpoint_every=1", "trainer.steps=5"]
    unbroken, folder = tmp_path / "unbroken", tmp_path / "run"
    run(*small, f"trainer.run_dir={unbroken}")
    words = ["tests.recipes.fatal_grpo", *small[1:], "cluster.backend=ray", "cluster.ranks=2",
             f"trainer.run_dir={folder}"]
    for step, phase in enumerate(("generate", "update", "sync", "save"), start=1):
        command = start(*words, env={"FATAL": f"{phase}:{step}:1"})
        assert command.wait() == 1, command.out + command.err
        assert command.err.splitlines() == [
            f"grpo: policy rank 1 at step {step}: process died: killed, crashed, or out of memory; "
            f"its output: {folder}/logs/pool0-rank1.log"], phase
        assert "(raylet)" not in command.out, phase
        assert command.left() == []
        assert list(metrics(folder)) == list(range(1, step + (phase == "save"))), phase
        assert len(list((folder / "checkpoints").glob("*"))) == min(step - 1, 2), "whole ones only"
    command = start(*words, "trainer.steps=1000", env={"FATAL": ""})
    command.wait_for("step 5/1000")
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.wait() == 130
    assert command.left() == []
    assert "grpo: stopped after step" in command.err.splitlines()[-1]
    found = metrics(folder)
    for step, expected in metrics(unbroken).items():
        assert_same_numbers({name: found[step][name] for name in expected}, expected)
    assert len(list((folder / "checkpoints").glob("step_*"))) == 2
