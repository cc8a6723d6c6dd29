"""U1 to U6, U8, U9 for every function that returns a tensor per token: garbage, padding, permutation, precision."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.algorithms import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    KEEP_MASKS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    correct,
    finalize,
    mismatch_metrics,
    policy_loss,
    policy_metrics,
    value_loss,
)
from tests.unit.algorithms.cases import TOKEN_COLUMNS, batches, make_columns, padded, take_rows, to, with_garbage
from tests.unit.algorithms.test_losses import LOSSES

OPTIONS = {
    "reinforce": [{"baseline": b, "gamma": 0.9} for b in ("none", "batch", "group")],
    "reinforce_pp": [{}, {"kl_coef": 0.1}],
    "grpo": [{}, {"std": "batch"}, {"std": "none"}],
    "gae": [{}, {"gamma": 0.9, "lam": 0.8, "lam_alpha": 0.5, "critic_lam": 0.9}],
    "pass_at_k": [{"k": 1}],
    "max_at_k": [{"k": 1}],
    "pass_at_k_marginal": [{"divide_by_std": True}],
    "turn_level": [{"gamma": 0.9}],
    "distill": [{"reward_coef": 0.5}],
}
FUNCTIONS = (
    [(ADVANTAGES, name, options) for name in ADVANTAGES for options in OPTIONS.get(name, [{}])]
    + [(POLICY_LOSSES, name, options) for name, options in LOSSES]
    + [(AGGREGATIONS, name, {"max_response_length": 12} if "norm" in name else {}) for name in AGGREGATIONS]
    + [(KL_ESTIMATORS, name, {}) for name in KL_ESTIMATORS]
    + [(CORRECTIONS, name, {}) for name in CORRECTIONS]
    + [(KEEP_MASKS, name, {"threshold": 0.02} if name == "second_moment" else {}) for name in KEEP_MASKS]
)
IDS = [f"{table.kind}-{name}-{i}".replace(" ", "_") for i, (table, name, _) in enumerate(FUNCTIONS)]
everything = pytest.mark.parametrize(("table", "name", "options"), FUNCTIONS, ids=IDS)
FEW = settings(max_examples=5)


def adapt(name, columns):
    """Rewards that the estimator accepts."""
    if name == "pass_at_k":
        return {**columns, "rewards": (columns["rewards"] > 0).to(columns["rewards"].dtype)}
    if name == "maxrl":
        return {**columns, "rewards": columns["rewards"].abs()}
    return columns


def run(table, name, options, columns):
    """All output tensors [B, R], and the gradient with respect to log_probs where there is one."""
    columns = adapt(name, columns)
    lp = columns["log_probs"].clone().requires_grad_()
    differentiable = table in (POLICY_LOSSES, KL_ESTIMATORS)
    if differentiable:
        columns = {**columns, "log_probs": lp}
    if table is POLICY_LOSSES:
        result = policy_loss(name, {**columns, **detached(table.prepare(name, options, columns))}, options).loss
    else:
        result = table.call(name, options, columns)
    outputs = list(result) if isinstance(result, tuple) else [result]
    if differentiable:
        outputs.append(torch.autograd.grad(outputs[0].sum(), lp)[0])
    return [x.detach() for x in outputs]


def detached(columns):
    return {name: x.detach() for name, x in columns.items()}


def assert_same(got, expected, tolerance=1e-9):
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=tolerance, rtol=tolerance)


@everything
@FEW
@given(columns=batches)
def test_masked_garbage_and_zeros(table, name, options, columns):
    clean, dirty = run(table, name, options, columns), run(table, name, options, with_garbage(columns))
    for x, y in zip(clean, dirty, strict=True):
        assert torch.equal(x, y)
        assert not y[~columns["mask"]].any()
        assert y.isfinite().all()


@everything
@FEW
@given(columns=batches, wide=st.integers(0, 3), tall=st.integers(0, 2))
def test_padding(table, name, options, columns, wide, tall):
    rows, width = columns["mask"].shape
    expected = run(table, name, options, columns)
    got = run(table, name, options, padded(columns, wide, tall))
    assert_same([x[:rows, :width] for x in got], expected)
    for x in got:
        assert not x[rows:].any()
        assert not x[:, width:].any()


@everything
@FEW
@given(columns=batches, seed=st.integers(0, 100))
def test_permutation(table, name, options, columns, seed):
    order = torch.randperm(len(columns["mask"]), generator=torch.Generator().manual_seed(seed))
    expected = [x[order] for x in run(table, name, options, columns)]
    assert_same(run(table, name, options, take_rows(columns, order)), expected)


@everything
@pytest.mark.parametrize("extreme", [0.0, 1e15, -1e15, torch.inf, -torch.inf, torch.nan])
def test_always_finite(table, name, options, extreme):
    columns = make_columns(11, rows=5, width=4, dtype=torch.float32)
    b, t = columns["mask"].nonzero()[0].tolist()
    for column in TOKEN_COLUMNS:
        if "log_probs" in column or column in ("values", "advantages"):
            columns[column] = columns[column].clone()
            columns[column][b, t] = extreme
    if name not in ("pass_at_k", "maxrl"):
        columns["rewards"][b] = extreme
    for x in run(table, name, options, columns):
        assert x.isfinite().all()


@everything
@pytest.mark.parametrize(("rows", "width"), [(0, 0), (0, 3), (3, 0), (2, 3)])
def test_nothing_to_do(table, name, options, rows, width):
    columns = make_columns(1, rows=4, width=3)
    columns = {
        k: v[:rows, :width] if v.shape == (4, 3) and k != "reward_components" else v[:rows] for k, v in columns.items()
    }
    columns["mask"] = torch.zeros(rows, width, dtype=torch.bool)
    for x in run(table, name, options, columns):
        assert x.shape == (rows, width)
        assert not x.any()


@everything
def test_float32_agrees_with_float64(table, name, options):
    columns = make_columns(13, rows=16, width=40, dtype=torch.float32)
    wide = {k: to(v, torch.float64) for k, v in columns.items()}
    got, expected = run(table, name, options, columns), run(table, name, options, wide)
    for x, y in zip(got, expected, strict=True):
        assert x.dtype in (torch.float32, torch.bool)
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-5, atol=1e-7)


@everything
def test_bfloat16_input_is_computed_in_float32(table, name, options):
    columns = make_columns(14, dtype=torch.bfloat16)
    columns["rewards"] = columns["rewards"].float()
    exact = {k: to(v, torch.float32) for k, v in columns.items()}
    got, expected = run(table, name, options, columns), run(table, name, options, exact)
    for i, (x, y) in enumerate(zip(got, expected, strict=True)):
        is_gradient = table in (POLICY_LOSSES, KL_ESTIMATORS) and i == len(got) - 1
        assert x.dtype in (torch.float32, torch.bool) or is_gradient  # a gradient has the dtype of its input
        torch.testing.assert_close(x.float(), y.float(), rtol=1e-2 if is_gradient else 1e-5, atol=1e-6)


@everything
def test_constants_carry_no_gradient(table, name, options):
    columns = adapt(name, make_columns(16))
    leaves = {k: v.clone().requires_grad_() for k, v in columns.items() if v.is_floating_point()}
    if table is POLICY_LOSSES:
        extra = detached(POLICY_LOSSES.prepare(name, options, {**columns, **leaves}))
        result = policy_loss(name, {**columns, **leaves, **extra}, options).loss
    else:
        result = table.call(name, options, {**columns, **leaves})
    outputs = list(result) if isinstance(result, tuple) else [result]
    if table not in (POLICY_LOSSES, KL_ESTIMATORS):
        assert not any(x.requires_grad for x in outputs)
        return
    names = [k for k in leaves if k != "log_probs"]
    grads = torch.autograd.grad(outputs[0].sum(), [leaves[k] for k in names], allow_unused=True)
    for key, grad in zip(names, grads, strict=True):
        assert grad is None or not grad.any(), key


@FEW
@given(columns=batches, seed=st.integers(0, 1000))
def test_scalars_ignore_padding_garbage_and_order(columns, seed):
    order = torch.randperm(len(columns["mask"]), generator=torch.Generator().manual_seed(seed))

    def scalars(c):
        out = mismatch_metrics(c["old_log_probs"], c["rollout_log_probs"], c["mask"], correct(["token_tis"], c))
        moved = policy_metrics(c["log_probs"], c["old_log_probs"], c["mask"], ref_log_probs=c["ref_log_probs"])
        vf = value_loss(c["values"], c["old_values"], c["returns"], c["mask"]).metrics
        return finalize({**out, **moved, **vf})

    expected = pytest.approx(scalars(columns), abs=1e-9)
    assert scalars(with_garbage(columns)) == expected
    assert scalars(padded(columns, 2, 2)) == expected
    assert scalars(take_rows(columns, order)) == expected
