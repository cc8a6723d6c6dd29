"""How far the sampled distribution is from the trained one. Log it always, also without correction.

Healthy dense bfloat16 models have kl_k3 of 1e-4 to 1e-3; sustained growth precedes collapse, and an effective
sample size below 0.3 calls for fresher data.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from hybridrl.algorithms.columns import check_tokens
from hybridrl.algorithms.corrections import Correction
from hybridrl.algorithms.masked import LOG_RATIO_LIMIT, exp_clamped, row_mean, select
from hybridrl.algorithms.partials import EffectiveSize, Max, Mean, Partial, max_of, mean_of, min_of


def batch_mismatch(columns: Mapping[str, Tensor], bounds: tuple[float, float] = (0.0, 2.0)) -> dict[str, Partial]:
    """`mismatch/...` of some rows: `mismatch_metrics`, and `max_gap`, the largest log-prob difference of any token.

    Args:
        columns: old_log_probs, rollout_log_probs, mask; correction_weights where a correction is applied.
        bounds: of the ratio; the shares of tokens outside are frac_below_lo and frac_above_hi.
    """
    old, rollout, mask = (columns[name] for name in ("old_log_probs", "rollout_log_probs", "mask"))
    weights = columns.get("correction_weights")
    correction = None if weights is None else Correction(weights, mask & (weights > 0))
    gap = (old.detach() - rollout).abs()
    gap = torch.where(mask & gap.isfinite(), gap, 0.0)
    metrics = mismatch_metrics(old, rollout, mask, correction, lo=bounds[0], hi=bounds[1])
    metrics |= {"max_gap": Max(gap.max() if gap.numel() else 0.0)}
    return {f"mismatch/{name}": value for name, value in metrics.items()}


@torch.no_grad()
def mismatch_metrics(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    correction: Correction | None = None,
    *,
    lo: float = 0.0,
    hi: float = 2.0,
) -> dict[str, Partial]:
    """Divergences, perplexities and weight statistics between trainer (old) and engine (rollout).

    Over trainable tokens: kl_k1, kl_k3, chi2_token, prob_diff_mean, prob_diff_max, frac_above_hi, frac_below_lo,
    frac_beyond_2 (a ratio above 2 or below 1/2: F(2) of arXiv:2510.11370), frac_kept. Over non-empty rows: ppl_old,
    ppl_rollout, log_ppl_diff_mean/_abs/_max/_min, ppl_ratio, chi2_seq.
    ess: of the weights applied, or of the raw ratios without a correction.

    Args:
        old_log_probs, rollout_log_probs: [B, R] float. mask: [B, R] bool, before any rejection.
        correction: what is applied. lo, hi: bounds of the fractions, on the ratio.
    Returns:
        name -> partial, to be merged and finalized.
    Raises:
        BatchError: shapes or dtypes don't fit.
    """
    check_tokens(mask, old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs)
    old, rollout = old_log_probs.double(), rollout_log_probs.double()
    usable = mask & old.isfinite() & rollout.isfinite()
    old, rollout = select(old, usable), select(rollout, usable)
    d = old - rollout
    metrics = _token_metrics(old, rollout, d, usable, lo, hi)
    metrics["frac_kept"] = mean_of((mask if correction is None else correction.keep).double(), mask)
    metrics["nonfinite_frac"] = Mean((mask & ~usable).sum(), mask.sum())
    metrics.update(_row_metrics(old, rollout, d, usable))
    weights = select(exp_clamped(d), usable) if correction is None else correction.weights.double()
    metrics["ess"] = EffectiveSize(weights.sum(), weights.square().sum(), mask.sum())
    return metrics


def _token_metrics(old: Tensor, rollout: Tensor, d: Tensor, mask: Tensor, lo: float, hi: float) -> dict[str, Partial]:
    clamped = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    rho, gap = clamped.exp(), (old.exp() - rollout.exp()).abs()
    return {
        "kl_k1": mean_of(-d, mask),
        "kl_k3": mean_of(torch.expm1(clamped) - d, mask),
        "chi2_token": mean_of(rho.square() - 1, mask),
        "prob_diff_mean": mean_of(gap, mask),
        "prob_diff_max": max_of(gap, mask),
        "frac_above_hi": mean_of((rho > hi).double(), mask),
        "frac_below_lo": mean_of((rho < lo).double(), mask),
        "frac_beyond_2": mean_of((d.abs() > math.log(2)).double(), mask),
    }


def _row_metrics(old: Tensor, rollout: Tensor, d: Tensor, mask: Tensor) -> dict[str, Partial]:
    rows = mask.any(dim=1)
    difference = row_mean(-d, mask)
    return {
        "ppl_old": mean_of(exp_clamped(-row_mean(old, mask)), rows),
        "ppl_rollout": mean_of(exp_clamped(-row_mean(rollout, mask)), rows),
        "log_ppl_diff_mean": mean_of(difference, rows),
        "log_ppl_diff_abs": mean_of(difference.abs(), rows),
        "log_ppl_diff_max": max_of(difference, rows),
        "log_ppl_diff_min": min_of(difference, rows),
        "ppl_ratio": mean_of(exp_clamped(difference), rows),
        "chi2_seq": mean_of(exp_clamped(d.sum(dim=1)).square() - 1, rows),
    }
