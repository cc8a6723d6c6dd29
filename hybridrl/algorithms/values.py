"""The critic's loss and how well its values explain the returns."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.algorithms.aggregation import aggregate
from hybridrl.algorithms.columns import check_tokens
from hybridrl.algorithms.losses import PolicyLoss, fraction
from hybridrl.algorithms.masked import at_least_float32, count_true, finite
from hybridrl.algorithms.partials import ExplainedVariance, Mean, Partial, mean_of, moments_of
from hybridrl.errors import ConfigError


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None = 0.2
) -> PolicyLoss:
    """Half the larger of the plain and the clipped squared error.

    u = (V - G)^2, c = (clip(V, V_old - clip, V_old + clip) - G)^2, L = 0.5 max(u, c); clip = None gives 0.5 u.
    No gradient where c > u. A non-finite trainable token has no loss.

    Args:
        values: [B, R] float, carries gradient. old_values: [B, R] float, what the advantages were made of.
        returns: [B, R] float. mask: [B, R] bool.
    Returns:
        PolicyLoss with metrics vf_clipfrac and nonfinite_frac; aggregate it with the loss weights.
    Raises:
        ConfigError: clip is below 0. BatchError: shapes or dtypes don't fit.
    Source: PPO, arXiv:1707.06347.
    """
    if clip is not None and clip < 0:
        raise ConfigError(f"clip must be at least 0 or None, got {clip}.")
    check_tokens(mask, values=values, old_values=old_values, returns=returns)
    value, old, target = (at_least_float32(x) for x in (values, old_values.detach(), returns.detach()))
    usable = mask & finite(value + old + target)
    value, old, target = (torch.where(usable, x, x.new_zeros(())) for x in (value, old, target))
    error = (value - target).square()
    nonfinite = Mean(count_true(mask) - count_true(usable), count_true(mask))
    if clip is None:
        none = Mean(0, count_true(mask))
        return PolicyLoss(0.5 * error, {"vf_clipfrac": none, "nonfinite_frac": nonfinite})
    clipped = (value.clamp(old - clip, old + clip) - target).square()
    larger = clipped.detach() > error.detach()
    loss = 0.5 * torch.where(larger, clipped.detach(), error)
    return PolicyLoss(loss, {"vf_clipfrac": fraction(larger, mask), "nonfinite_frac": nonfinite})


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> ExplainedVariance:
    """1 - Var(G - V) / Var(G) over trainable tokens, as a part that merges; 0 if Var(G) = 0 or one token.

    Args:
        values, returns: [B, R] float. mask: [B, R] bool.
    Raises:
        BatchError: shapes or dtypes don't fit.
    """
    check_tokens(mask, values=values, returns=returns)
    residual = returns.double() - values.double()
    return ExplainedVariance(moments_of(residual, mask), moments_of(returns, mask))


@dataclass(frozen=True)
class ValueLoss:
    """What a critic worker needs to turn values into a partial loss: `value_loss` with the weights of the mini-batch.

    Args:
        clip: how far values may move from the old ones before they stop to gain; None: without limit.
    """

    clip: float | None = 0.2

    def __call__(self, values: Tensor, columns: Mapping[str, Tensor],
                 entropies: Tensor | None) -> tuple[Tensor, dict[str, Partial]]:
        """The partial loss (0-d) of some rows of a mini-batch and its metrics as sums and counts.

        Args:
            values: [b, R], carries gradient.
            columns: `values` [b, R] as they entered the advantages, `returns`, `response_mask`, `loss_weights`.
            entropies: not read.
        Returns:
            The loss; `vf_clipfrac`, `nonfinite_frac`, `value_mean` (now), `return_mean`.
        """
        mask, returns = columns["response_mask"], columns["returns"]
        result = value_loss(values, columns["values"], returns, mask, clip=self.clip)
        metrics: dict[str, Partial] = {
            **result.metrics, "value_mean": mean_of(values, mask), "return_mean": mean_of(returns, mask)}
        return aggregate(result.loss, columns["loss_weights"], mask), metrics
