"""The sampled and the trained distribution differ: weights and keep masks that correct for it.

rho_t = exp(old_log_probs - rollout_log_probs). A scheme of the table CORRECTIONS gives a weight and a keep
mask per token, both constants; the loss is multiplied by weight * keep (the column `correction_weights`)
after clipping, and denominators don't change. Bounds lo and hi are inclusive and bound the ratio itself.

Token weights are biased with low variance; the product over a row is unbiased, but its variance grows with
length and a fixed threshold rejects long answers first. The geometric mask is a filter that does not depend
on length. Recommended together: "geometric_mask" and "token_tis".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridrl.algorithms.columns import check_mask, check_tokens, need
from hybridrl.algorithms.masked import LOG_RATIO_LIMIT, finite, log_ratio, row_mean, select
from hybridrl.algorithms.tables import Table, option
from hybridrl.errors import ConfigError

CORRECTIONS = Table("correction")

SELF_NORMALISE_FLOOR = 1e-8
"""A mean weight below this is not divided by."""


class Correction(NamedTuple):
    """Weights and keep mask of a scheme; weights are 0 where keep is false."""

    weights: Tensor
    """[B, R] float32 (float64 for float64 log-probs)."""
    keep: Tensor
    """[B, R] bool, false where mask is false."""


class Ratios(NamedTuple):
    """Log-ratios of a batch in the three forms that schemes bound, float64."""

    log: Tensor
    """[B, R], 0 on masked tokens."""
    log_product: Tensor
    """[B, 1], sum over trainable tokens, clamped to +/-20."""
    log_mean: Tensor
    """[B, 1], mean over trainable tokens, clamped to +/-20."""
    mask: Tensor
    """[B, R] bool, tokens of rows whose log-probs are all finite."""
    dtype: torch.dtype


def _ratios(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Ratios:
    check_tokens(mask, old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs)
    old, rollout = old_log_probs.detach().double(), rollout_log_probs.detach().double()
    # A row with a token of probability 0 can't be weighed: it is rejected whole.
    broken = (mask & ~finite(old - rollout)).any(dim=1, keepdim=True)
    mask = mask & ~broken
    log = log_ratio(old, rollout, mask)
    limit = LOG_RATIO_LIMIT
    product = log.sum(dim=1, keepdim=True).clamp(-limit, limit)
    mean = row_mean(log, mask)[:, None].clamp(-limit, limit)
    wide = torch.float64 in (old_log_probs.dtype, rollout_log_probs.dtype)
    return Ratios(log.clamp(-limit, limit), product, mean, mask, torch.float64 if wide else torch.float32)


def _correction(ratios: Ratios, weights: Tensor | None, keep: Tensor | None) -> Correction:
    """Spread [B, 1] or [B, R] weights and keeps over trainable tokens; None means 1."""
    kept = ratios.mask if keep is None else ratios.mask & keep
    weights = torch.ones_like(ratios.log) if weights is None else weights.expand_as(ratios.log)
    return Correction(select(weights, kept).to(ratios.dtype), kept)


def _inside(ratio: Tensor, lo: float, hi: float | None) -> Tensor:
    return (ratio >= lo) & (ratio <= (torch.inf if hi is None else hi))


class Bounds:
    """Options with lo and hi."""

    lo: float
    hi: float | None

    def validate(self) -> None:
        """Raise ConfigError when lo is above hi."""
        if self.hi is not None and self.lo > self.hi:
            raise ConfigError(f"lo must be at most hi = {self.hi:g}, got {self.lo:g}.")


@dataclass(kw_only=True)
class TisOptions(Bounds):
    lo: float = option(0.0, ge=0)
    """Smallest weight."""
    hi: float | None = option(2.0, gt=0)
    """Largest weight; null: none."""


@CORRECTIONS.register("token_tis", options=TisOptions, traits=("weight", "token"))
@torch.no_grad()
def token_tis(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    lo: float = TisOptions.lo,
    hi: float | None = TisOptions.hi,
) -> Correction:
    """Truncated importance weight of each token: w = clip(rho_t, lo, hi), k = 1.

    Args:
        old_log_probs: [B, R] float, of the trainer before the update.
        rollout_log_probs: [B, R] float, reported by the engine at sampling time.
        mask: [B, R] bool.
    Returns:
        Correction; rows without trainable tokens, or with a token of probability 0, have w = k = 0.
    Raises:
        ConfigError: lo above hi. BatchError: shapes or dtypes don't fit.
    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    ratios = _ratios(old_log_probs, rollout_log_probs, mask)
    return _correction(ratios, ratios.log.exp().clamp(lo, hi), None)


