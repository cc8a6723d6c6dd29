"""Credit per turn in multi-turn rollouts. A turn is a maximal run of trainable columns."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.algorithms.advantages import ADVANTAGES, Advantages, cast, output_dtype
from hybridrl.algorithms.columns import check_ids, check_mask, given, need
from hybridrl.algorithms.groups import Groups
from hybridrl.algorithms.masked import select
from hybridrl.algorithms.returns import folded_rewards
from hybridrl.algorithms.tables import option
from hybridrl.algorithms.trajectories import over_trajectories


def turn_ids(mask: Tensor) -> Tensor:
    """[B, R] int64: 0 on the first turn's tokens, 1 on the second's, ...; -1 where mask is false.

    Raises:
        BatchError: mask is not bool [B, R].
    """
    check_mask(mask)
    before = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], dim=1) if mask.shape[1] else mask
    return torch.where(mask, (mask & ~before).cumsum(dim=1) - 1, -1)


@dataclass(kw_only=True)
class TurnLevelOptions:
    gamma: float = option(1.0, ge=0, le=1)
    """Discount per turn; tokens of a turn are not discounted."""
    baseline: str = option("group", choices=("none", "group"))
    """Subtract nothing, or the group's mean return of the first turn."""


@ADVANTAGES.register("turn_level", options=TurnLevelOptions, aggregation="token-mean")
@over_trajectories
@torch.no_grad()
def turn_level_advantages(
    mask: Tensor,
    rewards: Tensor | None = None,
    token_rewards: Tensor | None = None,
    group_ids: Tensor | None = None,
    *,
    gamma: float = TurnLevelOptions.gamma,
    baseline: str = TurnLevelOptions.baseline,
) -> Advantages:
    """Reward-to-go over turns: G_j = u_j + gamma G_{j+1}, u_j the folded rewards inside turn j.

    Every token of turn j gets G_j, minus the mean of G_1 over the group's rows that have a turn; a lone member
    gets 0.

    Args:
        mask: [B, R] bool. token_rewards: [B, R] float, or rewards: [B] float for one outcome.
        group_ids: [B] int64, for baseline "group".
    Returns:
        Advantages; returns = G.
    Raises:
        BatchError: a column is missing or has the wrong shape or dtype.
    Source: turn-level credit, arXiv:2505.11821.
    """
    folded, valid = folded_rewards(mask, rewards, token_rewards)
    check_ids(mask, **given(group_ids=group_ids))
    turns = turn_ids(mask)
    count = int(turns.max()) + 1 if turns.numel() else 0
    dtype = output_dtype(rewards, token_rewards)
    if count == 0:
        empty = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return Advantages(empty, empty)
    per_turn = torch.zeros(len(mask), count, dtype=torch.float64, device=mask.device)
    per_turn.scatter_add_(1, turns.clamp(min=0), select(folded, mask))
    for j in range(count - 2, -1, -1):
        per_turn[:, j] += gamma * per_turn[:, j + 1]
    returns = select(per_turn.gather(1, turns.clamp(min=0)), mask)
    low = above = returns.new_zeros(())
    if baseline == "group":
        group_ids = need("baseline 'group'", "group_ids", group_ids)
        counted = valid & mask.any(dim=1)
        groups = Groups.of(torch.where(counted, per_turn[:, 0], torch.nan), group_ids)
        lone = (groups.count()[groups.index] < 2)[:, None]
        low, above = (x[groups.index][:, None] for x in groups.baseline())
        low, above = torch.where(lone, returns, low), torch.where(lone, 0.0, above)
    advantages = select((returns - low) - above, mask & valid[:, None])
    return Advantages(cast(advantages, dtype), cast(returns, dtype))
