"""Advantages for the objective pass@k: at least one of k responses is good."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.algorithms.advantages import ADVANTAGES, Advantages, broadcast, outcome_groups, output_dtype
from hybridrl.algorithms.evaluation import choose_ratio
from hybridrl.algorithms.groups import Groups
from hybridrl.algorithms.tables import option
from hybridrl.errors import BatchError


@dataclass(kw_only=True)
class MarginalOptions:
    divide_by_std: bool = False
    """Divide by the group's standard deviation plus eps; the paper does not."""
    eps: float = option(1e-6, gt=0)
    """Added to the standard deviation."""


@ADVANTAGES.register("pass_at_k_marginal", options=MarginalOptions, aggregation="token-mean", traits=("groups",))
@torch.no_grad()
def pass_at_k_marginal_advantages(
    rewards: Tensor | None,
    group_ids: Tensor,
    mask: Tensor,
    token_rewards: Tensor | None = None,
    trajectory_ids: Tensor | None = None,
    *,
    divide_by_std: bool = MarginalOptions.divide_by_std,
    eps: float = MarginalOptions.eps,
) -> Advantages:
    """What a response adds to the best of its group: A_i = max(S) - max(S without i).

    Only a unique best response gets a non-zero value, its gap to the runner-up; ties and lone members give 0.

    Args:
        rewards: [B] float. group_ids: [B] int64. mask: [B, R] bool.
        token_rewards: [B, R] float, replaces rewards by its row sums. trajectory_ids: [B] int64.
    Returns:
        Advantages; returns equal the advantages.
    Raises:
        BatchError: a column is missing or has the wrong shape or dtype.
    Source: arXiv:2503.19595.
    """
    groups, rows, _ = outcome_groups(mask, group_ids, rewards, token_rewards, trajectory_ids)
    best = groups.rewards == groups.max(groups.rewards)[groups.index]
    unique = best & groups.valid & (groups.sum(best)[groups.index] == 1)
    runner_up = groups.max(groups.rewards, ~best)[groups.index]
    gap = torch.where(unique & runner_up.isfinite(), groups.rewards - runner_up, 0.0)
    if divide_by_std:
        gap = gap / (groups.std()[groups.index] + eps)
    return broadcast(gap[rows.index], mask, output_dtype(rewards, token_rewards))


@dataclass(kw_only=True)
class PassAtKOptions:
    k: int = option(2, ge=1)
    """Number of attempts; at most the group size."""


@ADVANTAGES.register("pass_at_k", options=PassAtKOptions, aggregation="token-mean", traits=("groups", "k"))
@torch.no_grad()
def pass_at_k_advantages(
    rewards: Tensor | None,
    group_ids: Tensor,
    mask: Tensor,
    token_rewards: Tensor | None = None,
    trajectory_ids: Tensor | None = None,
    *,
    k: int = PassAtKOptions.k,
) -> Advantages:
    """Mean standardized reward of all k-subsets that contain the response, in closed form for 0/1 rewards.

    With n members, c correct: Q = C(n-c, k) / C(n, k), S = sqrt(Q (1 - Q)). A = Q / S if correct, and
    (Q - C(n-c-1, k-1) / C(n-1, k-1)) / S if not; 0 where S = 0. k = 1 is (r - p) / sqrt(p (1 - p)).

    A group with at least k members of which fewer than k are scorable gets 0.

    Args:
        rewards: [B] float, 0 or 1 or NaN. group_ids: [B] int64. mask: [B, R] bool.
        token_rewards: [B, R] float, replaces rewards by its row sums. trajectory_ids: [B] int64.
    Returns:
        Advantages; returns equal the advantages.
    Raises:
        BatchError: a group is smaller than k, a reward is neither 0 nor 1, or a column is missing or has the
            wrong shape or dtype.
    Source: arXiv:2508.10751.
    """
    groups, rows, _ = outcome_groups(mask, group_ids, rewards, token_rewards, trajectory_ids)
    _check(groups, k)
    count, correct = groups.count(), groups.sum(groups.rewards)
    fail = choose_ratio(count - correct, count, k)
    fail_without = choose_ratio(count - correct - 1, count - 1, k - 1)
    spread = (fail * (1 - fail)).sqrt()
    defined = (spread > 0) & (count >= k)
    spread = torch.where(defined, spread, 1.0)
    good = torch.where(defined, fail / spread, 0.0)[groups.index]
    bad = torch.where(defined, (fail - fail_without) / spread, 0.0)[groups.index]
    scalars = torch.where(groups.valid, torch.where(groups.rewards == 1, good, bad), 0.0)
    return broadcast(scalars[rows.index], mask, output_dtype(rewards, token_rewards))


def _check(groups: Groups, k: int) -> None:
    odd = groups.valid & (groups.rewards != 0) & (groups.rewards != 1)
    if bool(odd.any()):
        raise BatchError(f"pass_at_k needs rewards 0 or 1, got {groups.rewards[odd][0].item():g}.")
    check_group_sizes("pass_at_k", groups, k)


def check_group_sizes(name: str, groups: Groups, k: int) -> None:
    """Raise BatchError when a group has fewer than k members, scorable or not."""
    sizes = torch.bincount(groups.index, minlength=groups.num_groups)
    if groups.num_groups and k > int(sizes.min()):
        raise BatchError(f"{name}: k must be at most the group size, got k={k} and {int(sizes.min())}.")
