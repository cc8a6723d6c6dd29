"""`experiment=moe_demo`: a mixture of experts, trained under the experts that the rollout took."""

import pytest

from hybridrl.metrics import read_metrics

pytestmark = pytest.mark.slow
SMALL = ["experiment=moe_demo", "eval_data.path=", "trainer.eval_every=0", "trainer.steps=2",
         "trainer.prompts_per_step=4", "algorithm.responses_per_prompt=4", "algorithm.mini_batches=2",
         "trainer.trackers=[]", "trainer.export=false"]


@pytest.fixture(scope="module")
def mixture(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture") / "model"
    run("recipes.demo.make_moe", str(folder))
    return folder


@pytest.mark.parametrize("engine, replay", [("vllm", "rollout"), ("transformers", "rollout"), ("transformers", "old")])
def test_two_steps_under_replayed_experts(run, mixture, tmp_path, engine, replay):
    run("recipes.grpo", *SMALL, f"policy.model.path={mixture}", f"policy.rollout.engine={engine}",
        f"policy.routing_replay={replay}", f"trainer.run_dir={tmp_path}/run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["train/grad_norm"] > 0 and row["routing/fallback_rows"] == 0
        assert row["mismatch/max_gap"] < 1e-3 and row["mismatch/frac_beyond_2"] == 0
        assert 0 <= row["routing/layers_differ_frac"] <= row["routing/tokens_differ_frac"] < 1
        assert row["mismatch_live/kl_k3"] >= 0


def test_a_dense_model_has_nothing_to_replay(run, grpo, tmp_path):
    command = run(*grpo, "policy.routing_replay=rollout", f"trainer.run_dir={tmp_path}/run", code=2)
    assert "policy.routing_replay must be off for a model without experts, got 'rollout'" in command.err
    assert not (tmp_path / "run").exists()
