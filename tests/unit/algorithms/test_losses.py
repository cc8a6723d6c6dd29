"""Policy losses: values and gradients against closed forms and finite differences, and their properties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.algorithms import (
    AGGREGATIONS,
    KEEP_MASKS,
    POLICY_LOSSES,
    aggregate,
    correct,
    finalize,
    loss_weights,
    policy_loss,
    token_covariance,
    value_loss,
)
from hybridrl.errors import ConfigError
from tests.unit.algorithms import reference
from tests.unit.algorithms.cases import batches, make_columns, random_pieces, take_rows

QUICK = settings(max_examples=20)
LOSSES = [
    ("ppo_clip", {}),
    ("ppo_clip", {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 1.5}),
    ("gpg", {}),
    ("reinforce", {}),
    ("gspo", {}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.1}),
    ("gmpo", {"clip_low": 0.2, "clip_high": 0.1}),
    ("sequence_clip", {}),
    ("cispo", {"ratio_min": 0.7, "ratio_max": 1.3}),
    ("aipo", {"ratio_max": 1.2}),
    ("sapo", {}),
    ("dppo", {"delta_low": 0.02, "delta_high": 0.02, "ratio_max": 1.2}),
    ("dppo", {"divergence": "kl", "delta_low": 0.01, "delta_high": 0.02}),
    ("clip_cov", {"quota_frac": 0.3, "cov_low": -0.5, "cov_high": 3.0}),
    ("kl_cov", {"quota_frac": 0.3}),
    ("decoupled_ppo", {"behaviour_cap": 1.1}),
]
WITH_CURRENT_RATIO = [case for case in LOSSES if case[0] not in ("gpg", "reinforce")]


def prepared(name, options, columns):
    return {**columns, **POLICY_LOSSES.prepare(name, options, columns)}


def total(name, options, columns, weights, log_probs=None):
    """Loss of a piece and its gradient."""
    lp = (columns["log_probs"] if log_probs is None else log_probs).clone().requires_grad_()
    loss = aggregate(policy_loss(name, {**columns, "log_probs": lp}, options).loss, weights, columns["mask"])
    (gradient,) = torch.autograd.grad(loss, lp)
    return loss.detach(), gradient


@pytest.mark.parametrize(
    "name_options", [c for c in LOSSES if c[0] in "ppo_clip gpg reinforce cispo sapo dppo".split()]
)
@QUICK
@given(columns=batches)
def test_token_losses_against_formulas(name_options, columns):
    name, options = name_options
    mask = columns["mask"]
    loss, grad = torch.zeros(mask.shape).double(), torch.zeros(mask.shape).double()
    for b, t in mask.nonzero().tolist():
        numbers = (columns[k][b, t].item() for k in ("advantages", "log_probs", "old_log_probs"))
        loss[b, t], grad[b, t] = reference.token_loss(name, *numbers, **options)
    lp = columns["log_probs"].clone().requires_grad_()
    got = policy_loss(name, {**columns, "log_probs": lp}, options).loss
    torch.testing.assert_close(got.detach(), loss)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), lp)[0], grad)


@pytest.mark.parametrize(("name", "options"), [c for c in LOSSES if c[0] in ("gspo", "gmpo")])
@QUICK
@given(columns=batches)
def test_row_losses_against_formulas(name, options, columns):
    mask = columns["mask"]
    loss, grad = torch.zeros(mask.shape).double(), torch.zeros(mask.shape).double()
    for b in mask.any(1).nonzero().flatten().tolist():
        on = mask[b]
        rows = [columns[k][b, on].tolist() for k in ("advantages", "log_probs", "old_log_probs")]
        values, slopes = reference.row_loss(name, *rows, **options)
        loss[b, on], grad[b, on] = torch.tensor(values).double(), torch.tensor(slopes).double()
    lp = columns["log_probs"].clone().requires_grad_()
    got = policy_loss(name, {**columns, "log_probs": lp}, options).loss
    torch.testing.assert_close(got.detach(), loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), lp)[0], grad, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [c for c in LOSSES if c[0] in "ppo_clip gmpo sequence_clip sapo clip_cov kl_cov decoupled_ppo".split()],
)
def test_gradients_by_finite_differences(name, options):
    columns = prepared(name, options, make_columns(7, rows=4, width=5))

    def loss(lp):
        return policy_loss(name, {**columns, "log_probs": lp}, options).loss

    assert torch.autograd.gradcheck(loss, columns["log_probs"].clone().requires_grad_())


@QUICK
@given(columns=batches)
def test_gspo_is_the_sequence_objective_for_constant_advantages(columns):
    mask = columns["mask"]
    advantage = columns["advantages"].mean(1, keepdim=True)
    lp = columns["log_probs"].clone().requires_grad_()
    given_columns = {**columns, "log_probs": lp, "advantages": advantage.expand(mask.shape)}
    got = aggregate(policy_loss("gspo", given_columns).loss, loss_weights("seq-mean-token-mean", columns), mask)
    d = torch.where(mask, lp - columns["old_log_probs"], 0.0).sum(1) / mask.sum(1).clamp(min=1)
    s = d.exp()
    rows = torch.maximum(-advantage[:, 0] * s, -advantage[:, 0] * s.clamp(1 - 3e-4, 1 + 4e-4))
    expected = torch.where(mask.any(1), rows, 0.0).sum() / mask.any(1).sum().clamp(min=1)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    if mask.any():
        # On tokens the paper's row objective has gradient s_b / n_b, as the library's form.
        torch.testing.assert_close(
            torch.autograd.grad(got, lp, retain_graph=True)[0],
            torch.autograd.grad(expected, lp)[0],
            atol=1e-6,
            rtol=1e-6,
        )


@pytest.mark.parametrize(("name", "options"), LOSSES)
@QUICK
@given(columns=batches)
def test_on_policy_gradient(name, options, columns):
    """With all log-probs equal the gradient is -c A (per row for GMPO and the product ratio)."""
    mask, old = columns["mask"], columns["old_log_probs"]
    same = {**columns, "log_probs": old, "rollout_log_probs": old}
    if name == "clip_cov":
        same["clip_cov_tokens"] = torch.zeros_like(mask)
    else:
        same = prepared(name, options, same)
    aggregation = POLICY_LOSSES[name].aggregation
    weights = loss_weights(aggregation, columns)
    _, gradient = total(name, options, same, weights)
    a = torch.where(mask, columns["advantages"], 0.0)
    expected = -weights * a
    if name == "gmpo":
        n, s = mask.sum(1, keepdim=True).clamp(min=1), mask.any(1).sum().clamp(min=1)
        expected = torch.where(mask, -a.sum(1, keepdim=True) / n / (s * n), 0.0)
    elif name == "sequence_clip":
        expected = torch.where(mask, (expected.sum(1, keepdim=True)).expand(mask.shape), 0.0)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("name", "options"), LOSSES)
def test_zero_advantage_gives_nothing(name, options):
    columns = make_columns(1)
    columns["advantages"] = torch.zeros_like(columns["advantages"])
    columns = prepared(name, {**options, "penalty": 0.0} if name == "kl_cov" else options, columns)
    if name == "kl_cov":
        options = {**options, "penalty": 0.0}
    loss, gradient = total(name, options, columns, loss_weights("token-mean", columns))
    assert loss == 0
    assert not gradient.any()


@pytest.mark.parametrize(("name", "options"), LOSSES)
@settings(max_examples=10)
@given(columns=batches, seed=st.integers(0, 1000), mode=st.sampled_from(sorted(AGGREGATIONS)))
def test_partition(name, options, columns, seed, mode):
    """Any split into pieces, empty ones included, adds up to the same loss and gradient."""
    columns = {**columns, **{k: v for k, v in prepared(name, options, columns).items() if k not in columns}}
    limit = {"max_response_length": 20} if "norm" in mode else None
    weights = loss_weights(mode, columns, limit)
    assert weights.dtype == torch.float32
    whole, gradient = total(name, options, columns, weights)
    loss, pieces = torch.zeros(()).double(), torch.zeros_like(gradient)
    metrics: dict = {}
    for rows in random_pieces(len(weights), seed):
        part, part_gradient = total(name, options, take_rows(columns, rows), weights[rows])
        loss += part
        pieces[rows] += part_gradient
        for key, mean in policy_loss(name, take_rows(columns, rows), options).metrics.items():
            metrics[key] = mean.merge(metrics[key]) if key in metrics else mean
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(pieces, gradient)
    assert finalize(metrics) == pytest.approx(finalize(policy_loss(name, columns, options).metrics))


@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
@QUICK
@given(columns=batches)
def test_coefficients(mode, columns):
    limit = {"max_response_length": 20} if "norm" in mode else None
    expected = reference.coefficients(mode, columns, 20)
    torch.testing.assert_close(loss_weights(mode, columns, limit).double(), expected, atol=1e-7, rtol=1e-6)


def test_trajectories_as_sequences():
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]]).bool()
    columns = {"mask": mask, "trajectory_ids": torch.tensor([4, 4, 9])}
    got = loss_weights("seq-mean-token-mean", columns, {"per_trajectory": True})
    torch.testing.assert_close(got, mask / 3)  # one non-empty trajectory of three tokens
    assert loss_weights("seq-mean-token-sum", columns, {"per_trajectory": True}).max() == 1
    assert loss_weights("seq-mean-token-sum", columns).max() == 0.5


def test_constant_must_be_configured():
    with pytest.raises(ConfigError, match="max_response_length"):
        loss_weights("seq-mean-token-sum-norm", make_columns(1))


@pytest.mark.parametrize(("name", "options"), LOSSES)
def test_empty_mini_batch_has_a_connected_graph(name, options):
    columns = make_columns(1)
    columns["mask"] = torch.zeros_like(columns["mask"])
    columns = prepared(name, options, columns)
    loss, gradient = total(name, options, columns, loss_weights("token-mean", columns))
    assert loss == 0
    assert not gradient.any()
    assert set(finalize(policy_loss(name, columns, options).metrics).values()) == {0.0}


@pytest.mark.parametrize(("name", "options"), WITH_CURRENT_RATIO)
def test_safety_clamp(name, options):
    """Log-ratios beyond 20 stay finite; a ratio that the clamp made carries no gradient."""
    columns = make_columns(2)
    columns["log_probs"] = columns["old_log_probs"] + 700.0 * torch.where(columns["advantages"] > 0, -1, 1)
    columns = prepared(name, options, columns)
    loss, gradient = total(name, options, columns, loss_weights("token-mean", columns))
    assert math.isfinite(loss)
    assert gradient.isfinite().all()
    if name not in ("cispo", "aipo", "dppo", "kl_cov"):  # these weigh log-probs, or penalize |D| itself
        assert not gradient.any()


@pytest.mark.parametrize(("name", "options"), LOSSES)
def test_impossible_tokens_are_neutral_and_counted(name, options):
    columns = make_columns(2)
    b, t = columns["mask"].nonzero()[0].tolist()
    for key in ("log_probs", "old_log_probs", "rollout_log_probs"):
        columns[key] = columns[key].clone()
        columns[key][b, t] = -torch.inf
    columns = prepared(name, options, columns)
    loss, gradient = total(name, options, columns, loss_weights("token-mean", columns))
    assert math.isfinite(loss)
    assert gradient.isfinite().all()
    assert gradient[b, t] == 0
    assert finalize(policy_loss(name, columns, options).metrics)["nonfinite_frac"] > 0


def test_clip_fractions():
    ratios = torch.tensor([[1.5, 1.5, 0.5, 0.5, 5.0, 1.0]]).log()
    columns = {
        "log_probs": ratios,
        "old_log_probs": torch.zeros(1, 6),
        "advantages": torch.tensor([[1.0, -1, 1, -1, -1, 1]]),
        "mask": torch.ones(1, 6, dtype=torch.bool),
    }
    got = finalize(policy_loss("ppo_clip", columns, {"dual_clip": 3.0}).metrics)
    sixth = pytest.approx(1 / 6)
    assert got["clipfrac_high"] == sixth
    assert got["clipfrac_low"] == sixth
    assert got["clipfrac_dual"] == sixth
    assert got["clipfrac"] == pytest.approx(2 / 6)


# ---- weights, anchors and masks


def test_correction_weights_multiply_after_clipping():
    columns = make_columns(8)
    weights = correct(["icepop"], columns).weights
    plain = policy_loss("ppo_clip", columns).loss
    got = policy_loss("ppo_clip", {**columns, "correction_weights": weights}).loss
    torch.testing.assert_close(got, plain * weights)


def test_every_token_rejected():
    columns = {**make_columns(8), "correction_weights": torch.zeros(7, 9)}
    for name, options in LOSSES:
        if name != "decoupled_ppo":
            loss, gradient = total(name, options, prepared(name, options, columns), loss_weights("token-mean", columns))
            assert loss == 0, name
            assert not gradient.any(), name


@pytest.mark.parametrize(("p", "old", "kl"), [
    (0.7, 0.5, 0.5 * math.log(5 / 7) + 0.5 * math.log(5 / 3)),  # 0.0872
    (0.75, 0.99, 0.99 * math.log(0.99 / 0.75) + 0.01 * math.log(0.01 / 0.25)),  # 0.2427
    (0.5, 1.0, math.log(2)),
])
def test_dppo_measured_by_binary_kl(p, old, kl):
    """A token is dropped above its divergence, and only where the advantage pushes it further."""
    toward = 1.0 if p > old else -1.0
    columns = {"log_probs": torch.tensor([[p]]).double().log(), "old_log_probs": torch.tensor([[old]]).double().log(),
               "mask": torch.tensor([[True]])}
    for sign, bound, dropped in ((1, 0.99, True), (1, 1.01, False), (-1, 0.5, False)):
        options = {"divergence": "kl", "delta_low": bound * kl, "delta_high": bound * kl}
        advantages = torch.tensor([[sign * toward]]).double()
        got = policy_loss("dppo", {**columns, "advantages": advantages}, options)
        assert got.loss.item() == pytest.approx(0 if dropped else -sign * toward * p / old * math.log(p))
        assert float(got.metrics["clipfrac"].sum) == dropped


def test_gmpo_keep_and_weights():
    """Kept tokens form the mean; their weights enter as a geometric mean."""
    log_probs = torch.tensor([[0.1, 0.2, 0.3]], dtype=torch.float64)
    columns = {
        "log_probs": log_probs,
        "old_log_probs": torch.zeros(1, 3).double(),
        "advantages": torch.full((1, 3), 2.0).double(),
        "mask": torch.ones(1, 3, dtype=torch.bool),
        "correction_weights": torch.tensor([[4.0, 0.0, 1.0]]).double(),
    }
    got = policy_loss("gmpo", columns).loss
    torch.testing.assert_close(got, torch.full((1, 3), -2 * 2 * math.exp(0.2)).double())


def test_gmpo_weights_count_beside_a_clamped_ratio():
    """Log-ratios 30 and 30 clamp to e^20; weights 1/4 and 1 halve it."""
    columns = {"log_probs": torch.tensor([[-1.0, -2.0]]), "old_log_probs": torch.tensor([[-31.0, -32.0]]),
               "advantages": -torch.ones(1, 2), "mask": torch.ones(1, 2, dtype=torch.bool),
               "correction_weights": torch.tensor([[0.25, 1.0]])}
    got = policy_loss("gmpo", columns).loss
    torch.testing.assert_close(got, torch.full((1, 2), 0.5 * math.exp(20.0)))


def test_decoupled_ppo_makes_its_weight():
    columns = make_columns(8)
    weighted = prepared("decoupled_ppo", {"behaviour_cap": 1.1}, columns)
    ratio = (columns["old_log_probs"] - columns["rollout_log_probs"]).exp().clamp(max=1.1)
    plain = policy_loss("ppo_clip", columns).loss
    torch.testing.assert_close(policy_loss("decoupled_ppo", weighted).loss, plain * ratio)
    chosen = {**columns, "correction_weights": columns["mask"].double()}
    assert POLICY_LOSSES.prepare("decoupled_ppo", None, chosen) == {}


def test_rollout_anchor():
    columns = make_columns(8)
    coupled = policy_loss("ppo_clip", columns, anchor="rollout").loss
    by_hand = policy_loss("ppo_clip", {**columns, "old_log_probs": columns["rollout_log_probs"]}).loss
    assert torch.equal(coupled, by_hand)
    tis = {**columns, "correction_weights": correct(["token_tis"], columns).weights}
    for name, anchor in (("ppo_clip", "rollout"), ("aipo", "old")):
        with pytest.raises(ConfigError, match="twice"):
            policy_loss(name, tis, anchor=anchor)
        policy_loss(name, {**columns, "correction_weights": columns["mask"].double()}, anchor=anchor)
    with pytest.raises(ConfigError, match="anchor"):
        policy_loss("ppo_clip", columns, anchor="behaviour")


def test_off_policy_sequence_mask_by_hand():
    columns = {
        "log_probs": torch.tensor([[-2.0, -2.0], [-1.0, -1.0]]),
        "old_log_probs": torch.tensor([[-1.0, -1.5], [-1.0, -1.0]]),
        "advantages": torch.tensor([[-1.0, 1.0], [-1.0, -1.0]]),
        "mask": torch.ones(2, 2, dtype=torch.bool),
    }
    keep = KEEP_MASKS.call("off_policy_sequence", {"delta": 0.7}, columns)  # row 0 fell by 0.75 on average
    assert keep.tolist() == [[False, True], [True, True]]
    plain = policy_loss("ppo_clip", columns).loss
    masked = policy_loss("ppo_clip", columns, step_masks={"off_policy_sequence": {"delta": 0.7}})
    torch.testing.assert_close(masked.loss, plain * keep)
    assert masked.metrics["kept_frac"].value() == 0.75


def test_second_moment_mask_by_hand():
    d = torch.tensor([[0.1, -0.3, 0.2, 9.0]])
    mask = torch.tensor([[True, True, True, False]])
    columns = {"old_log_probs": d, "rollout_log_probs": torch.zeros(1, 4), "mask": mask}
    # squares 0.01 0.09 0.04: mean 0.0467; without the largest 0.025
    assert KEEP_MASKS.call("second_moment", {"threshold": 0.05}, columns).tolist() == [[True, True, True, False]]
    assert KEEP_MASKS.call("second_moment", {"threshold": 0.04}, columns).tolist() == [[True, False, True, False]]
    assert not KEEP_MASKS.call("second_moment", {"threshold": 0.001}, columns).any()


def test_high_entropy_mask_keeps_the_top_fifth():
    entropies = torch.arange(10.0)[None]
    mask = torch.ones(1, 10, dtype=torch.bool)
    keep = KEEP_MASKS.call("high_entropy", None, {"entropies": entropies, "mask": mask})
    assert keep.nonzero()[:, 1].tolist() == [8, 9]


# ---- Clip-Cov and KL-Cov


def test_covariance_by_hand():
    a = torch.tensor([[1.0, -1.0, 0.0]])
    lp = torch.tensor([[-1.0, -3.0, 5.0]])
    mask = torch.tensor([[True, True, False]])
    assert token_covariance(a, lp, mask).tolist() == [[1, 1, 0]]


def test_kl_cov_chooses_the_largest():
    columns = make_columns(2, rows=6, width=9)
    chosen = POLICY_LOSSES.prepare("kl_cov", {"quota_frac": 0.25}, columns)["kl_cov_tokens"]
    n = int(columns["mask"].sum())
    assert chosen.sum() == max(1, n // 4)
    cov = token_covariance(columns["advantages"], columns["old_log_probs"], columns["mask"])
    assert cov[chosen].min() >= cov[columns["mask"] & ~chosen].max()
    loss = policy_loss("kl_cov", {**columns, "kl_cov_tokens": chosen}, {"penalty": 0.5}).loss
    d = columns["log_probs"] - columns["old_log_probs"]
    torch.testing.assert_close(loss, -columns["advantages"] * d.exp() + torch.where(chosen, 0.5 * d.abs(), 0.0))


def test_clip_cov_chooses_inside_the_band_and_not_what_is_clipped():
    columns = make_columns(2, rows=6, width=9)
    options = {"quota_frac": 0.2, "cov_low": -0.5, "cov_high": 1.0}
    cov = token_covariance(columns["advantages"], columns["old_log_probs"], columns["mask"])
    band = columns["mask"] & (cov > -0.5) & (cov < 1.0)
    quota = max(1, int(columns["mask"].sum() * 0.2))
    picks = set()
    for seed in range(4):
        chosen = POLICY_LOSSES.prepare("clip_cov", {**options, "seed": seed}, columns)["clip_cov_tokens"]
        assert chosen.sum() == quota
        assert not (chosen & ~band).any()
        ratio, a = (columns["log_probs"] - columns["old_log_probs"]).exp(), columns["advantages"]
        assert not (chosen & (((a > 0) & (ratio > 1.2)) | ((a < 0) & (ratio < 0.8)))).any()
        picks.add(tuple(chosen.flatten().tolist()))
        got = policy_loss("clip_cov", {**columns, "clip_cov_tokens": chosen}, options).loss
        plain = policy_loss("ppo_clip", columns).loss
        torch.testing.assert_close(got, torch.where(chosen, 0.0, plain))
    assert len(picks) > 1


# ---- value loss


@QUICK
@given(columns=batches, clip=st.sampled_from([0.2, None]))
def test_value_loss(columns, clip):
    mask = columns["mask"]
    v = columns["values"].clone().requires_grad_()
    result = value_loss(v, columns["old_values"], columns["returns"], mask, clip=clip)
    (gradient,) = torch.autograd.grad(result.loss.sum(), v)
    clipped = 0
    for b, t in mask.nonzero().tolist():
        now, old, g = (columns[k][b, t].item() for k in ("values", "old_values", "returns"))
        u = (now - g) ** 2
        c = u if clip is None else (reference.clip(now, old - clip, old + clip) - g) ** 2
        clipped += c > u
        assert result.loss[b, t].item() == pytest.approx(0.5 * max(u, c))
        assert gradient[b, t].item() == pytest.approx(now - g if c <= u else 0.0)
    assert not gradient[~mask].any()
    assert finalize(result.metrics)["vf_clipfrac"] == pytest.approx(clipped / max(1, int(mask.sum())))
