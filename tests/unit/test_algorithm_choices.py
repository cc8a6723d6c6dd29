"""Every choice of an algorithm's configuration on batches: what it does to them, by hand, and what it remembers."""

import json
import math

import pytest
import torch

from hybridrl.algorithms.algorithm import Algorithm
from hybridrl.algorithms.columns import padded_columns
from hybridrl.algorithms.partials import total
from hybridrl.batch import make_batch, padded, rows_of, select
from hybridrl.config import (
    AlgorithmConfig,
    Choice,
    EntropyConfig,
    GRPOConfig,
    KLConfig,
    OverlongConfig,
    ShapingConfig,
)
from hybridrl.config_loading import groups_of, load
from hybridrl.errors import ConfigError


def batch_of(sizes=(1, 1), rewards=(1.0, 0.0), groups=None, old=-1.0, **columns):
    """A batch after log-probs; columns given as one number are that for every token."""
    def tokens(value):
        return [[float(value)] * size for size in sizes] if isinstance(value, int | float) else value

    ragged = {"old_log_probs": tokens(old), "rollout_log_probs": tokens(columns.pop("rollout", -1.0))}
    ragged |= {name: tokens(columns.pop(name)) for name in ("ref_log_probs", "entropies", "token_rewards",
                                                            "sum_squared_probs") if name in columns}
    return make_batch(
        rewards=list(rewards), group_ids=list(groups or [0] * len(sizes)), finish_reason=["stop"] * len(sizes),
        prompt_ids=[[1]] * len(sizes), response_ids=[[7] * size for size in sizes],
        response_mask=[[True] * size for size in sizes], weight_versions=[[3] * size for size in sizes],
        **ragged, **columns)


def run(algorithm, batch):
    """One step without an engine: the mini-batches as the loop would hand them to updates."""
    batch = algorithm.shape(batch)
    batch["advantages"] = algorithm.advantages(batch)
    batch = algorithm.correct(batch)
    return batch, [(part, algorithm.loss) for part in algorithm.mini_batches(batch)]


def restored(algorithm):
    """A new one with the state that a checkpoint file holds."""
    other = Algorithm(algorithm.cfg, algorithm.max_response_tokens)
    other.load_state_dict(json.loads(json.dumps(algorithm.state_dict())))
    return other


# ---- what moves


def test_the_kl_coefficient_is_steered_after_the_batch_and_comes_back_from_a_checkpoint():
    """Batch KL 1.0 against a target of 6 with n = 256 and horizon 10000: 0.2 becomes 0.198976."""
    cfg = AlgorithmConfig(kl=KLConfig(coefficient=0.2, target=6.0), responses_per_prompt=256)
    algorithm = Algorithm(cfg, 8)
    batch = batch_of([1] * 256, [float(i % 2) for i in range(256)], ref_log_probs=-2.0)
    batch, [(_, loss)] = run(algorithm, batch)
    assert loss.kl_coefficient == 0.2, "the batch that is measured is trained with the coefficient from before it"
    assert algorithm.describe(batch)["policy/batch_kl"] == pytest.approx(1.0)
    assert algorithm.describe(batch)["policy/kl_coefficient"] == 0.2
    for later in (algorithm, restored(algorithm)):
        _, [(_, loss)] = run(later, batch_of(ref_log_probs=-2.0))
        assert loss.kl_coefficient == pytest.approx(0.198976)


def test_the_steered_kl_coefficient_acts_in_the_reward():
    cfg = AlgorithmConfig(kl=KLConfig(coefficient=0.5, place="reward", estimator="k1", target=1.0, horizon=10.0),
                          advantage=Choice(name="reinforce"))
    algorithm = Algorithm(cfg, 8)
    for coefficient in (0.5, 0.5 * (1 + 0.2 * 2 / 10)):  # KL 3 is far above the target: the error is clipped at 0.2
        batch = algorithm.shape(batch_of(ref_log_probs=-4.0))
        assert batch["token_rewards"].values().tolist() == pytest.approx([1 - 3 * coefficient, -3 * coefficient])


def test_the_entropy_coefficient_moves_with_every_mini_batch():
    """Target 1: below it the bonus acts and grows, above it there is none and it shrinks."""
    cfg = AlgorithmConfig(entropy=EntropyConfig(coefficient=0.002, target=1.0, step=0.001, maximum=0.004), epochs=4)
    algorithm = Algorithm(cfg, 8)
    assert algorithm.needed_columns == ["entropies"] and algorithm.needs_old_log_probs
    _, parts = run(algorithm, batch_of([1, 3], entropies=[[0.1], [0.5, 0.5, 0.5]]))  # mean 0.4
    assert [loss.entropy_coefficient for _, loss in parts] == pytest.approx([0.002, 0.003, 0.004, 0.004])
    assert all(loss.needs_entropies for _, loss in parts)
    for later in (algorithm, restored(algorithm)):
        _, parts = run(later, batch_of(entropies=2.0))
        assert [loss.entropy_coefficient for _, loss in parts] == [0.0] * 4
        assert later.state_dict()["entropy"]["entropy_coef"] == pytest.approx(0.0)


