"""What happens to rewards before the estimator: scale and clip, length penalty, KL penalty, filtering.

Order: `scale_rewards` (scale, bias, clip), `overlong_penalty` added, `kl_in_reward`, estimator. Dynamic
sampling looks at the raw outcome, before all of these.
"""

from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.columns import check_rows, check_tokens
from hybridrl.algorithms.kl import token_kl
from hybridrl.algorithms.masked import select
from hybridrl.errors import BatchError, ConfigError


def scale_rewards(rewards: Tensor, *, scale: float = 1.0, bias: float = 0.0, clip: float | None = None) -> Tensor:
    """clip(scale * r + bias, -clip, clip); NaN stays NaN.

    Args:
        rewards: [B] or [B, R] float.
    Returns:
        same shape and dtype.
    Raises:
        ConfigError: clip is not above 0.
    """
    if clip is not None and clip <= 0:
        raise ConfigError(f"clip must be above 0 or None, got {clip}.")
    shaped = rewards * scale + bias
    return shaped if clip is None else shaped.clamp(-clip, clip)


def overlong_penalty(lengths: Tensor, *, max_response_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Soft penalty of long responses, to be added to the outcome.

    0 up to max - buffer, then falling linearly to -factor at max, and -factor above. With buffer 0: 0 up to
    max, -factor above.

    Args:
        lengths: [B] integer, tokens the policy generated.
    Returns:
        [B] float32.
    Raises:
        ConfigError: buffer is not in [0, max_response_length].
    Source: DAPO, arXiv:2503.14476 (max 20480, buffer 4096).
    """
    if not 0 <= buffer <= max_response_length:
        raise ConfigError(f"buffer must be in [0, {max_response_length}], got {buffer}.")
    excess = (lengths - (max_response_length - buffer)).double()
    if buffer == 0:
        return torch.where(excess > 0, -float(factor), 0.0).float()
    return (-factor * (excess / buffer).clamp(0, 1)).float()


@torch.no_grad()
def kl_in_reward(
    token_rewards: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    *,
    kl_coef: float,
    estimator: str = "k1",
    options: Any = None,
) -> Tensor:
    """Subtract a per-token KL penalty: R' = R - kl_coef * kl(old_log_probs, ref_log_probs) on trainable tokens.

    Rewards on masked tokens are kept, to be folded later.

    Args:
        token_rewards, old_log_probs, ref_log_probs: [B, R] float. mask: [B, R] bool.
        estimator: a name of KL_ESTIMATORS, with its options.
    Returns:
        [B, R], dtype of `token_rewards`.
    Raises:
        ConfigError: unknown estimator. BatchError: shapes or dtypes don't fit.
    Source: arXiv:1909.08593, 2203.02155.
    """
    check_tokens(mask, token_rewards=token_rewards, old_log_probs=old_log_probs, ref_log_probs=ref_log_probs)
    penalty = token_kl(estimator, old_log_probs, ref_log_probs, mask, old_log_probs, options)
    return token_rewards - (kl_coef * select(penalty, mask)).to(token_rewards.dtype)


def drop_rows(mask: Tensor, rows: Tensor) -> Tensor:
    """Clear the mask of the rows where `rows` [B] bool is true: unscorable rows, or those cut by the length limit.

    They leave every denominator; their rewards still count in group statistics.

    Raises:
        BatchError: `rows` is not bool [B].
    """
    if rows.dtype != torch.bool or rows.shape != mask.shape[:1]:
        raise BatchError(f"'rows' must be bool [{mask.shape[0]}], got {rows.dtype} {list(rows.shape)}.")
    return mask & ~rows[:, None]


def unscorable(rewards: Tensor, mask: Tensor) -> Tensor:
    """[B] bool: rows whose reward is NaN or infinite."""
    check_rows(mask, rewards=rewards)
    return ~rewards.isfinite()