@CORRECTIONS.register("sequence_tis", options=TisOptions, traits=("weight", "sequence"))
@torch.no_grad()
def sequence_tis(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    lo: float = TisOptions.lo,
    hi: float | None = TisOptions.hi,
) -> Correction:
    """Truncated importance weight of the row: w = clip(prod rho_t, lo, hi) on all its tokens, k = 1.

    Arguments, result and errors as `token_tis`.
    """
    ratios = _ratios(old_log_probs, rollout_log_probs, mask)
    return _correction(ratios, ratios.log_product.exp().clamp(lo, hi), None)


@dataclass(kw_only=True)
class IcePopOptions(Bounds):
    lo: float = option(0.5, ge=0)
    """Smallest ratio that is kept."""
    hi: float | None = option(5.0, gt=0)
    """Largest ratio that is kept; null: none."""


@CORRECTIONS.register("icepop", options=IcePopOptions, traits=("weight", "token"))
@torch.no_grad()
def icepop(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    lo: float = IcePopOptions.lo,
    hi: float | None = IcePopOptions.hi,
) -> Correction:
    """Importance weight inside a band, nothing outside: w = rho_t, k = lo <= rho_t <= hi.

    Arguments, result and errors as `token_tis`.
    Source: IcePop, arXiv:2510.18855.
    """
    ratios = _ratios(old_log_probs, rollout_log_probs, mask)
    rho = ratios.log.exp()
    return _correction(ratios, rho, _inside(rho, lo, hi))


@dataclass(kw_only=True)
class BandOptions(Bounds):
    lo: float = option(0.5, ge=0)
    """Smallest ratio that is kept."""
    hi: float | None = option(2.0, gt=0)
    """Largest ratio that is kept; null: none."""


@CORRECTIONS.register("token_band", options=BandOptions, traits=("token",))
@torch.no_grad()
def token_band(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    lo: float = BandOptions.lo,
    hi: float | None = BandOptions.hi,
) -> Correction:
    """Drop tokens outside a band, without a weight: w = 1, k = lo <= rho_t <= hi.

    Arguments, result and errors as `token_tis`.
    """
    ratios = _ratios(old_log_probs, rollout_log_probs, mask)
    return _correction(ratios, None, _inside(ratios.log.exp(), lo, hi))


@CORRECTIONS.register("sequence_mask", options=BandOptions, traits=("weight", "sequence"))
@torch.no_grad()
def sequence_mask(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    lo: float = BandOptions.lo,
    hi: float | None = BandOptions.hi,
) -> Correction:
    """Weigh a row by its product if that lies in a band, else drop it: w = prod rho, k = lo <= prod rho <= hi.

    Arguments, result and errors as `token_tis`.
    Source: Liu, Li et al. 2025, "When speed kills stability".
    """
    ratios = _ratios(old_log_probs, rollout_log_probs, mask)
    product = ratios.log_product.exp()
    return _correction(ratios, product, _inside(product, lo, hi))


@dataclass(kw_only=True)
class GeometricOptions(Bounds):
    lo: float = option(0.999, ge=0)
    """Smallest geometric mean that is kept (0.99 for stale data)."""
    hi: float | None = option(1.001, gt=0)
    """Largest geometric mean that is kept (1.01 for stale data); null: none."""


@CORRECTIONS.register("geometric_mask", options=GeometricOptions, traits=("sequence",))
@torch.no_grad()
def geometric_mask(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    lo: float = GeometricOptions.lo,
    hi: float | None = GeometricOptions.hi,
) -> Correction:
    """Drop rows whose geometric mean ratio leaves a band: w = 1, k = lo <= exp(mean_t log rho_t) <= hi.

    Arguments, result and errors as `token_tis`.
    """
    ratios = _ratios(old_log_probs, rollout_log_probs, mask)
    return _correction(ratios, None, _inside(ratios.log_mean.exp(), lo, hi))


@dataclass(kw_only=True)
class K3MaskOptions:
    hi: float = option(0.01, gt=0)
    """Largest mean k3 of a row that is kept."""


@CORRECTIONS.register("k3_mask", options=K3MaskOptions, traits=("sequence",))
@torch.no_grad()
def k3_mask(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, hi: float = K3MaskOptions.hi
) -> Correction:
    """Drop rows of large divergence: w = 1, k = mean_t(rho_t - log rho_t - 1) <= hi.

    Arguments, result and errors as `token_tis`.
    """
    ratios = _ratios(old_log_probs, rollout_log_probs, mask)
    divergence = row_mean(torch.expm1(ratios.log) - ratios.log, ratios.mask)[:, None]
    return _correction(ratios, None, divergence <= hi)


