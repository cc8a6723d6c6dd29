"""Rollout corrections against plain loops, their combination, self-normalisation and diagnostics."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.algorithms import CORRECTIONS, correct, finalize, merge, mismatch_metrics
from hybridrl.errors import ConfigError
from tests.unit.algorithms import reference
from tests.unit.algorithms.cases import batches, make_columns, random_pieces, take_rows

QUICK = settings(max_examples=20)
SCHEMES = [
    ("token_tis", {"lo": 0.8, "hi": 1.1}),
    ("token_tis", {"hi": None}),
    ("sequence_tis", {"hi": 1.3}),
    ("icepop", {"lo": 0.9, "hi": 1.2}),
    ("token_band", {"lo": 0.9, "hi": 1.2}),
    ("sequence_mask", {"lo": 0.5, "hi": 1.5}),
    ("geometric_mask", {"lo": 0.95, "hi": 1.05}),
    ("k3_mask", {"hi": 0.02}),
    ("max_k2_mask", {"hi": 0.02}),
    ("veto", {"hi": 0.8}),
]


def scheme_by_loop(name, d, lo=0.0, hi=None):
    """Weights and keeps of one row from its log-ratios."""
    hi = math.inf if hi is None else hi
    rho = [math.exp(reference.clip(x, -20, 20)) for x in d]
    product, middle = math.exp(reference.clip(sum(d), -20, 20)), math.exp(reference.mean(d))
    n = len(d)
    inside = [lo <= r <= hi for r in rho]
    if name == "token_tis":
        return [reference.clip(r, lo, hi) for r in rho], [True] * n
    if name == "sequence_tis":
        return [reference.clip(product, lo, hi)] * n, [True] * n
    if name == "icepop":
        return rho, inside
    if name == "token_band":
        return [1.0] * n, inside
    if name == "sequence_mask":
        return [product] * n, [lo <= product <= hi] * n
    keep = {
        "geometric_mask": lo <= middle <= hi,
        "k3_mask": reference.mean([r - 1 - x for r, x in zip(rho, d, strict=True)]) <= hi,
        "max_k2_mask": max(x * x / 2 for x in d) <= hi,
        "veto": min(rho) >= hi,
    }[name]
    return [1.0] * n, [keep] * n


@pytest.mark.parametrize(("name", "options"), SCHEMES)
@QUICK
@given(columns=batches)
def test_schemes(name, options, columns):
    mask = columns["mask"]
    weights, keeps = torch.zeros(mask.shape).double(), torch.zeros_like(mask)
    for b in mask.any(1).nonzero().flatten().tolist():
        on = mask[b]
        d = (columns["old_log_probs"] - columns["rollout_log_probs"])[b, on].tolist()
        w, k = scheme_by_loop(name, d, **options)
        keeps[b, on] = torch.tensor(k)
        weights[b, on] = torch.tensor(w, dtype=torch.float64) * torch.tensor(k)
    got = CORRECTIONS.call(name, options, columns)
    assert torch.equal(got.keep, keeps)
    torch.testing.assert_close(got.weights, weights)


def test_bounds_are_inclusive():
    columns = {
        "old_log_probs": torch.zeros(1, 2),
        "rollout_log_probs": torch.zeros(1, 2),
        "mask": torch.ones(1, 2, dtype=torch.bool),
    }
    for name in ("icepop", "token_band", "sequence_mask", "geometric_mask"):
        assert CORRECTIONS.call(name, {"lo": 1.0, "hi": 1.0}, columns).keep.all()
    assert CORRECTIONS.call("veto", {"hi": 1.0}, columns).keep.all()


def test_row_with_an_impossible_token_is_rejected():
    columns = {
        "old_log_probs": torch.tensor([[-1.0, -torch.inf], [-1.0, -1.0]]),
        "rollout_log_probs": torch.tensor([[-1.0, -torch.inf], [-1.0, -1.0]]),
        "mask": torch.ones(2, 2, dtype=torch.bool),
    }
    for name, _ in SCHEMES:
        got = CORRECTIONS.call(name, None, columns)
        assert got.keep.tolist() == [[False, False], [True, True]]
        assert got.weights.tolist() == [[0, 0], [1, 1]]


@QUICK
@given(columns=batches)
def test_combination_multiplies_weights_and_keeps(columns):
    schemes = {"geometric_mask": {"lo": 0.9, "hi": 1.1}, "token_tis": {"hi": 1.1}}
    one, two = (CORRECTIONS.call(name, options, columns) for name, options in schemes.items())
    got = correct(schemes, columns)
    assert torch.equal(got.keep, one.keep & two.keep)
    torch.testing.assert_close(got.weights, torch.where(one.keep, two.weights, 0.0))
    assert torch.equal(correct([], columns).weights, columns["mask"].float())


@pytest.mark.parametrize("scheme", ["token_tis", "icepop", "sequence_tis", "sequence_mask", "geometric_mask"])
def test_self_normalised_mean_is_one(scheme):
    columns = make_columns(12, rows=12)
    mask = columns["mask"]
    got = correct({scheme: {"lo": 0.2, "hi": 1.6}}, columns, self_normalise=True).weights
    if "token" in scheme or scheme == "icepop":
        mean = got.sum() / mask.sum()
    else:
        mean = got.amax(1)[mask.any(1)].mean()
    assert mean.item() == pytest.approx(1.0, abs=1e-6)


def test_self_normalisation_is_skipped_when_everything_is_rejected():
    columns = make_columns(12)
    got = correct({"icepop": {"lo": 1e5, "hi": 1e6}}, columns, self_normalise=True)
    assert not got.weights.any()


def test_impossible_options():
    columns = make_columns(1)
    with pytest.raises(ConfigError, match="lo must be at most hi"):
        correct({"icepop": {"lo": 3.0, "hi": 2.0}}, columns)
    with pytest.raises(ConfigError, match="at most one"):
        correct(["token_tis", "sequence_tis"], columns)
    with pytest.raises(ConfigError, match="icepop"):
        correct(["ice_pop"], columns)


@QUICK
@given(columns=batches)
def test_diagnostics(columns):
    mask = columns["mask"]
    correction = correct({"token_tis": {"hi": 1.1}}, columns)
    got = finalize(
        mismatch_metrics(columns["old_log_probs"], columns["rollout_log_probs"], mask, correction, lo=0.9, hi=1.1)
    )
    if not mask.any():
        assert set(got.values()) == {0.0}
        return
    old, roll = columns["old_log_probs"][mask], columns["rollout_log_probs"][mask]
    d, rho = old - roll, (old - roll).exp()
    rows = mask.any(1).nonzero().flatten().tolist()
    means = [
        (columns["old_log_probs"][b, mask[b]].mean(), columns["rollout_log_probs"][b, mask[b]].mean()) for b in rows
    ]
    gaps = [(y - x).item() for x, y in means]
    products = [(columns["old_log_probs"] - columns["rollout_log_probs"])[b, mask[b]].sum().exp() for b in rows]
    w = correction.weights[mask]
    expected = {
        "kl_k1": -d.mean(),
        "kl_k3": (rho - d - 1).mean(),
        "chi2_token": rho.square().mean() - 1,
        "prob_diff_mean": (old.exp() - roll.exp()).abs().mean(),
        "prob_diff_max": (old.exp() - roll.exp()).abs().max(),
        "frac_above_hi": (rho > 1.1).double().mean(),
        "frac_below_lo": (rho < 0.9).double().mean(),
        "frac_beyond_2": (torch.maximum(rho, 1 / rho) > 2).double().mean(),
        "frac_kept": 1.0,
        "ppl_old": reference.mean([math.exp(-x) for x, _ in means]),
        "ppl_rollout": reference.mean([math.exp(-y) for _, y in means]),
        "log_ppl_diff_mean": reference.mean(gaps),
        "log_ppl_diff_abs": reference.mean([abs(x) for x in gaps]),
        "log_ppl_diff_max": max(gaps),
        "log_ppl_diff_min": min(gaps),
        "ppl_ratio": reference.mean([math.exp(x) for x in gaps]),
        "chi2_seq": reference.mean([p.item() ** 2 for p in products]) - 1,
        "ess": w.sum() ** 2 / (len(w) * w.square().sum()),
        "nonfinite_frac": 0.0,
    }
    assert got == pytest.approx({k: float(v) for k, v in expected.items()}, abs=1e-9)


@QUICK
@given(columns=batches, seed=st.integers(0, 1000))
def test_diagnostics_merge_over_ranks(columns, seed):
    def part(c):
        return mismatch_metrics(c["old_log_probs"], c["rollout_log_probs"], c["mask"], correct(["icepop"], c))

    pieces = [part(take_rows(columns, rows)) for rows in random_pieces(len(columns["mask"]), seed)]
    assert finalize(merge(pieces)) == pytest.approx(finalize(part(columns)), abs=1e-9)
