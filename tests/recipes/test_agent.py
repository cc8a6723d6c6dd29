"""`python -m recipes.agent` with the real engines: what trains, that evaluation and resuming change nothing."""

import shutil
from pathlib import Path

import pytest

from hybridrl.__main__ import main as hybridrl
from hybridrl.metrics import read_metrics
from tests.recipes.command import GAP, assert_same_numbers, metrics, samples

pytestmark = pytest.mark.slow

REWRITING = ("{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{{ m['content'][:1] }}<eos>"
             "{% else %}{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")
"""Of what the policy said before, it shows the first character alone."""


@pytest.fixture(scope="session")
def agent(model) -> list[str]:
    """Options of a small run: 4 tasks x 4 episodes of up to 3 turns of up to 4 tokens."""
    return ["recipes.agent", "cluster.backend=local", f"policy.model.path={model}", "environment.name=guess",
            "environment.options={rules: '{low}-{high}?', low: 0, high: 99, guesses: 3, hint_reward: 0.25}",
            "environment.max_turn_tokens=4", "data={source: none, task_size: 10}",
            "policy.training.learning_rate=1e-3", "policy.rollout.max_prompt_tokens=32",
            "policy.rollout.max_response_tokens=64", "trainer.prompts_per_step=4", "algorithm.responses_per_prompt=4",
            "algorithm.old_log_probs=separate", "trainer.trackers=[]", "trainer.export=false"]


@pytest.fixture(scope="module")
def unbroken(run, agent, tmp_path_factory) -> Path:
    """Folder of three steps with vLLM, each with an evaluation."""
    folder = tmp_path_factory.mktemp("agent") / "run"
    run(*agent, "trainer.steps=3", "eval_data={source: none, task_seed: 5, task_size: 10}", "trainer.eval_every=1",
        "trainer.eval_temperature=1", f"trainer.run_dir={folder}")
    return folder