def test_a_moving_baseline_is_that_of_earlier_batches():
    options = {"baseline": "moving", "gamma": 0.5}
    cfg = AlgorithmConfig(advantage=Choice(name="reinforce", options=options), baseline_decay=0.75)
    algorithm = Algorithm(cfg, 8)
    batch, _ = run(algorithm, batch_of([2, 1], [4.0, 1.0]))
    assert batch["advantages"].values().tolist() == [2.0, 4.0, 1.0], "nothing to compare with yet"
    for later in (algorithm, restored(algorithm)):  # the episodes were worth 0.5 * 4 and 1
        batch, _ = run(later, batch_of([1, 1], [0.0, 3.5]))
        assert batch["advantages"].values().tolist() == [-1.5, 2.0]
        assert later.describe(batch)["advantage/moving_baseline"] == 1.5
        batch, _ = run(later, batch_of())
        assert later.describe(batch)["advantage/moving_baseline"] == 0.75 * 1.5 + 0.25 * 1.75


def test_each_agent_has_its_own_moving_baseline():
    algorithm = Algorithm(AlgorithmConfig(advantage=Choice(name="reinforce", options={"baseline": "moving"})), 8)
    agents = torch.tensor([5, 9, 9])
    run(algorithm, batch_of([1, 1, 1], [1.0, -2.0, -4.0], agent_ids=agents))
    batch, _ = run(restored(algorithm), batch_of([1, 1, 1], [1.0, 0.0, -3.0], agent_ids=agents))
    assert batch["advantages"].values().tolist() == [0.0, 3.0, 0.0]


def test_what_is_fixed_has_no_state():
    assert Algorithm(AlgorithmConfig(kl=KLConfig(coefficient=0.1)), 8).state_dict() == {}
    changed = Algorithm(AlgorithmConfig(kl=KLConfig(coefficient=0.3)), 8)
    changed.load_state_dict({"kl": {"kl_coef": 0.1}})
    assert changed.steering.kl.kl_coef == 0.3, "an option that was changed on resuming counts"


# ---- rewards


def test_shaping_comes_before_the_overlong_penalty_and_keeps_the_outcome():
    cfg = AlgorithmConfig(shaping=ShapingConfig(scale=2.0, bias=-0.5, clip=1.0),
                          overlong=OverlongConfig(penalty=1.0, buffer_frac=0.5))
    batch = Algorithm(cfg, 4).shape(batch_of([1, 4], [0.4, 3.0]))
    assert batch["rewards"].tolist() == pytest.approx([0.3, 0.0])  # 0.8 - 0.5; 5.5, cut to 1, minus the penalty
    assert batch["outcomes"].tolist() == pytest.approx([0.4, 3.0])


def test_rewards_by_token_keep_their_places_and_the_penalty_falls_on_the_end():
    """Two turns with rewards of their own; being overlong is told to the last token of the row."""
    cfg = AlgorithmConfig(overlong=OverlongConfig(penalty=1.0, buffer_frac=0.5),
                          advantage=Choice(name="turn_level", options={"baseline": "none", "gamma": 0.5}))
    algorithm = Algorithm(cfg, 4)
    batch = batch_of([4], [3.0], token_rewards=[[1.0, 0.0, 0.0, 2.0]])
    batch["response_mask"] = torch.nested.nested_tensor_from_jagged(
        torch.tensor([True, False, False, True]), batch["response_ids"].offsets())
    batch = algorithm.shape(batch)
    # 2 tokens were sampled, the limit is 4 and the buffer 2: no penalty
    assert batch["response_lengths"].tolist() == [2] and batch["token_rewards"].values().tolist() == [1, 0, 0, 2]
    assert algorithm.advantages(batch).values().tolist() == [2.0, 0.0, 0.0, 2.0]
    batch = algorithm.shape(batch_of([4], [3.0], token_rewards=[[1.0, 0.0, 0.0, 2.0]]))
    assert batch["token_rewards"].values().tolist() == [1.0, 0.0, 0.0, 1.0] and batch["rewards"].tolist() == [2.0]


