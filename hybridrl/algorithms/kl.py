"""Divergence of the policy from a reference: the table KL_ESTIMATORS and coefficient controllers.

d = log_probs - ref_log_probs of the sampled token. The value and the gradient of an estimator are different
questions: k1 and k3 have the right mean, but only k2's gradient (and that of the "+" variants, which
back-propagate k2) is that of KL(policy || reference). See arXiv:2506.09477 and 2510.01555.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.columns import check_tokens
from hybridrl.algorithms.masked import LOG_RATIO_LIMIT, exp_clamped, log_ratio, row_mean
from hybridrl.algorithms.tables import Table
from hybridrl.errors import ConfigError

KL_ESTIMATORS = Table("kl estimator")

K3_CAP = 10.0
"""k3 saturates here, with zero gradient above."""


def token_kl(
    name: str,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    old_log_probs: Tensor | None = None,
    options: Any = None,
) -> Tensor:
    """Per-token estimate [B, R] of KL(policy || reference) by estimator `name`, zero where mask is false.

    Raises:
        ConfigError: unknown name or option. BatchError: shapes or dtypes don't fit, or old_log_probs is missing.
    """
    columns = {"log_probs": log_probs, "ref_log_probs": ref_log_probs, "mask": mask}
    return KL_ESTIMATORS.call(name, options, {**columns, "old_log_probs": old_log_probs})


def _difference(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    check_tokens(mask, log_probs=log_probs, ref_log_probs=ref_log_probs)
    return log_ratio(log_probs, ref_log_probs.detach(), mask)


def k3_value(d: Tensor) -> Tensor:
    """exp(-d) + d - 1, at least 0, capped at 10 with zero gradient above the cap.

    Computed in float64: for small d the terms cancel to d^2/2, below float32's resolution of 1.
    """
    wide = d.double()
    return (torch.expm1(-wide.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) + wide).clamp(max=K3_CAP).to(d.dtype)


@KL_ESTIMATORS.register("k1")
def k1(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """d. Unbiased value; its expected gradient is 0, so it is useless as a loss.

    Args:
        log_probs: [B, R] float, carries gradient. ref_log_probs: [B, R] float. mask: [B, R] bool.
    Returns:
        [B, R], at least float32, zero where mask is false.
    Raises:
        BatchError: shapes or dtypes don't fit.
    Source: Schulman 2020, "Approximating KL divergence".
    """
    return _difference(log_probs, ref_log_probs, mask)


@KL_ESTIMATORS.register("abs")
def absolute(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """|d|. Arguments, result and errors as `k1`."""
    return _difference(log_probs, ref_log_probs, mask).abs()


@KL_ESTIMATORS.register("k2")
def k2(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """d^2 / 2. Biased value, exact gradient on-policy. Arguments, result and errors as `k1`."""
    return _difference(log_probs, ref_log_probs, mask).square() / 2


@KL_ESTIMATORS.register("k3")
def k3(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """exp(-d) + d - 1. Unbiased, never negative; its gradient is that of KL(reference || policy).

    Capped at 10 (see `k3_capped`). Arguments, result and errors as `k1`.
    """
    return k3_value(_difference(log_probs, ref_log_probs, mask))


def k3_capped(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """[B, R] bool: trainable tokens where k3 reached its cap, for the log."""
    with torch.no_grad():
        return (k3_value(_difference(log_probs, ref_log_probs, mask)) >= K3_CAP) & mask


def _straight_through(value: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def estimator(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
        d = _difference(log_probs, ref_log_probs, mask)
        gradient = d.square() / 2
        return value(d.detach()) + (gradient - gradient.detach())

    estimator.__doc__ = "Value of the estimator without '+', gradient of k2. Otherwise as `k1`."
    return estimator


k1_plus = KL_ESTIMATORS.register("k1+")(_straight_through(lambda d: d))
abs_plus = KL_ESTIMATORS.register("abs+")(_straight_through(lambda d: d.abs()))
k2_plus = KL_ESTIMATORS.register("k2+")(_straight_through(lambda d: d.square() / 2))
k3_plus = KL_ESTIMATORS.register("k3+")(_straight_through(k3_value))


@KL_ESTIMATORS.register("rho_k3")
def rho_k3(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, old_log_probs: Tensor) -> Tensor:
    """rho * k3 with rho = exp(log_probs - old_log_probs) not detached: exact gradient also off-policy.

    Args and errors as `k1`, and old_log_probs: [B, R] float.
    Source: DeepSeek-V3.2, arXiv:2512.02556.
    """
    check_tokens(mask, log_probs=log_probs, old_log_probs=old_log_probs)
    rho = exp_clamped(log_ratio(log_probs, old_log_probs.detach(), mask))
    return rho * k3_value(_difference(log_probs, ref_log_probs, mask))


@torch.no_grad()
def batch_kl(old_log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> float:
    """Mean over non-empty rows of the row's token-mean k1: what `AdaptiveKL.update` takes; 0 without rows."""
    check_tokens(mask, old_log_probs=old_log_probs, ref_log_probs=ref_log_probs)
    # Differences of both signs may cancel in a mean: float64 before subtracting.
    rows = row_mean(log_ratio(old_log_probs.double(), ref_log_probs.double(), mask), mask)
    return float(rows.sum() / mask.any(dim=1).sum().clamp(min=1))


class FixedKL:
    """A constant KL coefficient."""

    def __init__(self, kl_coef: float):
        if kl_coef < 0:
            raise ConfigError(f"kl_coef must be at least 0, got {kl_coef}.")
        self.kl_coef = kl_coef

    def update(self, kl: float, num_responses: int) -> float:
        """The coefficient, unchanged."""
        return self.kl_coef

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must hold."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.kl_coef = float(state["kl_coef"])


class AdaptiveKL(FixedKL):
    """A KL coefficient steered towards a target.

    After each batch e = clip(kl / target - 1, -0.2, 0.2) and kl_coef <- kl_coef * (1 + e * n / horizon), n
    the number of responses. `kl` is a mean of row token-means (`batch_kl`); choose the target on that scale.
    Source: arXiv:1909.08593.
    """

    def __init__(self, kl_coef: float, target: float, horizon: float = 10_000.0):
        super().__init__(kl_coef)
        if target <= 0 or horizon <= 0:
            raise ConfigError(f"target and horizon must be above 0, got {target} and {horizon}.")
        self.target, self.horizon = target, horizon

    def update(self, kl: float, num_responses: int) -> float:
        """Move the coefficient after a batch and return it."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.kl_coef *= 1 + error * num_responses / self.horizon
        return self.kl_coef
