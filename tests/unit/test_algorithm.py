"""A configured algorithm on batches: shaping, mini-batches and the loss, against values worked out by hand."""

import math

import pytest
import torch

from hybridrl.algorithms.algorithm import Algorithm
from hybridrl.algorithms.batch_metrics import batch_metrics
from hybridrl.algorithms.partials import finalize
from hybridrl.algorithms.values import ValueLoss
from hybridrl.batch import lengths, make_batch, num_rows, padded, rows_of, unpadded
from hybridrl.config import (
    AlgorithmConfig,
    Choice,
    DynamicSamplingConfig,
    EntropyConfig,
    GRPOConfig,
    KLConfig,
    OverlongConfig,
)
from hybridrl.config_loading import load
from hybridrl.errors import ConfigError


def scored(rewards, sizes, groups, reasons=None):
    """A batch as it comes back from log_probs, with log-prob -1 for every token."""
    ones = [[1.0] * size for size in sizes]
    return make_batch(
        rewards=rewards, group_ids=groups, finish_reason=reasons or ["stop"] * len(sizes),
        prompt_ids=[[1]] * len(sizes), response_ids=[[7] * size for size in sizes],
        response_mask=[[True] * size for size in sizes], old_log_probs=[[-x for x in row] for row in ones],
        rollout_log_probs=[[-x for x in row] for row in ones])


def test_a_row_without_a_score_leaves_statistics_and_denominators():
    algorithm = Algorithm(AlgorithmConfig(), 8)
    batch = algorithm.shape(scored([1.0, 0.0, math.nan, 0.0], [2, 1, 5, 1], [0, 0, 0, 0]))
    assert [row.tolist() for row in rows_of(batch["response_mask"])] == [[True] * 2, [True], [False] * 5, [True]]
    batch["advantages"] = algorithm.advantages(batch)
    # mean 1/3, sample deviation sqrt(1/3), of the three scored rows
    up, down = (2 / 3) / math.sqrt(1 / 3), (-1 / 3) / math.sqrt(1 / 3)
    expected = torch.tensor([up, up, down, 0, 0, 0, 0, 0, down])
    torch.testing.assert_close(batch["advantages"].values(), expected, atol=1e-5, rtol=0)
    (mini_batch,) = algorithm.mini_batches(batch)
    assert mini_batch["loss_weights"].values().tolist() == [0.25, 0.25, 0.25, 0, 0, 0, 0, 0, 0.25]


def test_lengths_count_rows_that_left_the_loss():
    algorithm = Algorithm(AlgorithmConfig(), 8)
    batch = algorithm.shape(scored([1.0, 0.0, math.nan], [2, 1, 6], [0, 0, 0]))
    batch["weight_versions"] = batch["response_ids"]
    batch["advantages"] = algorithm.advantages(batch)
    metrics = batch_metrics(batch)
    assert (metrics["response/length_mean"], metrics["response/length_min"]) == (3, 1)
    assert metrics["response/aborted_ratio"] == 0


def test_overlong_penalty_keeps_the_outcome():
    algorithm = Algorithm(AlgorithmConfig(overlong=OverlongConfig(penalty=2.0, buffer_frac=0.5)), 8)
    batch = algorithm.shape(scored([1.0, 1.0, 0.0], [4, 6, 8], [0, 0, 0]))
    assert batch["rewards"].tolist() == [1.0, 0.0, -2.0]  # 0, half, and the whole penalty over tokens 4 to 8
    assert batch["outcomes"].tolist() == [1.0, 1.0, 0.0]


def test_cut_responses_can_leave_the_loss_and_still_count_in_their_group():
    algorithm = Algorithm(AlgorithmConfig(overlong=OverlongConfig(mask=True)), 8)
    batch = algorithm.shape(scored([1.0, 0.0], [2, 8], [0, 0], ["stop", "length"]))
    assert padded(batch["response_mask"]).sum(1).tolist() == [2, 0]
    advantages = algorithm.advantages(batch)
    torch.testing.assert_close(advantages.values()[:2], torch.full((2,), 0.5 / math.sqrt(0.5)), atol=1e-5, rtol=0)


