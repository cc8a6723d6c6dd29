"""Policy losses whose ratio belongs to the whole row: GSPO, GMPO and the product ratio of RLOO.

A row must not be split between pieces of a mini-batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.algorithms.columns import check_tokens
from hybridrl.algorithms.losses import (
    POLICY_LOSSES,
    PolicyLoss,
    PpoClipOptions,
    Tokens,
    clean,
    clipped_surrogate,
    fraction,
    masked_loss,
)
from hybridrl.algorithms.masked import LOG_RATIO_LIMIT, count_true, exp_clamped, row_mean, select
from hybridrl.algorithms.partials import Mean
from hybridrl.algorithms.tables import option


@dataclass(kw_only=True)
class GspoOptions:
    clip_low: float = option(3e-4, ge=0)
    """Lower range of the geometric mean ratio; small, because a mean over tokens hardly moves."""
    clip_high: float = option(4e-4, ge=0)
    """Upper range of the geometric mean ratio."""


@POLICY_LOSSES.register("gspo", options=GspoOptions, aggregation="seq-mean-token-mean", traits=("anchored",))
def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = GspoOptions.clip_low,
    clip_high: float = GspoOptions.clip_high,
) -> PolicyLoss:
    """Clipped surrogate of the row's geometric mean ratio, with gradient spread over its tokens.

    s_b = exp(mean_t D), s_{b,t} = sg(s_b) * exp(log_probs - sg(log_probs)), D = log_probs - old_log_probs;
    L = max(-A s_{b,t}, -A clip(s_{b,t}, 1 - clip_low, 1 + clip_high)).

    Args:
        log_probs: [B, R] float, carries gradient. old_log_probs, advantages: [B, R] float. mask: [B, R] bool.
    Returns:
        PolicyLoss with metrics clipfrac_low, clipfrac_high, clipfrac.
    Raises:
        BatchError: shapes or dtypes don't fit.
    Source: GSPO, arXiv:2507.18071.
    """
    tokens = clean(log_probs, old_log_probs, advantages, mask)
    total = tokens.log_ratio.detach().sum(dim=1, keepdim=True, dtype=torch.float64)
    mean = (total / mask.count_nonzero(dim=1)[:, None].clamp(min=1)).to(tokens.log_ratio.dtype)
    ratio = exp_clamped(mean) * _unit_with_gradient(tokens, mean.abs() <= LOG_RATIO_LIMIT)
    loss, metrics = clipped_surrogate(ratio, tokens, mask, clip_low, clip_high, None)
    return masked_loss(loss, tokens, mask, **metrics)


def _unit_with_gradient(tokens: Tokens, alive: Tensor) -> Tensor:
    """Ones whose gradient is that of log_probs: exp(l - sg(l)) without the exponential; none where not alive."""
    moved = tokens.log_ratio - tokens.log_ratio.detach()
    return 1 + torch.where(alive, moved, 0.0)


@dataclass(kw_only=True)
class GmpoOptions:
    clip_low: float = option(0.4, ge=0)
    """Smallest log-ratio is -clip_low where the advantage is not positive."""
    clip_high: float = option(0.4, ge=0)
    """Largest log-ratio is clip_high where the advantage is positive."""


@POLICY_LOSSES.register("gmpo", options=GmpoOptions, aggregation="seq-mean-token-mean", traits=("anchored",))
def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    correction_weights: Tensor | None = None,
    *,
    clip_low: float = GmpoOptions.clip_low,
    clip_high: float = GmpoOptions.clip_high,
) -> PolicyLoss:
    """Geometric mean of ratios clipped per token in log space: row loss -A_b exp(mean_t z_t).

    z_t = min(D_t, clip_high) where A > 0, max(D_t, -clip_low) elsewhere; A_b = mean_t A. The row loss stands on
    every trainable token, so that "seq-mean-token-mean" averages it over non-empty rows. Tokens whose correction
    weight is 0 leave the means; other weights enter as their geometric mean.

    Args:
        log_probs: [B, R] float, carries gradient. old_log_probs, advantages: [B, R] float. mask: [B, R] bool.
        correction_weights: [B, R] float, weight times keep mask.
    Returns:
        PolicyLoss with metrics clipfrac_low, clipfrac_high, clipfrac.
    Raises:
        BatchError: shapes or dtypes don't fit.
    Source: GMPO, arXiv:2507.20673.
    """
    tokens = clean(log_probs, old_log_probs, advantages, mask)
    kept, d, up = tokens.usable, tokens.log_ratio, tokens.advantages > 0
    over, under = up & (d > clip_high), ~up & (d < -clip_low)
    z = torch.where(up, d.clamp(max=clip_high), d.clamp(min=-clip_low))
    if correction_weights is not None:
        check_tokens(mask, correction_weights=correction_weights)
        weights = select(correction_weights.detach(), mask)
        kept = kept & (weights > 0)
    ratio = exp_clamped(row_mean(z, kept))
    if correction_weights is not None:
        ratio = ratio * row_mean(torch.where(kept, weights, 1.0).log(), kept).exp()
    row_loss = -(row_mean(tokens.advantages, kept) * ratio).to(d.dtype)
    loss = select(row_loss[:, None].expand(mask.shape), mask)
    metrics = {
        "clipfrac_low": fraction(under, mask),
        "clipfrac_high": fraction(over, mask),
        "clipfrac": fraction(over | under, mask),
        "nonfinite_frac": Mean(count_true(mask) - count_true(tokens.usable), count_true(mask)),
    }
    return PolicyLoss(loss, metrics)


@POLICY_LOSSES.register(
    "sequence_clip", options=PpoClipOptions, aggregation="seq-mean-token-mean", traits=("anchored",)
)
def sequence_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = PpoClipOptions.clip_low,
    clip_high: float = PpoClipOptions.clip_high,
    dual_clip: float | None = PpoClipOptions.dual_clip,
) -> PolicyLoss:
    """The response as one action: clipped surrogate of the product ratio exp(sum_t D), for RLOO.

    The row loss stands on every trainable token, so that "seq-mean-token-mean" is the mean over sequences.
    Arguments, result and errors as `ppo_clip`.
    Source: RLOO, arXiv:2402.14740.
    """
    tokens = clean(log_probs, old_log_probs, advantages, mask)
    total = tokens.log_ratio.sum(dim=1, keepdim=True, dtype=torch.float64)
    ratio = exp_clamped(total).to(tokens.log_ratio.dtype).expand(mask.shape)
    loss, metrics = clipped_surrogate(ratio, tokens, mask, clip_low, clip_high, dual_clip)
    return masked_loss(loss, tokens, mask, **metrics)
