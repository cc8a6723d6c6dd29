"""Reward shaping, dynamic sampling, entropy, staleness and the approximate proximal policy."""

import itertools
import math

import pytest
import torch

from hybridrl.algorithms import (
    AdaptiveEntropy,
    FixedEntropy,
    GroupAccumulator,
    approximate_old_log_probs,
    drop_rows,
    finalize,
    free_slots,
    informative_rows,
    loss_weights,
    overlong_penalty,
    place_outcome,
    reject_nonfinite,
    resumed_accepted,
    scale_rewards,
    stale_rows,
    token_entropy,
    unscorable,
)
from hybridrl.errors import BatchError, ConfigError


def test_scale_then_clip():
    got = scale_rewards(torch.tensor([1.0, -4.0, torch.nan]), scale=2.0, bias=1.0, clip=5.0)
    assert got[:2].tolist() == [3, -5]
    assert got[2].isnan()
    with pytest.raises(ConfigError, match="clip"):
        scale_rewards(torch.zeros(1), clip=0.0)


def test_overlong_without_buffer():
    got = overlong_penalty(torch.tensor([0, 10, 11]), max_response_length=10, buffer=0, factor=0.5)
    assert got.tolist() == [0, 0, -0.5]
    with pytest.raises(ConfigError, match="buffer"):
        overlong_penalty(torch.tensor([1]), max_response_length=10, buffer=11)


def test_dropped_rows_leave_the_denominators():
    mask = torch.ones(2, 3, dtype=torch.bool)
    rewards = torch.tensor([torch.nan, 1.0])
    kept = drop_rows(mask, unscorable(rewards, mask))
    assert loss_weights("token-mean", {"mask": kept}).sum(1).tolist() == [0, 1]
    with pytest.raises(BatchError, match="'rows'"):
        drop_rows(mask, torch.zeros(3, dtype=torch.bool))


def test_outcome_sits_on_the_last_trainable_token():
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]]).bool()
    assert place_outcome(torch.tensor([2.0, 3.0]), mask).tolist() == [[0, 0, 2, 0], [0] * 4]


def test_reject_nonfinite():
    mask = torch.tensor([[True, True], [True, False]])
    kept, count = reject_nonfinite(mask, torch.tensor([[0.0, -torch.inf], [0.0, torch.nan]]))
    assert kept.tolist() == [[False, False], [True, False]]
    assert count == 1


# ---- dynamic sampling


def test_informative_groups():
    outcomes = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.3, torch.nan, 0.3, 0.5, 0.2])
    ids = torch.tensor([7, 7, 2, 2, 5, 5, 9, 9, 9])
    assert informative_rows(outcomes, ids).tolist() == [True, True, False, False, False, False, True, True, True]


def fill(acc, rounds):
    """Rounds of (name, outcomes of groups of two in submission order)."""
    for name, outcomes in rounds:
        if not acc.wants_more():
            break
        acc.add(name, torch.tensor(outcomes).flatten().float(), torch.arange(len(outcomes)).repeat_interleave(2))


def test_accepted_groups_are_kept_over_rounds():
    acc = GroupAccumulator(target=3)
    fill(acc, [("a", [[1, 1], [0, 1]]), ("b", [[0, 0], [1, 1]]), ("c", [[1, 0], [1, 0], [0, 1]]), ("d", [[0, 1]])])
    assert acc.num_rounds == 3
    metrics = finalize(acc.metrics())
    assert metrics["sampling_pass_rate"] == pytest.approx(4 / 7)
    assert metrics["sampling_all_correct"] == pytest.approx(2 / 7)
    assert metrics["sampling_all_wrong"] == pytest.approx(1 / 7)
    taken = [(name, rows.tolist()) for name, rows in acc.take()]
    assert taken == [("a", [2, 3]), ("c", [0, 1]), ("c", [2, 3])]  # submission order, the surplus is dropped
    assert acc.num_kept == 0


def test_surplus_may_be_carried_over():
    acc = GroupAccumulator(target=1, carry_over=True)
    fill(acc, [("a", [[1, 0], [0, 1]])])
    assert len(acc.take()) == 1
    assert acc.num_kept == 1
    assert not acc.wants_more()


