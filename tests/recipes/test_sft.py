"""`python -m recipes.sft`: twenty examples learned by heart, and an exact resume."""

import json
from pathlib import Path

import pytest

from hybridrl.metrics import read_metrics
from tests.recipes.command import metrics, write_jsonl

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def examples(tmp_path_factory) -> Path:
    """Twenty prompts whose answers follow no rule: only memory helps."""
    rows = [{"prompt": f"{i}?", "response": f"{(i * 7919 + 13) % 997}", "answer": f"{(i * 7919 + 13) % 997}"}
            for i in range(20)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "examples.jsonl", rows)


@pytest.fixture(scope="module")
def words(model, examples) -> list[str]:
    return ["recipes.sft", "cluster.backend=local", f"policy.model.path={model}", f"data.path={examples}",
            "max_tokens=64", "policy.training.learning_rate=1e-2", "trainer.prompts_per_step=20", "trainer.steps=80",
            "trainer.trackers=[]"]


@pytest.fixture(scope="module")
def learned(run, words, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("learned") / "run"
    run(*words, f"trainer.run_dir={folder}")
    return folder


def test_the_loss_falls(learned):
    rows = read_metrics(learned / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 81))
    assert rows[0]["train/loss"] > 2 and rows[-1]["train/loss"] < 0.05
    assert all(row["time/update"] > 0 for row in rows)


def test_the_exported_model_knows_all_answers(learned, run, examples):
    """Greedily, on the rollout engine, with the exact-match reward."""
    command = run("recipes.evaluate", "cluster.backend=local", f"policy.model.path={learned / 'model'}",
                  f"data.path={examples}", "policy.rollout.temperature=0", "policy.rollout.max_prompt_tokens=16",
                  "policy.rollout.max_response_tokens=8")
    result = json.loads(command.out.splitlines()[-1])
    assert result["pass@1"] == 1 and result["problems"] == 20


def test_a_stopped_and_resumed_run_is_the_unbroken_one(run, words, learned, tmp_path):
    """Seven of twenty examples a step, so that the position in the data counts, too."""
    options = [*words, "trainer.prompts_per_step=7", "trainer.export=false"]
    run(*options, "trainer.steps=5", f"trainer.run_dir={tmp_path / 'unbroken'}")
    run(*options, "trainer.steps=2", f"trainer.run_dir={tmp_path / 'stopped'}")
    resumed = run(*options, "trainer.steps=5", f"trainer.run_dir={tmp_path / 'stopped'}")
    assert "restored step 2" in resumed.out
    unbroken = metrics(tmp_path / "unbroken")
    assert len({row["train/loss"] for row in unbroken.values()}) == 5
    assert metrics(tmp_path / "stopped") == unbroken
