"""Per-token policy losses: the table POLICY_LOSSES and the members of the clipped and plain gradient family.

A loss is row-local: it never looks across rows, so a mini-batch may be cut anywhere between rows. What needs
the whole mini-batch (a quota, a threshold) is computed by the entry's `prepare` and passed as a column.
A loss function returns L [B, R]; the loss of the mini-batch is sum(c * L) with c from AGGREGATIONS.

`policy_loss` is the call a worker makes: it adds the correction weights and the metrics.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridrl.algorithms.columns import check_tokens, need
from hybridrl.algorithms.keep_masks import KEEP_MASKS
from hybridrl.algorithms.masked import at_least_float32, count_true, exp_clamped, finite, select
from hybridrl.algorithms.partials import Mean
from hybridrl.algorithms.tables import Table, option
from hybridrl.errors import ConfigError, unknown

POLICY_LOSSES = Table("policy loss")


class PolicyLoss(NamedTuple):
    """What a policy loss returns."""

    loss: Tensor
    """[B, R], to be minimised; zero where mask is false."""
    metrics: dict[str, Mean]
    """Name -> (sum, count), to be added over pieces before dividing."""


class Tokens(NamedTuple):
    """Sanitized inputs of a loss: safe numbers everywhere, neutral where `usable` is false."""

    log_probs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    usable: Tensor


def clean(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tokens:
    """Check shapes, go to at least float32, and replace masked and non-finite tokens by zeros.

    A non-finite trainable token gets no loss and no gradient and stays in the denominators; `usable` tells.
    """
    check_tokens(mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    new, old = at_least_float32(log_probs), at_least_float32(old_log_probs.detach())
    score = at_least_float32(advantages.detach())
    difference = new - old
    usable = mask & finite(difference.detach() + score)
    zero = difference.new_zeros(())
    return Tokens(
        torch.where(usable, new, zero),
        torch.where(usable, difference, zero),
        torch.where(usable, score, score.new_zeros(())),
        usable,
    )


def fraction(flags: Tensor, mask: Tensor) -> Mean:
    """Share of trainable tokens where `flags` is true."""
    return Mean(count_true(flags & mask), count_true(mask))


def masked_loss(loss: Tensor, tokens: Tokens, mask: Tensor, **metrics: Mean) -> PolicyLoss:
    """Zero the unusable tokens and report their share with the other metrics."""
    nonfinite = Mean(count_true(mask) - count_true(tokens.usable), count_true(mask))
    return PolicyLoss(select(loss, tokens.usable), {**metrics, "nonfinite_frac": nonfinite})


@dataclass(kw_only=True)
class PpoClipOptions:
    clip_low: float = option(0.2, ge=0)
    """Ratios below 1 - clip_low get no gradient where the advantage is negative."""
    clip_high: float = option(0.2, ge=0)
    """Ratios above 1 + clip_high get no gradient where the advantage is positive (0.28 in DAPO)."""
    dual_clip: float | None = None
    """Upper bound on the ratio where the advantage is negative; above 1 + clip_high. Null: no bound."""

    def validate(self) -> None:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ConfigError(f"dual_clip must be above 1 + clip_high = {1 + self.clip_high:g} or null, got "
                              f"{self.dual_clip}.")


@POLICY_LOSSES.register("ppo_clip", options=PpoClipOptions, aggregation="token-mean", traits=("anchored",))
def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = PpoClipOptions.clip_low,
    clip_high: float = PpoClipOptions.clip_high,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Clipped surrogate: L = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)).

    rho = exp(log_probs - old_log_probs). With dual_clip = c, L <- min(L, -c A) where A < 0 (arXiv:1912.09729).

    Args:
        log_probs: [B, R] float, carries gradient. old_log_probs, advantages: [B, R] float. mask: [B, R] bool.
    Returns:
        PolicyLoss with metrics clipfrac_low, clipfrac_high, clipfrac, clipfrac_dual.
    Raises:
        ConfigError: dual_clip is not above 1 + clip_high. BatchError: shapes or dtypes don't fit.
    Source: PPO, arXiv:1707.06347; separate bounds from DAPO, arXiv:2503.14476.
    """
    tokens = clean(log_probs, old_log_probs, advantages, mask)
    loss, metrics = clipped_surrogate(exp_clamped(tokens.log_ratio), tokens, mask, clip_low, clip_high, dual_clip)
    return masked_loss(loss, tokens, mask, **metrics)


