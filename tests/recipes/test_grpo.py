"""`python -m recipes.grpo` with the real engines: what a run leaves, and that layouts of ranks agree."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml

from hybridrl.algorithms.algorithm import Algorithm
from hybridrl.config import GRPOConfig, ModelConfig, TrainingConfig
from hybridrl.config_loading import groups_of, load
from hybridrl.metrics import read_metrics
from tests.recipes.command import GAP, assert_same_numbers, metrics, samples

pytestmark = pytest.mark.slow

OPTIONS = ["algorithm.mini_batches=2", "algorithm.epochs=2", "trainer.checkpoint_every=1", "trainer.keep_checkpoints=1"]


@pytest.fixture(scope="module")
def local(run, grpo, doubles, tmp_path_factory) -> Path:
    """Folder of two steps with vLLM on one local rank."""
    folder = tmp_path_factory.mktemp("local") / "run"
    run(*grpo, *OPTIONS, f"eval_data.path={doubles}", "trainer.eval_samples=2", f"trainer.run_dir={folder}")
    return folder


def test_metrics_have_every_part_of_a_step(local):
    rows = read_metrics(local / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0]["eval/accuracy"] is not None and "reward/mean" not in rows[0]
    assert "eval/accuracy" in rows[2] and "eval/accuracy" not in rows[1]
    for row in rows[1:]:
        assert 0 < row["reward/mean"] < 1 and row["reward/failed"] == 0
        assert 1 <= row["response/length_mean"] <= 12
        assert row["mismatch/max_gap"] < GAP and row["sync/max_log_prob_gap"] < GAP
        assert {"policy/clipfrac", "policy/ratio_mean", "policy/approx_kl_k3", "train/loss", "advantage/std",
                "group/zero_variance"} <= row.keys()
        assert row["train/grad_norm"] > 0 and row["train/lr"] == 1e-3
        times = [row[f"time/{name}"] for name in ("generate", "reward", "log_probs", "update", "sync")]
        assert all(seconds > 0 for seconds in times) and sum(times) <= row["time/step"]
        assert all(value is not None and math.isfinite(value) for value in row.values())
    assert rows[1]["policy/approx_kl_k3"] > 0, "the second mini-batch is off policy"
    # Rows of step 1 are sampled from version 1; every step ends with a sync of changed weights.
    assert [row["version/min"] for row in rows[1:]] == [row["version/max"] for row in rows[1:]] == [1, 2]
    assert [row["sync/version"] for row in rows[1:]] == [2, 3]


def test_samples_carry_what_was_scored(local):
    found = samples(local)
    assert [sample["step"] for sample in found] == [1] * 4 + [2] * 4
    for sample in found:
        left, right = sample["prompt"].rstrip("=").split("+")
        assert sample["answer"] == str(int(left) + int(right))
        digits = sum(character.isdigit() for character in sample["response"])
        assert sample["reward"] == pytest.approx(digits / max(1, len(sample["response"])))
        assert sample["weight_versions"] == [sample["step"]]
        assert sample["reward_error"] is None and sample["finish_reason"] in ("stop", "length")


def test_the_folder_holds_options_checkpoint_and_curves(local):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = yaml.safe_load((local / "config.yaml").read_text())
    assert options["algorithm"]["mini_batches"] == 2 and options["trainer"]["run_dir"] == str(local)
    assert [folder.name for folder in (local / "checkpoints").iterdir()] == ["step_000002"]
    events = EventAccumulator(str(local / "tensorboard"))
    events.Reload()
    written = {row["step"]: row.get("reward/mean") for row in read_metrics(local / "metrics.jsonl")}
    curve = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert curve == [(step, pytest.approx(written[step])) for step in (1, 2)]


def test_the_exported_model_is_the_trained_one(local, model, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hybridrl.batch import make_batch
    from hybridrl.workers.training.engine import TrainingEngine

    exported = AutoModelForCausalLM.from_pretrained(local / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(local / "model")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(model).chat_template
    prompt, response = tokenizer("3+4=")["input_ids"], tokenizer("7,abc")["input_ids"]
    text = torch.tensor([prompt + response])

    def log_probs(causal_lm):
        with torch.no_grad():
            rows = causal_lm(text).logits[0, len(prompt) - 1:-1].log_softmax(-1)
        return rows.gather(1, torch.tensor(response)[:, None])[:, 0]

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        engine = TrainingEngine(ModelConfig(path=str(model)), TrainingConfig(), torch.device("cpu"))
        engine.load(local / "checkpoints" / "step_000002" / "policy")
        trained = engine.log_probs(make_batch(prompt_ids=[prompt], response_ids=[response]))["log_probs"].values()
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(log_probs(exported), trained, atol=GAP, rtol=0)
    untrained = log_probs(AutoModelForCausalLM.from_pretrained(model).eval())
    assert (untrained - trained).abs().max() > 10 * GAP


@pytest.mark.parametrize("layout", [1, 2], ids=["2x1", "1x2"])
def test_two_ray_ranks_give_the_metrics_of_one_local_rank(run, grpo, doubles, local, tmp_path, layout):
    """As two engines, and as one that spans both (tensor_parallel=2)."""
    folder = tmp_path / "run"
    run(*grpo, *OPTIONS, f"eval_data.path={doubles}", "trainer.eval_samples=2", f"trainer.run_dir={folder}",
        "cluster.backend=ray", "cluster.ranks=2", f"policy.rollout.tensor_parallel={layout}", "trainer.export=false")
    expected, found = metrics(local), metrics(folder)
    assert found.keys() == expected.keys()
    for step in expected:
        assert_same_numbers(found[step], expected[step])
    assert [s["response"] for s in samples(folder)] == [s["response"] for s in samples(local)]
    assert {file.name for file in (folder / "logs").iterdir()} == {
        "controller.log", "pool0-rank0.log", "pool0-rank1.log"}


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce"])
def test_every_algorithm_group_loads(name, grpo):
    assert name in groups_of("grpo")["algorithm"]
    words = [word for word in grpo[1:] if not word.startswith("algorithm.")]
    cfg = load("grpo", GRPOConfig, [*words, f"algorithm={name}"])
    assert cfg.algorithm.advantage.name == name
    Algorithm(cfg.algorithm, 12)


def test_rloo_with_a_penalty_for_leaving_the_reference(run, grpo, tmp_path):
    """And that a dry run and a pass of their own for old log-probs change no number."""
    words = [*grpo, "algorithm=rloo", "algorithm.kl.coefficient=0.1", "policy.rollout.engine=transformers",
             "trainer.trackers=[]", "trainer.export=false"]
    run(*words, f"trainer.run_dir={tmp_path / 'run'}")
    dry = run(*words, f"trainer.run_dir={tmp_path / 'separate'}", "algorithm.old_log_probs=separate",
              "trainer.dry_run=true")
    assert "dry run: a micro-batch of 688 tokens takes" in dry.out  # 16 responses to prompts of 32 + 12 - 1
    separate, reused = metrics(tmp_path / "separate"), metrics(tmp_path / "run")
    name = "train/old_log_probs_reused"
    assert [row[name] for row in reused.values()] == [1, 1] and [row[name] for row in separate.values()] == [0, 0]
    assert reused == {step: {**row, name: 1} for step, row in separate.items()}
    row = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    phases = [row[f"memory/{name}_peak_bytes"] for name in ("generate", "update")]
    assert all(2**27 < peak < 2**34 for peak in phases)
    first, second = metrics(tmp_path / "run").values()
    assert first["policy/kl_loss"] == pytest.approx(0, abs=1e-6), "the policy starts as the reference"
    assert second["policy/kl_loss"] > 1e-5
    assert first["mismatch/max_gap"] < GAP and second["mismatch/max_gap"] < GAP
    assert not (tmp_path / "run" / "tensorboard").exists() and not (tmp_path / "run" / "model").exists()