def test_metrics_have_every_part_of_a_step(unbroken):
    rows = read_metrics(unbroken / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(0 <= row["eval/pass@1"] <= row["eval/accuracy"] <= 1.75 for row in rows)
    for row in rows[1:]:
        assert row["episodes/played"] == row["episodes/rows"] == 16 and row["episodes/failed"] == 0
        assert 1 <= row["episodes/turns_mean"] <= 3 and 1 <= row["episodes/turn_tokens_mean"] <= 4
        assert 0 < row["reward/mean"] == pytest.approx(  # a quarter for a sensible guess, one for a hit
            0.25 * row["episodes/info/sensible"] * row["episodes/turns_mean"] + row["group/pass@1"])
        assert row["mismatch/max_gap"] < GAP and row["train/grad_norm"] > 0
        assert all(row[f"time/{name}"] > 0 for name in ("play", "log_probs", "update", "sync", "evaluate"))
    assert [row["version/max"] for row in rows[1:]] == [1, 2, 3]


def test_what_was_sampled_trains_and_nothing_else(unbroken):
    """Runs of the mask are the turns; observations have no version and no log-prob gap."""
    found = samples(unbroken)
    assert len(found) == 12 and any(len(sample["turns"]) > 1 for sample in found)
    for sample in found:
        tokens = sample["tokens"]
        mask = [value for value, count in tokens["mask"] for _ in range(count)]
        said = {i for turn in sample["turns"] for i in range(turn["start"], turn["stop"])}
        assert [i in said for i in range(len(tokens["ids"]))] == mask
        versions = [value for value, count in tokens["versions"] for _ in range(count)]
        assert versions == [sample["step"] if trained else -1 for trained in mask]
        assert all(gap == 0 for gap, trained in zip(tokens["log_prob_gaps"], mask, strict=True) if not trained)
        assert sample["reward"] == pytest.approx(sum(turn["reward"] for turn in sample["turns"]))


def test_the_episodes_can_be_looked_at(unbroken, capsys):
    sample = samples(unbroken)[-1]
    hybridrl(["show", str(unbroken), "--step", "3", "--row", "3"])
    shown = capsys.readouterr().out
    assert "0-99?" in shown and all(turn["observation"][0]["content"] in shown for turn in sample["turns"])


def test_evaluation_and_resuming_change_nothing(run, agent, unbroken, tmp_path):
    """Two steps without evaluation, and a third one after resuming, are those of the run with evaluations."""
    folder = tmp_path / "run"
    run(*agent, "trainer.steps=2", f"trainer.run_dir={folder}")
    resumed = run(*agent, "trainer.steps=3", f"trainer.run_dir={folder}")
    assert "restored step 2" in resumed.out
    expected = {step: {name: value for name, value in row.items() if not name.startswith("eval/")}
                for step, row in metrics(unbroken).items() if step}
    found = metrics(folder)
    assert found.keys() == expected.keys()
    for step, row in expected.items():
        assert_same_numbers(found[step], row)  # episodes meet in other batches of the engine
    for one, other in zip(samples(folder), samples(unbroken), strict=True):
        assert one["response"] == other["response"] and one["turns"] == other["turns"]


def test_rewritten_history_and_failing_episodes(run, agent, model, tmp_path):
    """ReMax with a template that shortens old turns, in a game that breaks now and then; digits are worth something."""
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(REWRITING)
    run(*agent, "algorithm=remax", "algorithm.responses_per_prompt=4", "environment.name=tests.recipes.games:Brittle",
        "trainer.steps=1", f"policy.model.path={folder}", "policy.rollout.engine=transformers",
        "reward.functions=[{name: 'tests.recipes.reward_functions:digits', weight: 0.5}]", "reward.workers=1",
        f"trainer.run_dir={tmp_path / 'run'}", "trainer.save_samples=99")
    (row,) = metrics(tmp_path / "run").values()
    assert row["episodes/played"] == 16 < row["episodes/rows"]
    assert 0 < row["episodes/failed_raised"] == row["episodes/failed"] < 16
    assert row["train/grad_norm"] > 0 and row["mismatch/max_gap"] < GAP
    found = samples(tmp_path / "run")
    assert len(found) == row["episodes/rows"]
    for sample in found:
        failed, parts = sample["reward"] is None, sample["reward_components"]
        assert failed or sample["reward"] == pytest.approx(parts["environment"] + 0.5 * parts["digits"])
        assert failed == ("raised: step: ValueError: unlucky" in (sample["reward_error"] or ""))
        trained = sum(count for value, count in sample["tokens"]["mask"] if value)
        assert trained == (0 if failed else sum(turn["stop"] - turn["start"] for turn in sample["turns"]))


def test_dynamic_sampling_with_a_reference(run, agent, tmp_path):
    """One row a group at least differs in its reward; the policy starts as the reference, on observations, too."""
    run(*agent, "algorithm=dapo", "algorithm.responses_per_prompt=2", "algorithm.kl.coefficient=0.1", "trainer.steps=1",
        "policy.rollout.engine=transformers", f"trainer.run_dir={tmp_path / 'run'}", "trainer.save_samples=99")
    (row,) = metrics(tmp_path / "run").values()
    assert row["sampling_groups_kept"] >= 4 and row["episodes/played"] == 8 * row["sampling_rounds"]
    rewards = [sample["reward"] for sample in samples(tmp_path / "run")]
    assert len(rewards) == 8 and all(one != other for one, other in zip(rewards[::2], rewards[1::2], strict=True))
    assert row["policy/kl_loss"] == pytest.approx(0, abs=1e-6) and row["train/grad_norm"] > 0


@pytest.mark.parametrize("words, message", [
    (["environment.name="], "environment.name must be the name of an environment, or a class's import path"),
    (["environment.name=gess"], "environment.name: Unknown environment 'gess'. Did you mean guess"),
    (["environment.options={hihg: 9}"], "Unknown option of environment 'guess' 'hihg'. Did you mean high"),
    (["environment.options={high: many}"], "environment.options.high of environment 'guess' must be int, got 'many'."),
    (["algorithm=gdpo"], "algorithm.advantage.name=gdpo needs reward_components, which this loop does not write"),
    (["eval_data={source: none, task_size: 5}"], "none of the 5 evaluation prompts is held out: all are trained on."),
])
def test_what_cannot_be_is_refused_before_anything_heavy(refusal, agent, tmp_path, words, message):
    code, (line,) = refusal([*agent, f"trainer.run_dir={tmp_path / 'run'}", *words])
    assert code in (1, 2) and line.startswith("agent: ") and message in line
