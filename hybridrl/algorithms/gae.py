"""Generalized advantage estimation: advantages from a critic's values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.algorithms.advantages import ADVANTAGES, Advantages, cast, output_dtype
from hybridrl.algorithms.columns import check_rows, check_tokens, given
from hybridrl.algorithms.masked import finite, select, whiten
from hybridrl.algorithms.returns import backward_scan, folded_rewards
from hybridrl.algorithms.tables import option
from hybridrl.algorithms.trajectories import over_trajectories


@dataclass(kw_only=True)
class GaeOptions:
    gamma: float = option(1.0, ge=0, le=1)
    """Discount per policy token."""
    lam: float = option(1.0, ge=0, le=1)
    """Lambda of the advantages: 1 for outcome rewards, 0.95 for RLHF with a reward model."""
    critic_lam: float | None = option(None, ge=0, le=1)
    """Lambda of the returns (arXiv:2503.01491); null: that of the advantages."""
    lam_alpha: float | None = option(None, gt=0)
    """Lambda of the advantages by length, 1 - 1 / (lam_alpha * n_b) (arXiv:2504.05118); null: `lam`."""
    whiten: bool = True
    """Whiten the advantages over the batch; returns never are."""


@ADVANTAGES.register("gae", options=GaeOptions, aggregation="token-mean")
@over_trajectories
@torch.no_grad()
def gae_advantages(
    values: Tensor,
    mask: Tensor,
    rewards: Tensor | None = None,
    token_rewards: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
    *,
    gamma: float = GaeOptions.gamma,
    lam: float = GaeOptions.lam,
    critic_lam: float | None = GaeOptions.critic_lam,
    lam_alpha: float | None = GaeOptions.lam_alpha,
    whiten: bool = GaeOptions.whiten,
) -> Advantages:
    """Exponentially weighted temporal differences over trainable tokens, backwards from the last.

    delta_j = R_j + gamma V_{j+1} - V_j, A_j = delta_j + gamma lam A_{j+1}, G_j = A_j + V_j. The successor of a
    turn's last token is the first token of the next turn; values on environment tokens are never read.

    Args:
        values: [B, R] float, from the critic before its update.
        mask: [B, R] bool. rewards: [B] float, or token_rewards: [B, R] float.
        bootstrap_values: [B] float, value after the last token; absent or 0 for finished responses.
    Returns:
        Advantages; returns G use unwhitened advantages. An unscorable row has advantage 0 and returns = values.
    Raises:
        BatchError: a column is missing or has the wrong shape or dtype.
    Source: arXiv:1506.02438, 1707.06347.
    """
    check_tokens(mask, values=values)
    check_rows(mask, **given(bootstrap_values=bootstrap_values))
    folded, valid = folded_rewards(mask, rewards, token_rewards)
    known = finite(values)
    valid = valid & (known | ~mask).all(dim=1)
    keep = mask & valid[:, None]
    value = torch.where(mask & known, values.double(), 0.0)
    last = value.new_zeros(len(value), 1) if bootstrap_values is None else bootstrap_values.double()[:, None]
    delta = select(folded + gamma * _next_value(value, mask, last.nan_to_num(posinf=0, neginf=0)) - value, keep)

    decay = gamma * (
        lam if lam_alpha is None else (1 - 1 / (lam_alpha * mask.sum(1, keepdim=True).double())).clamp(0, 1)
    )
    advantages = backward_scan(delta, decay, keep)
    returned = advantages if critic_lam is None else backward_scan(delta, gamma * critic_lam, keep)
    returns = select(returned + value, mask)
    if whiten:
        advantages = _whiten(advantages, keep)
    dtype = output_dtype(values, rewards, token_rewards)
    return Advantages(cast(advantages, dtype), cast(returns, dtype))


_whiten = whiten  # the option of the same name hides it inside the function


def _next_value(values: Tensor, mask: Tensor, last: Tensor) -> Tensor:
    """[B, R] value at the next trainable column, `last` [B, 1] after the final one; 0 where mask is false."""
    following = values[mask].roll(-1)  # trainable tokens laid end to end
    counts = mask.count_nonzero(dim=1)
    ends = counts.cumsum(0) - 1
    following[ends[counts > 0]] = last.expand(len(values), 1)[counts > 0, 0]
    return torch.zeros_like(values).masked_scatter(mask, following)
