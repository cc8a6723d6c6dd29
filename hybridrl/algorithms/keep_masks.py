"""Masks that switch tokens off in any policy loss: the table KEEP_MASKS.

Multiply a keep mask into `correction_weights`. Dropped tokens have no loss and stay in the denominators.
Entries with the trait "step" look at the current log-probs and are row-local: a worker applies them. The
others are statistics of the mini-batch and are computed once, before it is cut.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.algorithms.columns import check_tokens
from hybridrl.algorithms.masked import LOG_RATIO_LIMIT, log_ratio, row_mean
from hybridrl.algorithms.tables import Table, option

KEEP_MASKS = Table("keep mask")


@dataclass(kw_only=True)
class OffPolicySequenceOptions:
    delta: float = option(0.1, ge=0)
    """Largest mean fall of a row's log-probs at which negative advantages still act."""


@KEEP_MASKS.register("off_policy_sequence", options=OffPolicySequenceOptions, traits=("step",))
@torch.no_grad()
def off_policy_sequence_mask(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    delta: float = OffPolicySequenceOptions.delta,
) -> Tensor:
    """Drop negative tokens of rows that drifted: keep = not (A < 0 and mean_t(old - current) > delta).

    Args:
        log_probs, old_log_probs, advantages: [B, R] float, whole rows. mask: [B, R] bool.
    Returns:
        [B, R] bool, false where mask is false.
    Raises:
        BatchError: shapes or dtypes don't fit.
    Source: DeepSeek-V3.2, arXiv:2512.02556.
    """
    check_tokens(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    drift = row_mean(log_ratio(old_log_probs, log_probs, mask), mask)[:, None]
    return mask & ~((advantages < 0) & (drift > delta))


@dataclass(kw_only=True)
class SecondMomentOptions:
    threshold: float = option(0.04, gt=0)
    """The mean squared log-ratio of the tokens that are kept stays below this."""


@KEEP_MASKS.register("second_moment", options=SecondMomentOptions)
@torch.no_grad()
def second_moment_mask(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    threshold: float = SecondMomentOptions.threshold,
) -> Tensor:
    """Drop the tokens with the largest D^2 until the mean of the rest is below threshold.

    D = old_log_probs - rollout_log_probs, clamped to +/-20; tokens of equal D^2 go together.

    Args:
        old_log_probs, rollout_log_probs: [B, R] float, of the whole mini-batch. mask: [B, R] bool.
    Returns:
        [B, R] bool, false where mask is false.
    Raises:
        BatchError: shapes or dtypes don't fit.
    Source: M2PO, arXiv:2510.01161.
    """
    check_tokens(mask, old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs)
    ratio = log_ratio(old_log_probs.double(), rollout_log_probs.double(), mask)
    squares = ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).square()
    ordered = squares[mask].sort().values
    if ordered.numel() == 0:
        return mask.clone()
    means = ordered.cumsum(0) / torch.arange(1, ordered.numel() + 1, device=mask.device)
    # Means of a growing sorted prefix never fall, so the acceptable prefixes come first.
    num_kept = int((means < threshold).sum())
    if num_kept == ordered.numel():
        return mask.clone()
    return mask & (squares < ordered[num_kept])


@dataclass(kw_only=True)
class HighEntropyOptions:
    frac: float = option(0.2, gt=0, le=1)
    """Share of the mini-batch's tokens that are kept, at least one token."""


@KEEP_MASKS.register("high_entropy", options=HighEntropyOptions)
@torch.no_grad()
def high_entropy_mask(entropies: Tensor, mask: Tensor, *, frac: float = HighEntropyOptions.frac) -> Tensor:
    """Keep the tokens where the policy is least sure: entropy at or above the threshold of the top `frac`.

    Args:
        entropies: [B, R] float, of the whole mini-batch. mask: [B, R] bool.
    Returns:
        [B, R] bool, false where mask is false.
    Raises:
        BatchError: shapes or dtypes don't fit.
    Source: arXiv:2506.01939.
    """
    check_tokens(mask, entropies=entropies)
    values = entropies[mask].nan_to_num(nan=0.0)
    if values.numel() == 0:
        return mask.clone()
    threshold = values.topk(max(1, int(frac * values.numel()))).values[-1]
    return mask & (entropies.nan_to_num(nan=0.0) >= threshold)
