"""The numbers worked in the specification, rounded there to six digits."""

import math

import pytest
import torch

from hybridrl.algorithms import (
    AdaptiveKL,
    aggregate,
    compute_advantages,
    correct,
    finalize,
    free_slots,
    loss_weights,
    mismatch_metrics,
    overlong_penalty,
    policy_loss,
    token_kl,
)

LENGTHS = [1, 2, 3, 4, 2, 4]
MASK = torch.arange(4) < torch.tensor(LENGTHS)[:, None]
GROUPS = torch.tensor([0, 0, 0, 0, 1, 1])


def close(x, y):
    torch.testing.assert_close(torch.as_tensor(x).double(), torch.tensor(y).double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "options", "rewards", "expected"),
    [
        ("grpo", None, None, [0.866024, -0.866024, -0.866024, 0.866024, 0.707103, -0.707103]),
        ("grpo", {"std": "batch"}, None, [1.078325, -1.078325, -1.078325, 1.078325, 0.323498, -0.323498]),
        ("grpo", {"std": "none"}, None, [0.5, -0.5, -0.5, 0.5, 0.15, -0.15]),
        ("dr_grpo", None, None, [0.5, -0.5, -0.5, 0.5, 0.15, -0.15]),
        ("rloo", None, None, [0.666667, -0.666667, -0.666667, 0.666667, 0.3, -0.3]),
        ("opo", None, None, [0.5, -0.5, -0.5, 0.5, 0.2, -0.1]),
        ("reinforce_pp_baseline", None, None, [1.239018, -1.149450, -1.149450, 1.239018, 0.403054, -0.313486]),
        ("pass_at_k_marginal", None, None, [0, 0, 0, 0, 0.3, 0]),
        ("gpg", None, [1, 0, 0, 1, 0.5, 0.5], [0.75, -0.75, -0.75, 0.75, 0, 0]),
    ],
)
def test_row_scalars(name, options, rewards, expected):
    r = torch.tensor(rewards or [1, 0, 0, 1, 0.5, 0.2])
    result = compute_advantages(name, {"rewards": r, "group_ids": GROUPS, "mask": MASK}, options).advantages
    close(result[:, 0], expected)
    assert result.dtype == torch.float32
    assert torch.equal(result != 0, MASK & (result[:, :1] != 0))


def test_analytic_pass_at_2():
    columns = {"rewards": torch.tensor([0.0, 1, 0, 0]), "group_ids": torch.zeros(4).long(), "mask": MASK[:4]}
    close(compute_advantages("pass_at_k", columns, {"k": 2}).advantages[:, 0], [-1 / 3, 1, -1 / 3, -1 / 3])


def test_gae_skips_the_environment_token():
    columns = {
        "mask": torch.tensor([[1, 1, 0, 1, 1]]).bool(),
        "token_rewards": torch.tensor([[0.0, 0, 0, 0, 1]]),
        "values": torch.tensor([[0.5, 0.4, 9, 0.3, 0.2]]),
    }
    result = compute_advantages("gae", columns, {"gamma": 0.9, "lam": 0.8, "whiten": False})
    close(result.advantages, [[0.00279, 0.19832, 0, 0.456, 0.8]])
    close(result.returns, [[0.50279, 0.59832, 0, 0.756, 1]])


@pytest.mark.parametrize(
    ("mode", "options", "expected"),
    [
        ("token-mean", None, 3.0),
        ("seq-mean-token-sum", None, 7.5),
        ("seq-mean-token-mean", None, 3.75),
        ("seq-mean-token-sum-norm", {"max_response_length": 8}, 0.9375),
    ],
)
def test_aggregation(mode, options, expected):
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    losses = torch.tensor([[1.0, 2, 3, 4], [5, 0, 0, 0], [0, 0, 0, 0]])
    close(aggregate(losses, loss_weights(mode, {"mask": mask}, options), mask), expected)


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [(1, 1.5, -1.28, 0), (1, 0.5, -0.5, -0.5), (-1, 1.5, 1.5, 1.5), (-1, 0.5, 0.8, 0), (-1, 5, 3, 0)],
)
def test_clipped_surrogate(advantage, ratio, loss, slope):
    lp = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    columns = one_row(lp, torch.zeros(1, 1).double(), float(advantage))
    result = policy_loss("ppo_clip", columns, {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}).loss
    result.sum().backward()
    close(result.detach(), [[loss]])
    close(lp.grad, [[slope]])


