"""Advantages for the best of k responses with rewards of any kind (PKPO)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.algorithms.advantages import ADVANTAGES, Advantages, broadcast, outcome_groups, output_dtype
from hybridrl.algorithms.evaluation import choose_ratio
from hybridrl.algorithms.groups import Groups
from hybridrl.algorithms.pass_k_advantages import check_group_sizes
from hybridrl.algorithms.tables import option


@dataclass(kw_only=True)
class MaxAtKOptions:
    k: int = option(2, ge=1)
    """Number of attempts; at most the group size."""
    baseline: str = option("subset", choices=("subset", "none"))
    """Subtract from each subset's best the best without the response, or nothing."""


@ADVANTAGES.register("max_at_k", options=MaxAtKOptions, aggregation="seq-mean-token-sum", traits=("groups", "k"))
@torch.no_grad()
def max_at_k_advantages(
    rewards: Tensor | None,
    group_ids: Tensor,
    mask: Tensor,
    token_rewards: Tensor | None = None,
    trajectory_ids: Tensor | None = None,
    *,
    k: int = MaxAtKOptions.k,
    baseline: str = MaxAtKOptions.baseline,
) -> Advantages:
    """Unbiased weights for the gradient of the expected best of k responses.

    A_i = n / C(n, k) * sum over k-subsets I with i of max(I) - max(I without i), the second term only with
    baseline "subset" and k >= 2. In closed form from the sorted rewards of the group. k = 1 is the reward itself.

    A group with at least k members of which fewer than k are scorable gets 0.

    Args:
        rewards: [B] float. group_ids: [B] int64. mask: [B, R] bool.
        token_rewards: [B, R] float, replaces rewards by its row sums. trajectory_ids: [B] int64.
    Returns:
        Advantages; returns equal the advantages.
    Raises:
        BatchError: a group is smaller than k, or a column is missing or has the wrong shape or dtype.
    Source: PKPO, arXiv:2505.15201.
    """
    groups, rows, _ = outcome_groups(mask, group_ids, rewards, token_rewards, trajectory_ids)
    check_group_sizes("max_at_k", groups, k)
    subtract = baseline == "subset" and k >= 2
    scalars = _best_of_k_weights(groups, k, subtract) if groups.rewards.numel() else groups.rewards
    return broadcast(scalars[rows.index], mask, output_dtype(rewards, token_rewards))


def _best_of_k_weights(groups: Groups, k: int, subtract: bool) -> Tensor:
    """[N] float64; the j-th smallest of n rewards is the best of C(j - 1, k - 1) subsets."""
    # Lay each group's scorable rewards out as one sorted row, after removing its smallest.
    low, _ = groups.baseline()
    shifted = torch.where(groups.valid, groups.rewards - low[groups.index], torch.inf)
    order = shifted.argsort(stable=True)
    order = order[groups.index[order].argsort(stable=True)]
    group = groups.index[order]
    sizes = torch.bincount(group, minlength=groups.num_groups)
    rank = torch.arange(len(order), device=order.device) - (sizes.cumsum(0) - sizes)[group]
    table = shifted.new_zeros(groups.num_groups, int(sizes.max()))
    table[group, rank] = torch.where(groups.valid, shifted, 0.0)[order]

    count = groups.count()[:, None]
    j = torch.arange(1, table.shape[1] + 1, dtype=torch.float64, device=order.device).expand_as(table)
    best_here = _share(j - 1, k - 1, count, k)
    if subtract:
        # Only subsets whose best is i change when i leaves; the loss is its gap to the next best.
        below = (_share(j - 1, k - 2, count, k) * table).cumsum(1)
        weights = best_here * table - torch.cat([torch.zeros_like(below[:, :1]), below[:, :-1]], dim=1)
    else:
        table = table + low[:, None]
        inside = (j <= count).double()
        later = (_share(j - 2, k - 2, count, k) * table * inside).flip(1).cumsum(1).flip(1)
        weights = best_here * table + torch.cat([later[:, 1:], torch.zeros_like(later[:, :1])], dim=1)
    weights = torch.where(count >= k, count * weights, 0.0)
    scattered = torch.zeros_like(shifted)
    scattered[order] = weights[group, rank]
    return torch.where(groups.valid, scattered, 0.0)


def _share(a: Tensor, b: int, n: Tensor, k: int) -> Tensor:
    """C(a, b) / C(n, k) as float64, 0 where a < b, b < 0 or n < k."""
    if b < 0:
        return torch.zeros_like(a)
    a, n = torch.broadcast_tensors(a, n)
    possible = (a >= b) & (n >= k) & (a <= n)
    a, n = torch.where(possible, a, float(b)), torch.where(possible, n, float(k))
    same_b = choose_ratio(a, n, b)  # C(a, b) / C(n, b)
    shrink = torch.ones_like(n)
    for i in range(b, k):  # C(n, b) / C(n, k): at most two factors
        shrink = shrink * (i + 1) / (n - i)
    return torch.where(possible, same_b * shrink, 0.0)
