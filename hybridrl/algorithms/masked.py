"""Masked arithmetic on [B, R] tensors: select, log-ratio, row means, whitening.

Masked positions may hold NaN or infinity, so values are always selected, never multiplied by the mask.
"""

import torch
from torch import Tensor

from hybridrl.algorithms.columns import check_tokens

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +/- this before exponentiation; no gradient beyond it."""


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or float64 if it already is."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def select(x: Tensor, mask: Tensor) -> Tensor:
    """x where mask is true, 0 elsewhere, in at least float32; masked values get zero gradient."""
    x = at_least_float32(x)
    return torch.where(mask, x, x.new_zeros(()))


def finite(x: Tensor) -> Tensor:
    """isfinite(x) in two passes instead of five: x - x is 0 for a number and NaN for anything else."""
    x = x.detach()
    return (x - x) == 0


def count_true(flags: Tensor) -> Tensor:
    """Number of true entries (0-d int64); sum() would first make an integer copy."""
    return flags.count_nonzero()


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """numerator - denominator on trainable tokens, 0 elsewhere and where the difference is not finite.

    A token of probability 0 belongs to a row that should have been rejected (`reject_nonfinite`); here it is
    neutral and without gradient, so that inf - inf never reaches a loss. Not clamped.
    """
    difference = at_least_float32(numerator) - at_least_float32(denominator)
    return torch.where(mask & finite(difference), difference, difference.new_zeros(()))


def exp_clamped(log_ratios: Tensor) -> Tensor:
    """exp(clamp(x, -20, 20)); zero gradient where the clamp acts."""
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def reject_nonfinite(mask: Tensor, *log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Clear the mask of rows that have a non-finite log-probability on a trainable token.

    Args:
        mask: [B, R] bool.
        log_probs: any number of [B, R] tensors.
    Returns:
        the new mask [B, R] bool, and the number of rows rejected (0-d int64) for the log.
    """
    bad = torch.zeros_like(mask)
    for values in log_probs:
        bad = bad | (mask & ~values.isfinite())
    rows = bad.any(dim=1)
    return mask & ~rows[:, None], rows.sum()


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """[B] mean over trainable tokens, summed in float64; 0 for a row without any."""
    count = mask.count_nonzero(dim=1)
    total = select(x, mask).sum(dim=1, dtype=torch.float64)
    return total / count.clamp(min=1)


def last_trainable(mask: Tensor) -> Tensor:
    """[B] column of the last trainable token; -1 for a row without any."""
    if mask.shape[1] == 0:
        return torch.full((mask.shape[0],), -1, dtype=torch.int64, device=mask.device)
    return torch.where(mask, _columns(mask), -1).amax(dim=1).long()


def first_trainable(mask: Tensor) -> Tensor:
    """[B] column of the first trainable token; -1 for a row without any."""
    width = mask.shape[1]
    if width == 0:
        return torch.full((mask.shape[0],), -1, dtype=torch.int64, device=mask.device)
    first = torch.where(mask, _columns(mask), width).amin(dim=1).long()
    return torch.where(first < width, first, -1)


def _columns(mask: Tensor) -> Tensor:
    return torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device)


def centre(values: Tensor) -> Tensor:
    """Values of a 1-d float64 tensor minus their mean.

    The smallest value goes first, so equal values give exactly 0 and a huge common offset does not matter.
    """
    low, above = low_and_mean(values)
    return (values - low) - above


def low_and_mean(values: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest entry (0-d) of a 1-d float64 tensor and how far the mean lies above; 0, 0 if empty."""
    if values.numel() == 0:
        return values.new_zeros(()), values.new_zeros(())
    low = values.min()
    return low, (values - low).mean()


def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Standardize over all trainable tokens: (x - mean) / sqrt(var + 1e-8).

    var divides by N - 1 and both passes run in float64. Constant values, or fewer than two tokens, give 0.
    With shift_mean false the mean is added back.

    Args:
        x: [B, R] float.
        mask: [B, R] bool, tokens that count; on a controller this is the whole batch over all ranks.
    Returns:
        [B, R] float64, zero where mask is false.
    Raises:
        BatchError: shapes or dtypes don't fit.
    """
    check_tokens(mask, x=x)
    wide, count = x.double(), mask.count_nonzero()
    # Whole-tensor passes are several times faster than gathering the trainable tokens and putting them back.
    low = torch.where(mask, wide, torch.inf).amin() if wide.numel() else wide.sum()
    shifted = select(wide - low, mask)
    above = shifted.sum() / count.clamp(min=1)
    centred = select(shifted - above, mask)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    white = centred / (variance + 1e-8).sqrt()
    return white if shift_mean else select(white + (low + above), mask)