def one_row(log_probs, old, advantage=1.0):
    mask = torch.ones(log_probs.shape, dtype=torch.bool)
    return {
        "log_probs": log_probs,
        "old_log_probs": old,
        "advantages": torch.full(log_probs.shape, advantage, dtype=log_probs.dtype),
        "mask": mask,
    }


NOW = torch.tensor([[0.5, 0.2]], dtype=torch.float64).log()
OLD = torch.tensor([[0.4, 0.4]], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("name", "loss", "gradient"),
    [
        ("gspo", -0.790569, [-0.395285, -0.395285]),
        ("cispo", None, [-0.625, -0.25]),
        ("sapo", -1.879434, [-0.615335, -0.235004]),
    ],
)
def test_one_row_losses(name, loss, gradient):
    lp = NOW.clone().requires_grad_()
    columns = one_row(lp, OLD)
    weights = loss_weights("seq-mean-token-mean", columns)
    total = aggregate(policy_loss(name, columns).loss, weights, columns["mask"])
    total.backward()
    close(lp.grad, [gradient])
    if loss is not None:
        close(total.detach(), loss)


@pytest.mark.parametrize(
    ("schemes", "weights", "keep"),
    [
        ({"token_tis": {"hi": 1.1}}, [1.1, 0.5], [True, True]),
        ({"icepop": {"lo": 0.6, "hi": 1.5}}, [1.25, 0], [True, False]),
        ({"sequence_tis": {"hi": 2}}, [0.625, 0.625], [True, True]),
        ({"geometric_mask": {"lo": 0.9, "hi": 1.1}}, [0, 0], [False, False]),
    ],
)
def test_corrections(schemes, weights, keep):
    columns = {"old_log_probs": NOW, "rollout_log_probs": OLD, "mask": torch.ones(1, 2, dtype=torch.bool)}
    result = correct(schemes, columns)
    close(result.weights, [weights])
    assert result.keep.tolist() == [keep]


def test_mismatch_metrics():
    got = finalize(mismatch_metrics(NOW, OLD, torch.ones(1, 2, dtype=torch.bool)))
    expected = {
        "kl_k1": 0.235002,
        "kl_k3": 0.110002,
        "ppl_ratio": 1.264911,
        "chi2_token": -0.09375,
        "chi2_seq": -0.609375,
        "ess": 0.844828,
    }
    assert {k: got[k] for k in expected} == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "value", "factor"),
    [("k1", 0.223144, 1), ("k2", 0.024897, 0.223144), ("k3", 0.023144, 0.2), ("k3+", 0.023144, 0.223144)],
)
def test_kl_estimators(name, value, factor):
    lp = torch.tensor([[math.log(0.5)]], requires_grad=True)
    kl = token_kl(name, lp, torch.tensor([[math.log(0.4)]]), torch.ones(1, 1, dtype=torch.bool))
    kl.sum().backward()
    close(kl.detach(), [[value]])
    close(lp.grad, [[factor]])


def test_staleness_gate():
    slots = free_slots(version=3, batch_trajectories=32, max_staleness=2, accepted=96, running=20, max_concurrent=64)
    assert slots == 44


def test_adaptive_kl():
    controller = AdaptiveKL(0.2, target=6.0, horizon=10_000)
    assert controller.update(1.0, 256) == pytest.approx(0.198976)


def test_overlong_penalty():
    lengths = torch.tensor([16384, 18432, 20480, 20481])
    close(overlong_penalty(lengths, max_response_length=20480, buffer=4096), [0, -0.5, -1, -1])
