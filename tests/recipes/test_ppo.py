"""`python -m recipes.ppo`: a critic beside the policy, in the same processes or in its own."""

import json
import math
from pathlib import Path

import pytest

from hybridrl.metrics import read_metrics
from tests.recipes.command import GAP, assert_same_numbers, metrics, samples, write_jsonl

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def ppo(grpo) -> list[str]:
    """Options of a small PPO run on one local rank; `grpo` gives the model, the data and the sizes.

    With a steered KL penalty in the reward: a reference model takes part, and the coefficient is state.
    """
    return ["recipes.ppo", *grpo[1:], "policy.rollout.engine=transformers", "critic.training.learning_rate=1e-2",
            "algorithm.mini_batches=2", "algorithm.kl.coefficient=0.5", "algorithm.kl.place=reward",
            "algorithm.kl.estimator=k1", "algorithm.kl.target=1e-4",
            "algorithm.kl.horizon=100", "trainer.trackers=[]", "trainer.checkpoint_every=1"]


@pytest.fixture(scope="module")
def local(run, ppo, tmp_path_factory) -> Path:
    """Folder of two steps with the critic on the policy's only rank."""
    folder = tmp_path_factory.mktemp("local") / "run"
    held_out = write_jsonl(folder.parent / "held_out.jsonl", [
        {"prompt": "20+21=", "answer": "41"}, {"prompt": "20+22=", "answer": "42"}])
    run(*ppo, f"eval_data.path={held_out}",
        f"eval_suites=[{{name: more, data: {{path: {held_out}}}, reward: {{functions: [{{name: numeric}}]}}}}]",
        f"trainer.run_dir={folder}")
    return folder


def test_policy_and_critic_learn_in_every_step(local):
    rows = read_metrics(local / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for name in ("eval/accuracy", "eval/more/accuracy_low"):
        assert name in rows[0] and name not in rows[1] and name in rows[2]
    for row in rows[1:]:
        assert {"critic/vf_loss", "critic/vf_clipfrac", "critic/explained_variance"} <= row.keys()
        assert row["critic/vf_loss"] > 0 and row["critic/grad_norm"] > 0 and row["train/grad_norm"] > 0
        assert (row["critic/lr"], row["train/lr"]) == (1e-2, 1e-3)
        assert row["advantage/std"] == pytest.approx(1, abs=1e-4), "whitened"
        assert row["mismatch/max_gap"] < GAP
        assert all(value is not None and math.isfinite(value) for value in row.values())
    # Lambda 1: the return of each token is the row's reward, minus a penalty that is 0 while the policy is its
    # reference.
    assert rows[1]["reward/min"] <= rows[1]["critic/return_mean"] <= rows[1]["reward/max"]
    assert rows[1]["policy/kl_coefficient"] == 0.5 > rows[2]["policy/kl_coefficient"], "no KL at first"
    assert rows[2]["policy/ref_kl"] > 1e-4 and "policy/kl_loss" not in rows[2]
    # The first mini-batch of step 1 sees values 0, the second what one step of 1e-2 made of them.
    assert rows[1]["critic/value_mean"] != 0
    assert len(samples(local)) == 8


def test_with_vllm_lambdas_of_its_own_and_values_after_cut_responses(run, ppo, tmp_path):
    folder = tmp_path / "run"
    run(*ppo, "policy.rollout.engine=vllm", "critic.bootstrap=true", "algorithm.kl.coefficient=0",
        "algorithm.kl.target=0", "algorithm.advantage.options={lam_alpha: 0.5, critic_lam: 0.9}",
        "trainer.export=false", f"trainer.run_dir={folder}")
    first, second = metrics(folder).values()
    for row in (first, second):
        assert row["response/truncated_ratio"] > 0 and row["mismatch/max_gap"] < GAP
        assert row["staleness/max"] == 0 and row["policy/ratio_max"] > row["policy/ratio_min"]
        assert all(math.isfinite(value) for value in row.values())
    assert first["critic/explained_variance"] == 0 and second["critic/explained_variance"] != 0
    assert (first["version/max"], second["version/max"]) == (1, 2)


def test_the_folder_resumes_with_the_critic(local):
    saved = {path.relative_to(local / "checkpoints").parts[1]
             for path in (local / "checkpoints").rglob("*") if path.is_file()}
    assert {"policy", "critic", "prompts.json", "algorithm.json", "manifest.json"} == saved
    manifest = json.loads((local / "checkpoints/step_000002/critic/training.json").read_text())
    assert manifest["numbers"]["steps"] == 4, "two mini-batches a step"
    assert (local / "model/model.safetensors").exists() and (local / "model/tokenizer.json").exists()


def test_a_stopped_and_resumed_run_is_the_unbroken_one(run, ppo, local, tmp_path):
    folder = tmp_path / "run"
    run(*ppo, "trainer.steps=1", "trainer.export=false", f"trainer.run_dir={folder}")
    resumed = run(*ppo, "trainer.export=false", f"trainer.run_dir={folder}")
    assert "restored step 1" in resumed.out
    expected, found = metrics(local), metrics(folder)
    for step in (1, 2):
        for name in found[step]:
            assert found[step][name] == expected[step][name], (step, name)


def test_critic_and_reference_on_their_own_devices_give_the_same_numbers(run, ppo, local, tmp_path):
    """One Ray rank each, working at the same time."""
    folder = tmp_path / "run"
    run(*ppo, "cluster.backend=ray", "critic.ranks=1", "reference.ranks=1", "trainer.export=false",
        f"trainer.run_dir={folder}")
    expected, found = metrics(local), metrics(folder)
    for step in (1, 2):
        trained = {name: value for name, value in expected[step].items() if not name.startswith("eval/")}
        assert_same_numbers(found[step], trained)
    assert {file.name for file in (folder / "logs").iterdir()} == {
        "controller.log", "pool0-rank0.log", "pool1-rank0.log", "pool2-rank0.log"}