def test_interleaved_groups_come_in_order_of_their_first_row():
    acc = GroupAccumulator(target=2)
    acc.add("x", torch.tensor([0.0, 0.0, 1.0, 1.0, 0.5]), torch.tensor([9, 3, 9, 3, 9]))
    assert [rows.tolist() for _, rows in acc.take()] == [[0, 2, 4], [1, 3]]


def test_exhausted_sampling():
    acc = GroupAccumulator(target=2, max_rounds=2)
    fill(acc, [("a", [[1, 1]]), ("b", [[0, 1]]), ("c", [[0, 1]])])
    assert acc.exhausted
    assert acc.num_rounds == 2
    assert acc.missing() == 1
    with pytest.warns(UserWarning, match="1 of 2 groups"):
        assert len(acc.take()) == 1
    acc.stop()
    assert acc.exhausted
    with pytest.raises(BatchError, match="accepted none"):
        acc.take()
    with pytest.raises(ConfigError, match="target"):
        GroupAccumulator(target=0)


# ---- entropy


def test_entropy_of_logits():
    logits = torch.tensor([[0.0, 0.0, -torch.inf], [1.0, 2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    got = token_entropy(logits, temperature=2.0)
    p = torch.tensor([0.5, 1.0, 1.5]).double().softmax(0)
    torch.testing.assert_close(got.detach(), torch.stack([torch.tensor(2.0).double().log(), -(p * p.log()).sum()]))
    (gradient,) = torch.autograd.grad(got.sum(), logits)
    assert gradient.isfinite().all()
    z = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: token_entropy(x, temperature=0.7), z)
    assert token_entropy(z.detach().bfloat16()).dtype == torch.float32
    with pytest.raises(ConfigError, match="temperature"):
        token_entropy(logits, temperature=0.0)


def test_entropy_coefficients():
    assert FixedEntropy(0.1).update(3.0) == 0.1
    adaptive = AdaptiveEntropy(0.0, target=0.2, step=0.005, maximum=0.008)
    assert adaptive.update(0.1) == 0.005
    assert adaptive.update(0.1) == 0.008  # clipped
    assert adaptive.coefficient(0.1) == 0.008
    assert adaptive.coefficient(0.3) == 0.0  # the bonus rests above the target
    assert adaptive.update(0.3) == pytest.approx(0.003)
    assert adaptive.update(0.2) == pytest.approx(0.003)
    copy = AdaptiveEntropy(target=0.2, step=0.005)
    copy.load_state_dict(adaptive.state_dict())
    assert copy.entropy_coef == adaptive.entropy_coef
    with pytest.raises(ConfigError, match="step"):
        AdaptiveEntropy(2.0, target=0.2, step=0.005)


# ---- staleness


def test_admission_never_exceeds_the_bound():
    """Filling every free slot, the last admitted trajectory is used at most `max_staleness` versions later."""
    for per_step, bound in itertools.product((1, 4, 7), (0, 1, 3)):
        accepted = 0
        for version in range(5):
            common = {"batch_trajectories": per_step, "max_staleness": bound, "max_concurrent": 10**6}
            slots = free_slots(version=version, accepted=accepted, running=0, **common)
            accepted += slots
            assert math.floor((accepted - 1) / per_step) == version + bound
            assert free_slots(version=version, accepted=accepted, running=0, **common) == 0
    assert resumed_accepted(3, 32) == 96


def test_stale_rows():
    versions = torch.tensor([[5, 5, 0], [2, 5, 5]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert stale_rows(versions, mask, current_version=5, max_staleness=2).tolist() == [False, True]
    with pytest.raises(BatchError, match="versions"):
        stale_rows(versions.float(), mask, current_version=5, max_staleness=2)


def test_approximate_proximal_policy():
    now, then = torch.tensor([[-1.0, -1.0, -1.0, 0.0]], requires_grad=True), torch.tensor([[-3.0, -3.0, -3.0, 0.0]])
    versions, mask = torch.tensor([[5, 4, 1, 9]]), torch.tensor([[True, True, True, False]])
    got = approximate_old_log_probs(now, then, mask, versions, current_version=5)
    assert got.tolist() == [[-3, -3, -3 + 0.75 * 2, 0]]
    assert not got.requires_grad
