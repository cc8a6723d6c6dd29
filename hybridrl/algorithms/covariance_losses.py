"""Clip-Cov and KL-Cov: hold back the few tokens whose update costs the most entropy.

cov[b,t] = (A - mean A) * (l_old - mean l_old), means over the trainable tokens of the mini-batch. Which tokens
are chosen is a statistic of the mini-batch, so `prepare` chooses and the loss reads a column.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.columns import check_flags, check_tokens
from hybridrl.algorithms.losses import (
    POLICY_LOSSES,
    PolicyLoss,
    clean,
    clipped_surrogate,
    fraction,
    masked_loss,
)
from hybridrl.algorithms.masked import exp_clamped, finite, log_ratio, low_and_mean, select
from hybridrl.algorithms.tables import option
from hybridrl.errors import ConfigError


@torch.no_grad()
def token_covariance(advantages: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """cov [B, R] float64 of a whole mini-batch, zero where mask is false.

    Raises:
        BatchError: shapes or dtypes don't fit.
    Source: arXiv:2505.22617.
    """
    check_tokens(mask, advantages=advantages, old_log_probs=old_log_probs)
    score, lp = advantages.double(), old_log_probs.double()
    usable = mask & finite(score + lp)
    score, lp = (x - sum(low_and_mean(x[usable])) for x in (score, lp))
    return select(score * lp, usable)


def _quota(frac: float, mask: Tensor) -> int:
    """max(1, floor(frac * N)), at most N."""
    count = int(mask.sum())
    return min(count, max(1, int(frac * count)))


def _largest(among: Tensor, scores: Tensor, quota: int) -> Tensor:
    """[B, R] bool: the `quota` tokens of `among` with the largest scores, one number for each of its tokens."""
    winners = torch.zeros_like(scores, dtype=torch.bool)
    winners[scores.topk(min(quota, len(scores))).indices] = True
    return torch.zeros_like(among).masked_scatter(among, winners)


def _random_keys(old_log_probs: Tensor, advantages: Tensor, among: Tensor, seed: int) -> Tensor:
    """[N] int64 pseudo-random keys of the tokens of `among`, from each token's own numbers, column and the seed.

    Keys of content, not of position: the choice follows a row through permutation and padding, is the same on
    every rank, and differs from step to step because log-probs do.
    """
    bits, more = (x[among].float().view(torch.int32).long() for x in (old_log_probs, advantages))
    column = torch.arange(among.shape[1], device=among.device).expand_as(among)[among]
    keys = bits * 0x9E3779B1 + more * 0x85EBCA77 + column * 0xC2B2AE3D + seed * 0x27D4EB2F
    for multiplier in (0x2C1B3C6D297A2D39, 0x14057B7EF767814F):  # rounds of a multiply-xorshift mixer
        keys = (keys ^ (keys >> 29)) * multiplier
    return (keys ^ (keys >> 32)) & 0x7FFFFFFFFFFFFFFF


@dataclass(kw_only=True)
class ClipCovOptions:
    quota_frac: float = option(2e-4, gt=0, le=1)
    """Share of the mini-batch's tokens that are detached (at least one token)."""
    cov_low: float = 1.0
    """Only tokens with a larger covariance are candidates."""
    cov_high: float = 5.0
    """Only tokens with a smaller covariance are candidates."""
    clip_low: float = option(0.2, ge=0)
    """As in ppo_clip."""
    clip_high: float = option(0.2, ge=0)
    """As in ppo_clip."""
    seed: int = 0
    """Seed of the random choice among candidates."""

    def validate(self) -> None:
        if self.cov_low >= self.cov_high:
            raise ConfigError(f"cov_low must be below cov_high = {self.cov_high:g}, got {self.cov_low:g}.")


def prepare_clip_cov(columns: Mapping[str, Any], options: ClipCovOptions) -> dict[str, Tensor]:
    """Choose the tokens to detach, over the full mini-batch: column clip_cov_tokens [B, R] bool.

    Tokens that ppo_clip would clip are no candidates; that needs current log_probs of the mini-batch and is
    skipped when they are absent, as at the first optimizer step, where they equal old_log_probs.
    """
    advantages, old, mask = columns["advantages"], columns["old_log_probs"], columns["mask"]
    cov = token_covariance(advantages, old, mask)
    candidates = mask & (cov > options.cov_low) & (cov < options.cov_high)
    if columns.get("log_probs") is not None:
        ratio = exp_clamped(log_ratio(columns["log_probs"].detach(), old, mask))
        over = (advantages > 0) & (ratio > 1 + options.clip_high)
        candidates &= ~(over | ((advantages < 0) & (ratio < 1 - options.clip_low)))
    keys = _random_keys(old, advantages, candidates, options.seed)
    return {"clip_cov_tokens": _largest(candidates, keys, _quota(options.quota_frac, mask))}


