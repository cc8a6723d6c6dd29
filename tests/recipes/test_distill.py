"""`python -m recipes.distill`: learning from a teacher, with its opinion of samples or of its likeliest tokens."""

import math
from pathlib import Path

import pytest

import recipes.distill
from hybridrl.config import ModelConfig
from hybridrl.metrics import read_metrics
from hybridrl.models import load_tokenizer
from tests.models import tiny_model
from tests.recipes.command import GAP, metrics, samples, write_jsonl

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def teacher(tmp_path_factory) -> Path:
    """Another architecture and other weights, the same tokenizer."""
    return tiny_model(tmp_path_factory.mktemp("teacher"), "llama", seed=9, num_hidden_layers=3)


@pytest.fixture(scope="session")
def distill(grpo, teacher) -> list[str]:
    """Options of a small run on one local rank; `grpo` gives the model, the data and the sizes."""
    return ["recipes.distill", *grpo[1:], f"teacher.model.path={teacher}", "policy.rollout.engine=transformers",
            "trainer.trackers=[]", "trainer.checkpoint_every=1"]


@pytest.fixture(scope="module")
def sampled(run, distill, tmp_path_factory) -> Path:
    """Folder of two steps, evaluated, rewards learnt from as well."""
    folder = tmp_path_factory.mktemp("sampled") / "run"
    held_out = write_jsonl(folder.parent / "held_out.jsonl", [
        {"prompt": "20+21=", "answer": "41"}, {"prompt": "20+22=", "answer": "42"}])
    run(*distill, f"eval_data.path={held_out}",
        f"eval_suites=[{{name: more, data: {{path: {held_out}}}, reward: {{functions: [{{name: numeric}}]}}}}]",
        "algorithm.advantage.options.reward_coef=0.5", f"trainer.run_dir={folder}")
    return folder


def test_the_policy_learns_from_the_teachers_opinion(sampled):
    rows = read_metrics(sampled / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for name in ("eval/accuracy", "eval/more/accuracy_low"):
        assert name in rows[0] and name not in rows[1] and name in rows[2]
    for row in rows[1:]:
        assert row["distill/kl"] > 0.1 and row["train/grad_norm"] > 0 and row["mismatch/max_gap"] < GAP
        # no baseline: the mean over tokens of teacher - policy + 0.5 r
        assert -row["distill/kl"] - 0.5 <= row["advantage/mean"] <= -row["distill/kl"] + 0.5
        assert all(math.isfinite(value) for value in row.values())
    assert len(samples(sampled)) == 8 and (sampled / "model/model.safetensors").exists()


def test_a_stopped_and_resumed_run_is_the_unbroken_one(run, distill, sampled, tmp_path):
    folder, words = tmp_path / "run", ["algorithm.advantage.options.reward_coef=0.5", "trainer.export=false"]
    run(*distill, *words, "trainer.steps=1", f"trainer.run_dir={folder}")
    assert "restored step 1" in run(*distill, *words, f"trainer.run_dir={folder}").out
    expected, found = metrics(sampled), metrics(folder)
    for step in (1, 2):
        for name in found[step]:
            assert found[step][name] == expected[step][name], (step, name)


def test_the_likeliest_tokens_of_the_teacher_without_rewards(run, distill, tmp_path):
    """On vLLM."""
    folder = tmp_path / "run"
    run(*distill, "policy.rollout.engine=vllm", "distill.loss=top_k", "distill.top_k=8", "reward.functions=[]",
        "algorithm.mini_batches=2", "trainer.export=false", f"trainer.run_dir={folder}")
    for row in read_metrics(folder / "metrics.jsonl"):
        assert row["reward/mean"] == row["advantage/mean"] == row["reward/failed"] == 0
        assert row["mismatch/max_gap"] < GAP
        assert row["distill/top_k_kl"] > 0 and 0 < row["distill/top_k_mass"] < 1 and row["train/grad_norm"] > 0
        assert row["train/loss"] == pytest.approx(row["distill/top_k_kl"], rel=0.2), "of two mini-batches"


@pytest.mark.parametrize("words, message", [
    (["teacher.model.path={other}"], "different vocabularies (52 and 53 tokens): '<think>' has id none in one and 52"),
    (["teacher.model.path=nowhere"], "is neither a folder nor a known name"),
    (["teacher.model.path="], "teacher.model.path must be a model folder, got ''."),
    (["algorithm.advantage.name=grpo"], "must be distill with distill.loss=sampled, got 'grpo'"),
    (["distill.loss=topk"], "Did you mean top_k"),
    (["distill.top_k=0"], "distill.top_k must be at least 1, got 0."),
    (["distill.teacher_temperature=0"], "distill.teacher_temperature must be positive, got 0.0."),
    (["reward.functions=[]", "algorithm.advantage.options.reward_coef=1"], "distill reads rewards, which need an"),
    (["reward.functions=[]", "eval_data.path=x"], "reward.functions must be at least one function to evaluate with"),
    (["algorithm.kl.coefficient=0.1"], "needs a reference or greedy responses, which distillation does not make"),
    (["teacher.ranks=1"], "teacher.ranks must be 0 with cluster.backend=local, got 1."),
])
def test_what_cannot_be(capsys, monkeypatch, distill, model, tmp_path, words, message):
    """In one line, before anything starts."""
    other = tiny_model(tmp_path / "other")
    tokenizer = load_tokenizer(ModelConfig(path=str(other)))
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(other)
    words = [word.replace("{other}", str(other)) for word in words]
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", [*distill, f"trainer.run_dir={tmp_path / 'run'}", *words])
    with pytest.raises(SystemExit) as stopped:
        recipes.distill.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code in (1, 2) and message in line
    assert not (tmp_path / "run").exists()