def test_kl_in_the_reward_is_subtracted_token_by_token():
    cfg = AlgorithmConfig(kl=KLConfig(coefficient=0.5, place="reward", estimator="k1"),
                          advantage=Choice(name="reinforce"))
    algorithm = Algorithm(cfg, 8)
    batch = scored([1.0, 0.0], [2, 1], [0, 1])
    batch["ref_log_probs"] = torch.nested.nested_tensor_from_jagged(
        torch.tensor([-1.0, -3.0, -2.0]), batch["response_ids"].offsets())
    batch = algorithm.shape(batch)
    # k1 = old - ref = 0, 2, 1; the outcome sits on the last token
    assert batch["token_rewards"].values().tolist() == [0.0, 1 - 0.5 * 2, -0.5]
    assert algorithm.needs_reference and algorithm.loss.kl is None
    assert algorithm.advantages(batch).values().tolist() == [0.0, 0.0, -0.5]


def test_mini_batches_keep_groups_together_and_use_every_row_once_an_epoch():
    algorithm = Algorithm(AlgorithmConfig(mini_batches=2, epochs=2), 8)
    batch = algorithm.shape(scored([float(i % 2) for i in range(10)], [1 + i % 3 for i in range(10)],
                                   [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]))
    batch["advantages"] = algorithm.advantages(batch)
    parts = list(algorithm.mini_batches(batch, seed=3))
    assert [num_rows(part) for part in parts] == [6, 4, 6, 4]
    for epoch in (parts[:2], parts[2:]):
        groups = [set(part["group_ids"].tolist()) for part in epoch]
        assert groups[0] | groups[1] == {0, 1, 2, 3, 4} and not groups[0] & groups[1]
        for part in epoch:  # token-mean: coefficients of a mini-batch add up to 1
            assert float(part["loss_weights"].values().sum()) == pytest.approx(1)
    assert [part["group_ids"].tolist() for part in parts] == [
        part["group_ids"].tolist() for part in algorithm.mini_batches(batch, seed=3)]


def test_loss_with_kl_and_entropy_by_hand():
    cfg = AlgorithmConfig(kl=KLConfig(coefficient=0.1, estimator="k2"), entropy=EntropyConfig(coefficient=0.2),
                          corrections=[])
    algorithm = Algorithm(cfg, 8)
    batch = algorithm.shape(scored([1.0, 0.0], [1, 1], [0, 0]))
    batch["advantages"] = algorithm.advantages(batch)
    (mini_batch,) = algorithm.mini_batches(batch)
    columns = {name: padded(mini_batch[name]) for name in ("response_mask", "old_log_probs", "advantages",
                                                            "loss_weights")}
    columns["ref_log_probs"] = torch.tensor([[-1.5], [-1.0]])
    log_probs = torch.tensor([[-1.0], [-1.0]], requires_grad=True)
    entropies = torch.tensor([[0.5], [1.5]])
    loss, metrics = algorithm.loss(log_probs, columns, entropies)
    a = 0.5 / math.sqrt(0.5)
    policy, kl, entropy = (-a + a) / 2, (0.5**2 / 2 + 0) / 2, (0.5 + 1.5) / 2
    assert float(loss.detach()) == pytest.approx(policy + 0.1 * kl - 0.2 * entropy, abs=1e-6)
    loss.backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-a / 2 + 0.1 * 0.5 / 2], [a / 2]]), atol=1e-5, rtol=0)
    assert algorithm.loss.needs_entropies and metrics["policy/entropy"].value() == pytest.approx(1.0)


def reasons(**options):
    return Algorithm(AlgorithmConfig(**options), 8, columns=["teacher_log_probs"])