def clipped_surrogate(
    ratio: Tensor, tokens: Tokens, mask: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, dict[str, Mean]]:
    """max(-A rho, -A clip(rho)) and, where A < 0, at most -dual_clip * A; with the shares of clipped tokens.

    Where the second branch is strictly larger the ratio is outside its bound, so it has no gradient.
    """
    negative = -tokens.advantages
    plain = negative * ratio
    value, clipped = plain.detach(), negative * ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    hit = clipped > value
    loss = torch.where(hit, clipped, plain)
    falling = hit & (negative > 0)
    total, low = count_true(mask), count_true(falling & mask)
    both = count_true(hit & mask)
    metrics = {
        "clipfrac_low": Mean(low, total),
        "clipfrac_high": Mean(both - low, total),
        "clipfrac": Mean(both, total),
    }
    if dual_clip is not None:
        bound = negative * dual_clip
        over = (negative > 0) & (value > bound)
        loss = torch.where(over, bound, loss)
        metrics["clipfrac_dual"] = Mean(count_true(over & mask), total)
    return loss, metrics


@POLICY_LOSSES.register("reinforce", aggregation="seq-mean-token-sum")
@POLICY_LOSSES.register("gpg", aggregation="token-mean")
def policy_gradient(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyLoss:
    """Plain policy gradient: L = -A * log_probs. Only its gradient means anything.

    Args:
        log_probs: [B, R] float, carries gradient. advantages: [B, R] float. mask: [B, R] bool.
    Returns:
        PolicyLoss.
    Raises:
        BatchError: shapes or dtypes don't fit.
    Source: Williams 1992; GPG, arXiv:2504.02546.
    """
    check_tokens(mask, log_probs=log_probs)
    tokens = clean(log_probs, torch.zeros_like(log_probs), advantages, mask)
    return masked_loss(-tokens.advantages * tokens.log_probs, tokens, mask)


def policy_loss(
    name: str,
    columns: Mapping[str, Any],
    options: Any = None,
    *,
    anchor: str = "old",
    step_masks: Mapping[str, Any] | None = None,
) -> PolicyLoss:
    """Per-token loss of `name` on a piece of a mini-batch, times `correction_weights` when that column exists.

    Args:
        columns: log_probs (carries gradient), old_log_probs, advantages, mask, and what the loss or its
            `prepare` named; correction_weights [B, R] float is the weight times the keep mask.
        anchor: "old" measures ratios from old_log_probs, "rollout" from rollout_log_probs (two-policy form).
        step_masks: options of entries of KEEP_MASKS that look at the current log-probs (trait "step"), by name.
    Returns:
        PolicyLoss; the loss of the piece is `aggregate(loss, loss_weights, mask)`. With weights or masks it has the
        metric kept_frac, the share of tokens whose weight is not 0.
    Raises:
        ConfigError: unknown name, option or anchor, or a behaviour weight on a behaviour-anchored ratio.
        BatchError: a column is missing or has the wrong shape or dtype.
    """
    columns = anchored(columns, anchor)
    weights, mask = columns.get("correction_weights"), need(f"policy loss {name!r}", "mask", columns.get("mask"))
    if weights is not None:
        check_tokens(mask, correction_weights=weights)
        if anchor == "rollout" or "behaviour_anchored" in POLICY_LOSSES[name].traits:
            _check_only_masks(name, anchor, weights, mask)
    for mask_name, mask_options in (step_masks or {}).items():
        keep = KEEP_MASKS.call(mask_name, mask_options, columns)
        columns["correction_weights"] = weights = keep.float() if weights is None else select(weights, keep)
    result = POLICY_LOSSES.call(name, options, columns)
    if weights is None:
        return result
    weights = select(weights.detach(), mask)
    reads = "correction_weights" in POLICY_LOSSES[name].columns
    metrics = {**result.metrics, "kept_frac": fraction(weights > 0, mask)}
    return PolicyLoss(result.loss if reads else result.loss * weights, metrics)


def anchored(columns: Mapping[str, Any], anchor: str) -> dict[str, Any]:
    """The columns with the log-probs that ratios are measured from as `old_log_probs`: "old" or "rollout".

    Raises ConfigError for another anchor.
    """
    if anchor not in ("old", "rollout"):
        raise ConfigError(unknown("anchor", anchor, ("old", "rollout")))
    return dict(columns) if anchor == "old" else {**columns, "old_log_probs": columns.get("rollout_log_probs")}


def _check_only_masks(name: str, anchor: str, weights: Tensor, mask: Tensor) -> None:
    """Refuse weights other than 0 and 1 on a ratio that is measured from the behaviour policy already."""
    weights = select(weights.detach(), mask)
    if bool(((weights != 0) & (weights != 1)).any()):
        raise ConfigError(
            f"policy loss {name!r} with anchor {anchor!r} measures its ratio from the behaviour policy; "
            "correction_weights other than 0 and 1 would count the correction twice. Use masks only."
        )
