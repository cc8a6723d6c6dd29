"""`policy.training.lora.rank=...`: adapters are trained, the policy is its own reference, checkpoints are small."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.metrics import read_metrics
from tests.recipes.command import GAP, metrics

pytestmark = pytest.mark.slow
OPTIONS = ["policy.training.lora.rank=4", "policy.training.lora.export_adapter=true", "policy.sync.lora=adapter",
           "policy.training.learning_rate=1e-2", "algorithm.kl.coefficient=0.1", "algorithm.mini_batches=2",
           "trainer.trackers=[]", "trainer.checkpoint_every=1"]


@pytest.fixture(scope="module")
def folder(run, grpo, tmp_path_factory) -> Path:
    """Folder of two steps with a KL penalty."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    run(*grpo, *OPTIONS, f"trainer.run_dir={folder}")
    return folder


def test_the_policy_is_its_own_reference(folder):
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["train/grad_norm"] > 0 and row["mismatch/max_gap"] < GAP and row["sync/max_log_prob_gap"] < GAP
    # The first mini-batch of step 1 still is the reference; the second has left it, as all of step 2 has.
    assert 0 < rows[0]["policy/ref_kl"] < rows[1]["policy/ref_kl"]


def test_the_export_is_a_whole_model_and_an_adapter(folder, model):
    exported, original = load_file(folder / "model/model.safetensors"), load_file(model / "model.safetensors")
    assert exported.keys() == original.keys()
    moved = {name for name in original if not torch.equal(exported[name], original[name])}
    assert moved == {name for name in original if name.endswith("_proj.weight")}
    assert (folder / "model/adapter/adapter_model.safetensors").is_file()
    saved = list((folder / "checkpoints/step_000002/policy").glob("*.safetensors"))
    assert all(".lora_" in name for file in saved for name in load_file(file))


def test_a_run_goes_on_from_its_adapters_merged_into_another_engine(folder, run, grpo, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    resumed = run(*grpo, *OPTIONS, "policy.sync.lora=merged", "policy.rollout.engine=transformers", "trainer.steps=3",
                  "trainer.export=false", "policy.training.learning_rate=0", f"trainer.run_dir={tmp_path / 'run'}")
    assert "restored step 2" in resumed.out
    row = metrics(tmp_path / "run")[3]
    assert row["mismatch/max_gap"] < GAP and row["sync/max_log_prob_gap"] < GAP
    assert row["policy/ref_kl"] > 1e-2, "the adapters are those of step 2"


def test_a_target_that_matches_nothing_is_refused_before_the_run_begins(run, grpo, tmp_path):
    command = run(*grpo, "policy.training.lora.rank=4", "policy.training.lora.targets=[q_prj]",
                  f"trainer.run_dir={tmp_path}/run", code=2)
    assert "'q_prj' names no linear layer of the model's decoder layers. Did you mean q_proj" in command.err
    assert not (tmp_path / "run").exists()