def test_what_shaping_adds_to_a_trajectory_of_several_rows_is_added_once():
    """Rows 0 and 1 are one trajectory, worth 3; 5 tokens of the 4 allowed cost 1."""
    cfg = AlgorithmConfig(shaping=ShapingConfig(scale=2.0), overlong=OverlongConfig(penalty=1.0))
    batch = batch_of([3, 2, 1], [3.0, 3.0, 0.5], trajectory_ids=torch.tensor([8, 8, 9]),
                     token_rewards=[[1.0, 0.0, 0.0], [0.0, 2.0], [0.5]])
    batch = Algorithm(cfg, 4).shape(batch)
    assert batch["rewards"].tolist() == [5.0, 5.0, 1.0]
    assert batch["token_rewards"].values().tolist() == [1.0, 0.0, 0.0, 0.0, 4.0, 1.0]


def test_a_row_with_a_log_prob_that_is_no_number_leaves_the_loss_and_is_counted():
    algorithm = Algorithm(AlgorithmConfig(), 8)
    batch, [(part, _)] = run(algorithm, batch_of([1, 2, 1], [1.0, 0.0, 0.0], rollout=[[-1.0], [-1.0, -math.inf], [-1]]))
    assert part["loss_weights"].values().tolist() == [0.5, 0.0, 0.0, 0.5]
    described = algorithm.describe(batch)
    assert described["response/nonfinite_rows"] == 1
    assert described["response/length_max"] == 2 and described["mismatch/max_gap"] == 0
    mean = 1 / 3  # it still counts in its group
    assert float(batch["advantages"].values()[0]) == pytest.approx((1 - mean) / math.sqrt(1 / 3), abs=1e-5)


def test_gdpo_takes_the_weights_of_the_rewards_unless_it_is_given_its_own():
    components = torch.tensor([[1.0, 0.0], [0.0, 3.0], [0.0, 0.0], [1.0, 0.0]])
    batch = batch_of([1] * 4, [0.0] * 4, [0, 0, 1, 1], reward_components=components)
    half = math.sqrt(0.5)  # a pair's deviation over its distance from the mean is sqrt(2)
    for own, (first, second) in ((None, (2.0, 0.5)), ([1.0, 1.0], (1.0, 1.0))):
        options = {} if own is None else {"weights": own}
        algorithm = Algorithm(AlgorithmConfig(advantage=Choice(name="gdpo", options=options)), 8,
                              reward_weights=[2.0, 0.5])
        scalars = torch.tensor([first * half - second * half, second * half - first * half,
                                -first * half, first * half])
        expected = (scalars - scalars.mean()) / scalars.std()
        torch.testing.assert_close(algorithm.advantages(algorithm.shape(batch)).values(), expected, atol=1e-4, rtol=0)
    wrong = AlgorithmConfig(advantage=Choice(name="gdpo", options={"weights": [1.0]}))
    with pytest.raises(ConfigError, match=r"one number for each part of the reward \(2\), got \[1.0\]"):
        Algorithm(wrong, 8, reward_weights=[2.0, 0.5])


# ---- weights and masks


def weights_of(algorithm, batch):
    _, parts = run(algorithm, batch)
    return [part["correction_weights"].values().tolist() for part, _ in parts]


def test_keep_masks_multiply_the_weights_of_the_corrections():
    cfg = AlgorithmConfig(keep_masks=[Choice(name="high_entropy", options={"frac": 0.5}),
                                      Choice(name="second_moment", options={"threshold": 0.1})])
    algorithm = Algorithm(cfg, 8)
    assert algorithm.needed_columns == ["entropies"]
    batch = batch_of([2, 2], old=[[-1.0, -1.0], [-1.0, -1.0]], rollout=[[-1.0, -1.2], [-1.0, -2.0]],
                     entropies=[[0.1, 2.0], [1.0, 3.0]])
    # the two most uncertain tokens are the second ones; the fourth moved by 1, whose square is above the threshold
    assert weights_of(algorithm, batch) == [pytest.approx([0.0, math.exp(0.2), 0.0, 0.0])]


def test_keep_masks_work_without_corrections_and_with_the_weight_of_a_loss():
    masks = [Choice(name="high_entropy", options={"frac": 0.5})]
    batch = batch_of([2, 2], rollout=-3.0, entropies=[[0.1, 2.0], [1.0, 3.0]])
    for loss, weight in (("ppo_clip", 1.0), ("aipo", 1.0), ("decoupled_ppo", 5.0)):
        cfg = AlgorithmConfig(loss=Choice(name=loss), corrections=[], keep_masks=masks)
        assert weights_of(Algorithm(cfg, 8), batch) == [[0.0, weight, 0.0, weight]], loss


