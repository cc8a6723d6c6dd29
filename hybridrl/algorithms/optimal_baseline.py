"""A baseline per token position that minimizes the variance of the gradient."""

import torch
from torch import Tensor

from hybridrl.algorithms.advantages import ADVANTAGES, Advantages, cast, output_dtype
from hybridrl.algorithms.columns import check_ids, check_tokens
from hybridrl.algorithms.masked import select
from hybridrl.algorithms.returns import folded_rewards, reward_to_go
from hybridrl.algorithms.trajectories import over_trajectories


@ADVANTAGES.register("optimal_token_baseline", aggregation="token-mean", traits=("groups",))
@over_trajectories
@torch.no_grad()
def optimal_token_baseline_advantages(
    old_log_probs: Tensor,
    sum_squared_probs: Tensor,
    group_ids: Tensor,
    mask: Tensor,
    rewards: Tensor | None = None,
    token_rewards: Tensor | None = None,
) -> Advantages:
    """Reward-to-go minus a gradient-weighted group mean at the same position: A_j = G_j - c_j.

    c_j = sum_i W_ij G_ij / sum_i W_ij over the group's rows with a j-th trainable token. W_ij adds up, over the
    row's trainable tokens up to j, the squared norm 1 - 2 p + sum_v p_v^2 of the token's gradient with respect
    to its logits. A position that one row alone has gives 0.

    Args:
        old_log_probs: [B, R] float. sum_squared_probs: [B, R] float, sum over the vocabulary of p_v^2.
        group_ids: [B] int64. mask: [B, R] bool. rewards: [B] float, or token_rewards: [B, R] float.
    Returns:
        Advantages; returns = G.
    Raises:
        BatchError: a column is missing or has the wrong shape or dtype.
    Source: Greensmith et al. 2004, per token with cumulative weights; specification 3.13 (d).
    """
    check_tokens(mask, old_log_probs=old_log_probs, sum_squared_probs=sum_squared_probs)
    check_ids(mask, group_ids=group_ids)
    folded, valid = folded_rewards(mask, rewards, token_rewards)
    returns, keep = reward_to_go(folded, mask), mask & valid[:, None]
    dtype = output_dtype(rewards, token_rewards)
    if mask.numel() == 0:
        return Advantages(cast(returns, dtype), cast(returns, dtype))
    norm = 1 - 2 * select(old_log_probs, mask).double().exp() + sum_squared_probs.double()
    weight = select(norm.nan_to_num(posinf=0.0, neginf=0.0).clamp(min=0.0), keep).cumsum(dim=1)

    # One cell per (group, position): positions count trainable tokens, so turns line up across rows.
    _, group = torch.unique(group_ids, return_inverse=True)
    cell = group[:, None] * mask.shape[1] + (mask.cumsum(dim=1) - 1).clamp(min=0)
    cell, inside = cell[keep], returns[keep]
    size = (int(group.max()) + 1) * mask.shape[1]

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(size).index_add(0, cell, x)[cell]

    low = inside.new_full((size,), torch.inf).scatter_reduce(0, cell, inside, "amin")[cell]
    weights, above = weight[keep], inside - low
    denominator = total(weights)
    mean = torch.where(denominator > 0, total(weights * above) / torch.where(denominator > 0, denominator, 1.0), above)
    advantages = torch.zeros_like(returns).masked_scatter(keep, above - mean)
    lone = total(torch.ones_like(weights)) < 2
    advantages = advantages.masked_fill(torch.zeros_like(mask).masked_scatter(keep, lone), 0.0)
    return Advantages(cast(advantages, dtype), cast(returns, dtype))
