"""Policy losses without a hard clip of the surrogate: weighted log-probabilities and soft trust regions.

CISPO, AIPO, DPPO weigh -A * log_probs by a detached ratio, so only their gradient means anything. SAPO bends
the ratio with a sigmoid. Decoupled PPO puts a behaviour weight on the clipped surrogate.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.columns import check_tokens
from hybridrl.algorithms.corrections import token_tis
from hybridrl.algorithms.losses import (
    POLICY_LOSSES,
    PolicyLoss,
    PpoClipOptions,
    clean,
    fraction,
    masked_loss,
    ppo_clip,
)
from hybridrl.algorithms.masked import exp_clamped, select
from hybridrl.algorithms.partials import Mean
from hybridrl.algorithms.tables import option
from hybridrl.errors import ConfigError


@dataclass(kw_only=True)
class CispoOptions:
    ratio_min: float = option(0.0, ge=0)
    """Smallest weight, an absolute ratio."""
    ratio_max: float = option(5.0, gt=0)
    """Largest weight, an absolute ratio (1 + clip_high elsewhere)."""

    def validate(self) -> None:
        if self.ratio_min > self.ratio_max:
            raise ConfigError(f"ratio_min must be at most ratio_max = {self.ratio_max:g}, got {self.ratio_min:g}.")


@POLICY_LOSSES.register("cispo", options=CispoOptions, aggregation="token-mean", traits=("anchored",))
def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ratio_min: float = CispoOptions.ratio_min,
    ratio_max: float = CispoOptions.ratio_max,
) -> PolicyLoss:
    """Clipped weight, unclipped gradient: L = -sg(clip(rho, ratio_min, ratio_max)) * A * log_probs.

    Args:
        log_probs: [B, R] float, carries gradient. old_log_probs, advantages: [B, R] float. mask: [B, R] bool.
    Returns:
        PolicyLoss with metrics clipfrac_low, clipfrac_high, clipfrac: weights at a bound.
    Raises:
        BatchError: shapes or dtypes don't fit.
    Source: MiniMax-M1, arXiv:2506.13585.
    """
    tokens = clean(log_probs, old_log_probs, advantages, mask)
    ratio = exp_clamped(tokens.log_ratio.detach())
    loss = -(ratio.clamp(ratio_min, ratio_max) * tokens.advantages) * tokens.log_probs
    return masked_loss(loss, tokens, mask, **_clipfracs(ratio < ratio_min, ratio > ratio_max, mask))


def _clipfracs(low: Tensor, high: Tensor, mask: Tensor) -> dict[str, Mean]:
    return {"clipfrac_low": fraction(low, mask), "clipfrac_high": fraction(high, mask),
            "clipfrac": fraction(low | high, mask)}


@dataclass(kw_only=True)
class AipoOptions:
    ratio_max: float = option(4.0, gt=0)
    """Largest weight, 2 to 10."""


@POLICY_LOSSES.register("aipo", options=AipoOptions, aggregation="token-mean", traits=("behaviour_anchored",))
def aipo(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ratio_max: float = AipoOptions.ratio_max,
) -> PolicyLoss:
    """Truncated weight against the behaviour policy: L = -sg(min(exp(l - l_rollout), ratio_max)) * A * l.

    Needs no old log-probs. It already corrects for the behaviour policy: add no behaviour weight.
    Arguments, result and errors as `cispo`, with rollout_log_probs for old_log_probs.
    Source: LlamaRL, arXiv:2505.24034.
    """
    check_tokens(mask, rollout_log_probs=rollout_log_probs)
    return cispo(log_probs, rollout_log_probs, advantages, mask, ratio_min=0.0, ratio_max=ratio_max)


@dataclass(kw_only=True)
class SapoOptions:
    tau_positive: float = option(1.0, gt=0)
    """Temperature where the advantage is positive."""
    tau_negative: float = option(1.05, gt=0)
    """Temperature elsewhere; larger decays faster."""


@POLICY_LOSSES.register("sapo", options=SapoOptions, aggregation="seq-mean-token-mean", traits=("anchored",))
def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_positive: float = SapoOptions.tau_positive,
    tau_negative: float = SapoOptions.tau_negative,
) -> PolicyLoss:
    """Soft gate instead of a clip: L = -A (4 / tau) sigmoid(tau (rho - 1)).

    On-policy the gradient is -A; it decays smoothly on both sides. Arguments and errors as `cispo`.
    Source: SAPO, arXiv:2511.20347.
    """
    tokens = clean(log_probs, old_log_probs, advantages, mask)
    ratio = exp_clamped(tokens.log_ratio)
    tau = torch.where(tokens.advantages > 0, ratio.new_full((), tau_positive), ratio.new_full((), tau_negative))
    # exp of the logarithm: where the gate is nearly 1, the gradient of sigmoid itself is 1 minus a rounded 1
    gate = torch.nn.functional.logsigmoid(tau * (ratio - 1)).exp()
    return masked_loss(-tokens.advantages * (4 / tau) * gate, tokens, mask)


@dataclass(kw_only=True)
class DppoOptions:
    divergence: str = option("tv", choices=("tv", "kl"))
    """How far a token moved: the difference of its probabilities, or the KL of the token against all others."""
    delta_low: float = option(0.2, ge=0)
    """Largest divergence of a token that became less likely before a negative advantage stops acting on it."""
    delta_high: float = option(0.2, ge=0)
    """Largest divergence of a token that became more likely before a positive advantage stops acting on it."""
    ratio_max: float = option(20.0, gt=0)
    """Largest weight."""


@POLICY_LOSSES.register("dppo", options=DppoOptions, aggregation="token-mean", traits=("anchored",))
def dppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    divergence: str = DppoOptions.divergence,
    delta_low: float = DppoOptions.delta_low,
    delta_high: float = DppoOptions.delta_high,
    ratio_max: float = DppoOptions.ratio_max,
) -> PolicyLoss:
    """Trust region on probabilities: L = -keep * sg(min(rho, ratio_max)) * A * log_probs.

    keep = 0 where A > 0, p > p_old and div > delta_high, or A < 0, p < p_old and div > delta_low, p = exp(log_probs);
    div = |p - p_old| ("tv") or p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)) ("kl").
    Arguments and errors as `cispo`; metrics clipfrac_low, clipfrac_high are the shares dropped.
    Source: DPPO, binary TV and binary KL, arXiv:2602.04879.
    """
    tokens = clean(log_probs, old_log_probs, advantages, mask)
    now, d = tokens.log_probs.detach(), tokens.log_ratio.detach()
    rise = now.exp() - (now - d).exp() if divergence == "tv" else d.sign() * _binary_kl(now - d, now)
    too_high = (tokens.advantages > 0) & (rise > delta_high)
    too_low = (tokens.advantages < 0) & (-rise > delta_low)
    weight = torch.where(too_high | too_low, 0.0, exp_clamped(d).clamp(max=ratio_max))
    loss = -(weight * tokens.advantages) * tokens.log_probs
    return masked_loss(loss, tokens, mask, **_clipfracs(too_low, too_high, mask))


def _binary_kl(old: Tensor, now: Tensor) -> Tensor:
    """KL of coins that show heads with probability exp(old) and exp(now); tails keep at least 1e-8."""
    old_rest, rest = (-x.expm1().clamp(max=-1e-8) for x in (old, now))
    return old.exp() * (old - now) + old_rest * (old_rest / rest).log()


@dataclass(kw_only=True)
class DecoupledPpoOptions(PpoClipOptions):
    behaviour_cap: float = option(5.0, gt=0)
    """Truncation of the behaviour weight when no correction is chosen."""


def prepare_decoupled_ppo(columns: Mapping[str, Any], options: DecoupledPpoOptions) -> dict[str, Tensor]:
    """The behaviour weight: the chosen correction's, else the token weight truncated at `behaviour_cap`."""
    if columns.get("correction_weights") is not None:
        return {}
    given = (columns["old_log_probs"], columns["rollout_log_probs"], columns["mask"])
    return {"correction_weights": token_tis(*given, hi=options.behaviour_cap).weights}


@POLICY_LOSSES.register(
    "decoupled_ppo",
    options=DecoupledPpoOptions,
    prepare=prepare_decoupled_ppo,
    aggregation="token-mean",
    traits=("anchored", "behaviour_weight"),
)
def decoupled_ppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    correction_weights: Tensor,
    *,
    clip_low: float = DecoupledPpoOptions.clip_low,
    clip_high: float = DecoupledPpoOptions.clip_high,
    dual_clip: float | None = DecoupledPpoOptions.dual_clip,
    behaviour_cap: float = DecoupledPpoOptions.behaviour_cap,
) -> PolicyLoss:
    """Clipped surrogate around the proximal policy times a behaviour weight: L = w * ppo_clip.

    w corrects exp(old_log_probs - rollout_log_probs). It is the column `correction_weights` of the chosen
    correction, or what `prepare` makes with `behaviour_cap` when none is chosen.
    Arguments, result and errors as `ppo_clip`.
    Source: arXiv:2110.00641, AReaL 2505.24298.
    """
    check_tokens(mask, correction_weights=correction_weights)
    result = ppo_clip(
        log_probs,
        old_log_probs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    return PolicyLoss(result.loss * select(correction_weights.detach(), mask), result.metrics)