@pytest.mark.parametrize(("options", "needed"), [
    ({}, False), ({"corrections": [Choice(name="geometric_mask"), Choice(name="sequence_tis")]}, False),
    ({"kl": KLConfig(coefficient=0.1)}, False), ({"kl": KLConfig(place="reward")}, False),
    ({"old_log_probs": "separate"}, True), ({"mini_batches": 2}, True), ({"epochs": 2}, True),
    ({"kl": KLConfig(coefficient=0.1, place="reward")}, True), ({"loss": Choice(name="clip_cov")}, True),
    ({"loss": Choice(name="decoupled_ppo")}, True), ({"advantage": Choice(name="reinforce_pp")}, True)])
def test_old_log_probs_get_a_pass_of_their_own_only_where_something_needs_them_first(options, needed):
    assert reasons(**options).needs_old_log_probs is needed


def test_old_log_probs_is_auto_or_separate():
    with pytest.raises(ConfigError, match="algorithm.old_log_probs: .*auto, separate"):
        AlgorithmConfig(old_log_probs="never").validate()


@pytest.mark.parametrize("corrections", [["token_tis"], ["geometric_mask", "sequence_tis"], []])
def test_first_pass_log_probs_give_what_a_separate_pass_gives(corrections):
    """Loss, gradient and every metric, bit for bit; the loss says which it did."""
    algorithm = Algorithm(AlgorithmConfig(corrections=[Choice(name=name) for name in corrections]), 8)
    batch = algorithm.shape(scored([1.0, 0.0, 0.5], [3, 2, 4], [0, 0, 0]))
    g = torch.Generator().manual_seed(0)
    current, noise = -torch.rand(3, 4, generator=g), 0.01 * torch.randn(3, 4, generator=g)
    for name, values in (("old_log_probs", current), ("rollout_log_probs", current + noise)):
        batch[name] = unpadded(values, like=batch["response_ids"])
    batch["advantages"] = algorithm.advantages(batch)
    results = {}
    for reused in (False, True):
        given = algorithm.correct(batch.exclude("old_log_probs") if reused else batch.copy())
        assert ("correction_weights" in given.keys()) is (bool(corrections) and not reused)
        (mini_batch,) = algorithm.mini_batches(given)
        columns = {name: padded(mini_batch[name]) for name in mini_batch.keys()
                   if name != "prompt_ids" and getattr(mini_batch.get(name), "is_nested", False)}
        log_probs = padded(batch["old_log_probs"]).requires_grad_()
        loss, metrics = algorithm.loss(log_probs, columns, None)
        loss.backward()
        assert metrics.pop("old_log_probs_reused").value() == reused
        results[reused] = loss.item(), log_probs.grad.tolist(), finalize(metrics)
    assert results[True] == results[False]
    assert results[True][2]["mismatch/kl_k3"] > 0 and results[True][2]["mismatch/max_gap"] > 0


def test_mismatch_is_measured_by_the_batch_where_there_are_several_updates():
    algorithm = Algorithm(AlgorithmConfig(epochs=2), 8)
    assert not algorithm.loss.diagnoses
    batch = algorithm.shape(scored([1.0, 0.0], [2, 1], [0, 0]))
    batch["weight_versions"], batch["advantages"] = batch["response_ids"], algorithm.advantages(batch)
    assert batch_metrics(batch)["mismatch/max_gap"] == 0
    assert not [name for name in batch_metrics(batch.exclude("old_log_probs")) if name.startswith("mismatch/")]


def test_remax_asks_for_the_greedy_response_and_others_do_not():
    def chosen(name):
        return load("grpo", GRPOConfig, [f"algorithm={name}", "policy.model.path=m", "data.path=d"]).algorithm

    assert Algorithm(chosen("remax"), 8).needs_greedy
    assert not any(Algorithm(chosen(name), 8).needs_greedy for name in ("grpo", "dapo", "rloo", "reinforce"))
    batch = scored([1.0], [2], [0])
    batch["greedy_rewards"] = torch.tensor([0.25])
    algorithm = Algorithm(chosen("remax"), 8)
    assert algorithm.advantages(algorithm.shape(batch)).values().tolist() == [0.75, 0.75]