@POLICY_LOSSES.register(
    "clip_cov",
    options=ClipCovOptions,
    prepare=prepare_clip_cov,
    aggregation="token-mean",
    traits=("anchored",),
)
def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_cov_tokens: Tensor,
    *,
    quota_frac: float = ClipCovOptions.quota_frac,
    cov_low: float = ClipCovOptions.cov_low,
    cov_high: float = ClipCovOptions.cov_high,
    clip_low: float = ClipCovOptions.clip_low,
    clip_high: float = ClipCovOptions.clip_high,
    seed: int = ClipCovOptions.seed,
) -> PolicyLoss:
    """ppo_clip with a few tokens of high covariance detached: their loss and gradient are 0.

    Detached tokens stay in the denominators. The choice is made by `prepare_clip_cov`.

    Args:
        clip_cov_tokens: [B, R] bool, from the entry's prepare. Others as `ppo_clip`.
    Returns:
        PolicyLoss with the metrics of ppo_clip and detached_frac.
    Raises:
        BatchError: a column is missing or has the wrong shape or dtype.
    Source: arXiv:2505.22617.
    """
    check_flags(mask, clip_cov_tokens=clip_cov_tokens)
    tokens = clean(log_probs, old_log_probs, advantages, mask)
    loss, metrics = clipped_surrogate(exp_clamped(tokens.log_ratio), tokens, mask, clip_low, clip_high, None)
    loss = torch.where(clip_cov_tokens, loss.new_zeros(()), loss)
    return masked_loss(loss, tokens, mask, **metrics, detached_frac=fraction(clip_cov_tokens, mask))


@dataclass(kw_only=True)
class KlCovOptions:
    quota_frac: float = option(2e-3, gt=0, le=1)
    """Share of the mini-batch's tokens that are penalized: 2e-3 up to about 10B parameters, 2e-4 above."""
    penalty: float = option(1.0, ge=0, lt=math.inf)
    """Weight of |log-ratio| on those tokens."""


def prepare_kl_cov(columns: Mapping[str, Any], options: KlCovOptions) -> dict[str, Tensor]:
    """Choose the tokens with the largest covariance over the full mini-batch: kl_cov_tokens [B, R] bool."""
    advantages, old, mask = columns["advantages"], columns["old_log_probs"], columns["mask"]
    cov, quota = token_covariance(advantages, old, mask), _quota(options.quota_frac, mask)
    if quota == 0:
        return {"kl_cov_tokens": torch.zeros_like(mask)}
    cut = cov[mask].topk(quota).values[-1]
    above, tied = mask & (cov > cut), mask & (cov == cut)
    keys = _random_keys(old, advantages, tied, 0)  # equal covariances draw lots
    return {"kl_cov_tokens": above | _largest(tied, keys, quota - int(above.sum()))}


@POLICY_LOSSES.register(
    "kl_cov", options=KlCovOptions, prepare=prepare_kl_cov, aggregation="token-mean", traits=("anchored",)
)
def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    kl_cov_tokens: Tensor,
    *,
    quota_frac: float = KlCovOptions.quota_frac,
    penalty: float = KlCovOptions.penalty,
) -> PolicyLoss:
    """Unclipped surrogate, penalized on tokens of the largest covariance: L = -A rho (+ penalty * |D|).

    D = log_probs - old_log_probs. The choice is made by `prepare_kl_cov`.

    Args:
        kl_cov_tokens: [B, R] bool, from the entry's prepare. Others as `ppo_clip`.
    Returns:
        PolicyLoss with metric penalized_frac.
    Raises:
        BatchError: a column is missing or has the wrong shape or dtype.
    Source: arXiv:2505.22617.
    """
    check_flags(mask, kl_cov_tokens=kl_cov_tokens)
    tokens = clean(log_probs, old_log_probs, advantages, mask)
    loss = -tokens.advantages * exp_clamped(tokens.log_ratio)
    loss = loss + torch.where(kl_cov_tokens, penalty * tokens.log_ratio.abs(), loss.new_zeros(()))
    return masked_loss(loss, tokens, mask, penalized_frac=fraction(kl_cov_tokens, mask))
