"""Every ready-made algorithm: gradients and metrics of an update do not depend on ranks and micro-batches."""

from pathlib import Path

import pytest
import torch

from hybridrl.algorithms.algorithm import Algorithm
from hybridrl.algorithms.partials import finalize
from hybridrl.batch import from_lengths, lengths, make_batch
from hybridrl.config import GRPOConfig
from hybridrl.config_loading import groups_of, load
from tests.distributed.test_training_engine import assert_same_metrics, engine, run, share
from tests.models import tiny_model

pytestmark = pytest.mark.slow
ALGORITHMS = groups_of("grpo")["algorithm"]
PENALTIES = ["algorithm.kl.coefficient=0.1", "algorithm.entropy.coefficient=0.05"]
BUDGETS = {1: (60, 1000), 2: (60,)}
"""Tokens of a micro-batch, by number of ranks."""


def scored():
    """12 responses in 3 groups, two of them empty; log-probs are near those of an untrained model of 64 tokens."""
    g = torch.Generator().manual_seed(0)
    sizes = torch.tensor([3, 0, 7, 1, 9, 4, 0, 2, 8, 5, 6, 3])

    def tokens(low, high):
        return from_lengths(low + (high - low) * torch.rand(int(sizes.sum()), generator=g), sizes)

    ids = [torch.randint(0, 64, (int(n),), generator=g) for n in sizes]
    old = tokens(-4.6, -3.8)
    return make_batch(
        prompt_ids=[torch.randint(0, 64, (3,), generator=g) for _ in ids], response_ids=ids,
        response_mask=[[True] * len(row) for row in ids], finish_reason=["stop"] * 12,
        weight_versions=[[1] * len(row) for row in ids], group_ids=[i // 4 for i in range(12)],
        rewards=[float(i % 4 < 1 + i // 4) for i in range(12)], greedy_rewards=[0.3] * 12,
        reward_components=torch.rand(12, 2, generator=g), old_log_probs=old,
        rollout_log_probs=from_lengths(old.values() + 0.05 * torch.randn(len(old.values()), generator=g), sizes),
        ref_log_probs=tokens(-4.6, -3.8), entropies=tokens(3.0, 4.0), sum_squared_probs=tokens(0.02, 0.05))


def mini_batch(name):
    words = [f"algorithm={name}", "policy.model.path=m", "data.path=d", *PENALTIES]
    algorithm = Algorithm(load("grpo", GRPOConfig, words).algorithm, 16, reward_weights=[1.0, 0.5])
    batch = scored()
    if not algorithm.needs_old_log_probs:
        del batch["old_log_probs"]
    batch = algorithm.shape(batch)
    batch["advantages"] = algorithm.advantages(batch)
    (part,) = algorithm.mini_batches(algorithm.correct(batch))
    return part, algorithm.loss


def gradients_of(ours, part, loss):
    """Metrics and gradients of an update that leaves the weights as they are."""
    found = {}

    def step():
        for name, parameter in ours.model.causal_lm.named_parameters():
            gradient = parameter.grad
            found[name] = getattr(gradient, "full_tensor", gradient.clone)().clone()
            parameter.grad = None
        return 0.0, 0.0, False

    ours.optimizer.step = step
    metrics = ours.step(part, loss, 1.0, loss.needs_entropies)
    return finalize(metrics), found


def updates(folders: dict[str, Path], scratch: Path) -> dict:
    result = {}
    for budget in BUDGETS[torch.distributed.get_world_size()]:
        ours = engine(folders["llama"], micro_batch_tokens=budget)
        for name in ALGORITHMS:
            part, loss = mini_batch(name)
            result[name, budget] = gradients_of(ours, share(part, (7, 5)), loss)
    return result


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("algorithms")
    folders = {"llama": tiny_model(scratch / "llama", "llama")}
    return {ranks: run(ranks, updates, folders, scratch) for ranks in BUDGETS}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_update_does_not_depend_on_how_it_is_cut(outcome, name):
    whole, gradient = outcome[1][0][name, 1000]
    assert sum(float(g.abs().sum()) for g in gradient.values()) > 1e-3
    assert int(lengths(scored()["response_ids"]).sum()) == 48
    for other, found in (outcome[1][0][name, 60], outcome[2][0][name, 60]):
        assert_same_metrics([other], [whole], rel=1e-6)
        for weight, expected in gradient.items():
            torch.testing.assert_close(found[weight], expected, rtol=1e-6, atol=1e-9)
    assert outcome[2][1][name, 60][0] == outcome[2][0][name, 60][0], "both ranks report the same"