def test_an_estimator_whose_column_nothing_writes_is_refused_before_anything_starts():
    cfg = AlgorithmConfig(advantage=Choice(name="distill"))
    with pytest.raises(ConfigError, match="distill needs teacher_log_probs, which this loop does not write"):
        Algorithm(cfg, 8)
    Algorithm(cfg, 8, columns=["teacher_log_probs"])
    cfg = AlgorithmConfig(advantage=Choice(name="gdpo"))
    Algorithm(cfg, 8)
    with pytest.raises(ConfigError, match="gdpo needs reward_components, which this loop does not write"):
        Algorithm(cfg, 8, absent=["reward_components"])


def test_dynamic_sampling_needs_groups():
    with pytest.raises(ConfigError, match="responses_per_prompt must be at least 2"):
        AlgorithmConfig(responses_per_prompt=1, dynamic_sampling=DynamicSamplingConfig(enabled=True)).validate()


def test_lengths_are_not_changed_by_shaping():
    algorithm = Algorithm(AlgorithmConfig(), 8)
    batch = scored([math.nan, 1.0], [3, 2], [0, 0])
    assert lengths(algorithm.shape(batch)["response_mask"]).tolist() == [3, 2]


def test_gae_gives_advantages_and_returns_and_unscored_rows_leave_both_losses():
    """gamma = 1, lam = 0.5, critic_lam = 1, a KL penalty in the reward, worked out by hand."""
    cfg = AlgorithmConfig(
        advantage=Choice(name="gae", options={"lam": 0.5, "critic_lam": 1.0, "whiten": False}),
        kl=KLConfig(coefficient=0.5, place="reward", estimator="k1"), responses_per_prompt=1)
    algorithm = Algorithm(cfg, 8, has_critic=True)
    batch = scored([1.0, math.nan], [2, 2], [0, 1])
    for name, column in (("ref_log_probs", [-1.0, -1.5, -1.0, -1.0]), ("values", [0.5, 0.25, 3.0, 4.0])):
        batch[name] = torch.nested.nested_tensor_from_jagged(torch.tensor(column), batch["response_ids"].offsets())
    batch = algorithm.shape(batch)
    batch["advantages"], batch["returns"] = algorithm.advantages_and_returns(batch)
    # rewards 0 and 1 - 0.5 * 0.5; deltas 0.25 - 0.5 and 0.75 - 0.25; advantages -0.25 + 0.5 * 0.5 and 0.5
    assert batch["advantages"].values().tolist() == [0.0, 0.5, 0.0, 0.0]
    assert batch["returns"].values().tolist() == [0.75, 0.75, 0.0, 0.0]
    (mini_batch,) = algorithm.mini_batches(batch)
    assert mini_batch["loss_weights"].values().tolist() == [0.5, 0.5, 0.0, 0.0]
    columns = {name: padded(mini_batch[name]) for name in ("response_mask", "values", "returns", "loss_weights")}
    values = columns["values"].clone().requires_grad_()
    loss, metrics = ValueLoss(0.2)(values, columns, None)
    loss.backward()
    assert values.grad.tolist() == [[-0.125, -0.25], [0.0, 0.0]]
    assert float(loss.detach()) == pytest.approx(0.25 * (0.25**2 + 0.5**2))
    assert metrics["return_mean"].value() == 0.75


def test_a_critic_and_its_estimator_come_together():
    with pytest.raises(ConfigError, match="'gae' needs a critic"):
        Algorithm(AlgorithmConfig(advantage=Choice(name="gae")), 8)
    with pytest.raises(ConfigError, match="'grpo' does not read the critic"):
        Algorithm(AlgorithmConfig(), 8, has_critic=True)