def test_a_mask_of_the_moment_is_applied_in_the_update():
    cfg = AlgorithmConfig(keep_masks=[Choice(name="off_policy_sequence", options={"delta": 0.5})], corrections=[])
    algorithm = Algorithm(cfg, 8)
    assert not algorithm.needs_old_log_probs, "it is local to a row"
    _, [(part, loss)] = run(algorithm, batch_of([1, 2], [1.0, 0.0]))
    current = torch.tensor([[-3.0, 0.0], [-3.0, -1.0]], requires_grad=True)
    columns = {**padded_columns(part), "response_mask": padded(part["response_mask"])}
    value, metrics = loss(current, columns, None)
    value.backward()
    assert current.grad[0, 0] < 0 and current.grad[1].tolist() == [0.0, 0.0], "the bad row drifted by 1"
    assert metrics["policy/kept_frac"].value() == pytest.approx(1 / 3)


def test_decoupled_ppo_without_a_correction_has_its_own_weight_in_the_diagnostics_too():
    algorithm = Algorithm(AlgorithmConfig(loss=Choice(name="decoupled_ppo"), corrections=[]), 8)
    batch, _ = run(algorithm, batch_of([1, 1], rollout=[[-1.0], [-4.0]]))
    assert batch["correction_weights"].values().tolist() == [1.0, 5.0]
    described = algorithm.describe(batch)
    assert described["mismatch/ess"] == pytest.approx(36 / (2 * 26))
    assert described["mismatch/frac_above_hi"] == 0.5


def test_weights_can_be_divided_by_their_mean():
    cfg = AlgorithmConfig(corrections=[Choice(name="token_tis")], self_normalise=True)
    batch = batch_of([1, 1], rollout=[[-1.0], [-1.0 - math.log(1.5)]])
    assert Algorithm(cfg, 8).needs_old_log_probs, "the mean is of the whole batch"
    assert weights_of(Algorithm(cfg, 8), batch) == [pytest.approx([0.8, 1.2])]


def test_ratios_can_be_measured_from_the_policy_that_sampled():
    cfg = AlgorithmConfig(anchor="rollout", corrections=[])
    _, [(part, loss)] = run(Algorithm(cfg, 8), batch_of([1, 1], rollout=-1.5))
    current = torch.tensor([[-1.0], [-1.0]], requires_grad=True)
    value, metrics = loss(current, {**padded_columns(part), "response_mask": padded(part["response_mask"])}, None)
    value.backward()
    rho, a = math.exp(0.5), 0.5 / math.sqrt(0.5)
    assert current.grad[:, 0].tolist() == pytest.approx([0.0, a * rho / 2], abs=1e-5), "the good one is clipped"
    assert metrics["policy/ratio_mean"].value() == pytest.approx(rho)


def test_sequences_can_be_trajectories():
    """Rows 0 and 1 are one trajectory of 4 tokens, row 2 another of 1; statistics count each once."""
    cfg = AlgorithmConfig(aggregation="seq-mean-token-mean", aggregation_options={"per_trajectory": True})
    algorithm = Algorithm(cfg, 8)
    batch = batch_of([3, 1, 1], [1.0, 1.0, 0.0], trajectory_ids=torch.tensor([4, 4, 7]))
    batch, [(part, _)] = run(algorithm, batch)
    assert part["loss_weights"].values().tolist() == [0.125] * 4 + [0.5]
    a = 0.5 / math.sqrt(0.5)
    torch.testing.assert_close(batch["advantages"].values(), torch.tensor([a] * 4 + [-a]), atol=1e-5, rtol=0)
    described = algorithm.describe(batch)
    assert described["reward/mean"] == 0.5 and described["group/pass@1"] == 0.5 and described["group/pass@2"] == 1.0


def test_the_optimal_token_baseline_asks_for_its_column():
    algorithm = Algorithm(AlgorithmConfig(advantage=Choice(name="optimal_token_baseline")), 8)
    assert algorithm.needed_columns == ["sum_squared_probs"] and algorithm.needs_old_log_probs
    batch, _ = run(algorithm, batch_of([1, 1], sum_squared_probs=[[0.5], [0.25]]))
    # weights 1 - 2 / e + 0.5 and 0.25 of the returns 1 and 0
    up, down = 1.5 - 2 / math.e, 1.25 - 2 / math.e
    mean = up / (up + down)
    assert batch["advantages"].values().tolist() == pytest.approx([1 - mean, -mean])


def test_reinforce_pp_asks_for_the_reference_of_its_own_penalty():
    own = AlgorithmConfig(advantage=Choice(name="reinforce_pp", options={"kl_coef": 0.1}))
    assert Algorithm(own, 8).needs_reference
    assert not Algorithm(AlgorithmConfig(advantage=Choice(name="reinforce_pp")), 8).needs_reference