@dataclass(kw_only=True)
class MaxK2MaskOptions:
    hi: float = option(2.0, gt=0)
    """Largest squared log-ratio over 2 of a row that is kept."""


@CORRECTIONS.register("max_k2_mask", options=MaxK2MaskOptions, traits=("sequence",))
@torch.no_grad()
def max_k2_mask(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, hi: float = MaxK2MaskOptions.hi
) -> Correction:
    """Drop rows with one strongly diverging token: w = 1, k = max_t (log rho_t)^2 / 2 <= hi.

    Arguments, result and errors as `token_tis`.
    """
    ratios = _ratios(old_log_probs, rollout_log_probs, mask)
    return _correction(ratios, None, (ratios.log.square() / 2 <= hi).all(dim=1, keepdim=True))


@dataclass(kw_only=True)
class VetoOptions:
    hi: float = option(1e-4, ge=0)
    """A row with a token ratio below this is dropped."""


@CORRECTIONS.register("veto", options=VetoOptions, traits=("sequence",))
@torch.no_grad()
def veto(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, hi: float = VetoOptions.hi) -> Correction:
    """Drop rows with a token the trainer finds nearly impossible: w = 1, k = min_t rho_t >= hi.

    Arguments, result and errors as `token_tis`.
    """
    ratios = _ratios(old_log_probs, rollout_log_probs, mask)
    # Masked tokens hold log-ratio 0, which passes only while hi <= 1; they must pass always.
    passes = (ratios.log.exp() >= hi) | ~ratios.mask
    return _correction(ratios, None, passes.all(dim=1, keepdim=True))


def correct(
    schemes: Mapping[str, Any] | Sequence[str], columns: Mapping[str, Any], *, self_normalise: bool = False
) -> Correction:
    """Combine schemes: multiply weights, AND keeps; optionally divide by the mean weight.

    Call it on the whole batch. `weights` is the column `correction_weights` of the losses.

    Args:
        schemes: names, or name -> options. No scheme gives w = k = mask.
        columns: old_log_probs, rollout_log_probs, mask.
    Raises:
        ConfigError: unknown scheme or option, or more than one scheme with a weight.
        BatchError: a column is missing or has the wrong shape or dtype.
    """
    if isinstance(schemes, str):
        raise ConfigError(f"schemes must be a list of names, or a mapping from name to options, got {schemes!r}.")
    chosen = dict(schemes) if isinstance(schemes, Mapping) else dict.fromkeys(schemes)
    weighing = [name for name in chosen if "weight" in CORRECTIONS[name].traits]
    if len(weighing) > 1:
        raise ConfigError(f"at most one correction may carry a weight, got {weighing}; combine it with masks.")
    mask = need("correct", "mask", columns.get("mask"))
    check_mask(mask)
    weights, keep = torch.ones_like(mask, dtype=torch.float32), mask
    for name, options in chosen.items():
        one = CORRECTIONS.call(name, options, columns)
        weights, keep = weights * one.weights, keep & one.keep
    combined = Correction(select(weights, keep), keep)
    if not self_normalise:
        return combined
    deciding = weighing or list(chosen)  # the scheme with the weight, or else all masks
    per_row = bool(deciding) and all("sequence" in CORRECTIONS[name].traits for name in deciding)
    return self_normalised(combined, mask, per_row=per_row)


@torch.no_grad()
def self_normalised(correction: Correction, mask: Tensor, *, per_row: bool = False) -> Correction:
    """Divide weights by their mean over trainable tokens, or over non-empty rows of the row weight.

    The mean counts rejected tokens (weight 0) and runs over the whole batch; below 1e-8 nothing is divided.

    Args:
        correction: weights and keep of a batch. mask: [B, R] bool. per_row: the weight is one per row.
    Returns:
        Correction with new weights.
    """
    wide = correction.weights.double()
    if per_row:
        mean = wide.amax(dim=1).sum() / mask.any(dim=1).sum().clamp(min=1) if wide.shape[1] else wide.sum()
    else:
        mean = wide.sum() / mask.sum().clamp(min=1)
    scale = torch.where(mean < SELF_NORMALISE_FLOOR, 1.0, mean)
    return Correction((wide / scale).to(correction.weights.dtype), correction.keep)