# ---- metrics


def test_metrics_of_a_batch():
    algorithm = Algorithm(AlgorithmConfig(responses_per_prompt=4), 3)
    batch, _ = run(algorithm, batch_of([1, 3, 2, 0], [1.0, 0.0, 1.0, 0.0]))
    described = algorithm.describe(batch, version=5)
    assert (described["staleness/mean"], described["staleness/max"]) == (2, 2)
    assert (described["response/at_limit_ratio"], described["response/truncated_ratio"]) == (0.25, 0.0)
    assert (described["response/aborted_ratio"], described["response/length_mean"]) == (0.25, 1.5)
    assert described["group/pass@1"] == 0.5 and described["group/pass@2"] == pytest.approx(5 / 6)
    assert described["group/pass@4"] == 1.0 and "group/pass@8" not in described
    assert not any(name.startswith("staleness/") for name in algorithm.describe(batch))


# ---- every ready-made choice, cut anywhere


def random_batch(seed=0, groups=3, size=4):
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 7, (groups * size,), generator=g).tolist()

    def tokens(low, high):
        return [(low + (high - low) * torch.rand(n, generator=g)).tolist() for n in sizes]

    old = tokens(-3.0, -0.1)
    rewards = [float(i % size < 1 + i // size) for i in range(len(sizes))]
    batch = batch_of(sizes, rewards, [i // size for i in range(len(sizes))], old=old,
                     rollout=[[x + 0.05 for x in row] for row in old], entropies=tokens(0.0, 2.0),
                     ref_log_probs=[[x - 0.2 for x in row] for row in old],
                     sum_squared_probs=tokens(0.1, 0.5),
                     reward_components=torch.rand(len(sizes), 2, generator=g), greedy_rewards=[0.3] * len(sizes))
    batch["moved"] = torch.nested.nested_tensor_from_jagged(
        torch.cat([torch.tensor(row) for row in tokens(-0.5, 0.5)]), batch["response_ids"].offsets())
    return batch


def losses(part, loss, pieces):
    """Summed loss, gradient by row, and merged metrics of the update over those pieces."""
    value, gradients, metrics = 0.0, {}, []
    for rows in pieces:
        piece = select(part, rows)
        columns = padded_columns(piece)
        start = columns["old_log_probs"] if "old_log_probs" in columns else columns["rollout_log_probs"] - 0.05
        current = (start + columns["moved"]).requires_grad_()
        inputs = {**columns, "response_mask": columns.pop("mask")}
        partial, measured = loss(current, inputs, columns["entropies"] if loss.needs_entropies else None)
        (gradient,) = torch.autograd.grad(partial, current, allow_unused=True)
        value += float(partial.detach())
        metrics.append(measured)
        for row, slope in zip(rows, gradient, strict=True):
            gradients[row] = slope[:len(rows_of(part["response_ids"])[row])]
    return value, torch.cat([gradients[i] for i in range(part.batch_size[0])]), total(metrics)


@pytest.mark.parametrize("extra", [
    (), ("algorithm.kl.coefficient=0.1", "algorithm.entropy.coefficient=0.1", "algorithm.aggregation=prompt-mean",
         "algorithm.mini_batches=2")], ids=["as it is", "with penalties"])
@pytest.mark.parametrize("name", groups_of("grpo")["algorithm"])
def test_a_mini_batch_may_be_cut_anywhere(name, extra):
    cfg = load("grpo", GRPOConfig, [f"algorithm={name}", "policy.model.path=m", "data.path=d", *extra])
    algorithm = Algorithm(cfg.algorithm, 8, reward_weights=[1.0, 0.5])
    batch = random_batch()
    if not algorithm.needs_old_log_probs:
        del batch["old_log_probs"]
    _, parts = run(algorithm, batch)
    generator = torch.Generator().manual_seed(1)
    for part, loss in parts:
        rows = part.batch_size[0]
        whole = losses(part, loss, [list(range(rows))])
        order = torch.randperm(rows, generator=generator).tolist()
        for cuts in ([0, 1, 1, 2, 5, rows], list(range(rows + 1))):
            pieces = [order[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
            value, gradient, metrics = losses(part, loss, pieces)
            assert value == pytest.approx(whole[0], rel=1e-5, abs=1e-6)
            torch.testing.assert_close(gradient, whole[1], rtol=1e-5, atol=1e-7)
            assert metrics == pytest.approx(whole[2], rel=1e-5, abs=1e-6)
        assert whole[1].abs().max() > 0
