"""REINFORCE and REINFORCE++: reward-to-go against a mean, and whitened over the batch."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.algorithms.advantages import ADVANTAGES, Advantages, cast, outcome_groups, output_dtype
from hybridrl.algorithms.columns import check_ids, check_rows, given, need
from hybridrl.algorithms.groups import Groups
from hybridrl.algorithms.masked import first_trainable, low_and_mean, select, whiten
from hybridrl.algorithms.returns import folded_rewards, reward_to_go
from hybridrl.algorithms.reward_shaping import kl_in_reward
from hybridrl.algorithms.tables import option
from hybridrl.algorithms.trajectories import over_trajectories


@dataclass(kw_only=True)
class ReinforceOptions:
    baseline: str = option("none", choices=("none", "batch", "group", "moving"))
    """What is subtracted from the returns."""
    gamma: float = option(1.0, ge=0, le=1)
    """Discount per policy token."""
    singleton: str = option("zero", choices=("zero", "raw"))
    """Advantage of a lone group member under the group baseline: 0, or its return."""


@ADVANTAGES.register("reinforce", options=ReinforceOptions, aggregation="seq-mean-token-sum")
@over_trajectories
@torch.no_grad()
def reinforce_advantages(
    mask: Tensor,
    rewards: Tensor | None = None,
    token_rewards: Tensor | None = None,
    group_ids: Tensor | None = None,
    moving_baseline: Tensor | float | None = None,
    *,
    baseline: str = ReinforceOptions.baseline,
    gamma: float = ReinforceOptions.gamma,
    singleton: str = ReinforceOptions.singleton,
) -> Advantages:
    """Reward-to-go minus a baseline: A[b,t] = G[b,t] - c.

    c is 0 ("none"), the mean episode return of the batch ("batch") or of the row's group ("group") over rows
    with trainable tokens, or a running mean of earlier batches ("moving", see `MovingBaseline`).

    Args:
        mask: [B, R] bool.
        rewards: [B] float outcome, placed on the last trainable token; token_rewards: [B, R] float replaces it.
        group_ids: [B] int64, for baseline "group". moving_baseline: number or [B] float, for baseline
            "moving" (see `AgentBaselines` for one number per agent).
    Returns:
        Advantages; returns = G.
    Raises:
        BatchError: a column is missing or has the wrong shape or dtype.
    Source: Williams 1992.
    """
    folded, valid = folded_rewards(mask, rewards, token_rewards)
    check_ids(mask, **given(group_ids=group_ids))
    if isinstance(moving_baseline, Tensor) and moving_baseline.dim():
        check_rows(mask, moving_baseline=moving_baseline)
    returns = reward_to_go(folded, mask, gamma)
    keep = mask & valid[:, None]
    low, above = _baseline(returns, keep, baseline, group_ids, moving_baseline, singleton)
    dtype = output_dtype(rewards, token_rewards)
    return Advantages(cast(select((returns - low) - above, keep), dtype), cast(returns, dtype))


def _baseline(
    returns: Tensor,
    keep: Tensor,
    kind: str,
    group_ids: Tensor | None,
    moving: Tensor | float | None,
    singleton: str,
) -> tuple[Tensor, Tensor]:
    """What to subtract from `returns`, in two parts that must not be added first (see `Groups.baseline`)."""
    zero = returns.new_zeros(())
    if kind == "none":
        return zero, zero
    if kind == "moving":
        moving = need("baseline 'moving'", "moving_baseline", moving)
        past = torch.as_tensor(moving, dtype=returns.dtype, device=returns.device)
        return past[:, None] if past.dim() else past, zero
    episodes, counted = episode_returns(returns, keep)
    if kind == "batch":
        return low_and_mean(episodes[counted])
    group_ids = need("baseline 'group'", "group_ids", group_ids)
    groups = Groups.of(torch.where(counted, episodes, torch.nan), group_ids)
    low, above = (x[groups.index][:, None] for x in groups.baseline())
    lone = (groups.count()[groups.index] < 2)[:, None]
    return torch.where(lone, returns if singleton == "zero" else zero, low), torch.where(lone, zero, above)


def episode_returns(returns: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Episode return G[first] [B], and which rows have one [B] bool; 0 where not."""
    first = first_trainable(keep)
    if keep.shape[1] == 0:
        return returns.new_zeros(keep.shape[0]), first >= 0
    return returns.gather(1, first.clamp(min=0)[:, None]).squeeze(1), first >= 0


@dataclass(kw_only=True)
class ReinforcePPOptions:
    kl_coef: float = option(0.0, ge=0, lt=math.inf)
    """Weight of the per-token k1 penalty against the reference; 0 needs no reference."""


@ADVANTAGES.register("reinforce_pp", options=ReinforcePPOptions, aggregation="token-mean")
@over_trajectories
@torch.no_grad()
def reinforce_pp_advantages(
    mask: Tensor,
    rewards: Tensor | None = None,
    token_rewards: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    *,
    kl_coef: float = ReinforcePPOptions.kl_coef,
) -> Advantages:
    """Undiscounted reward-to-go of outcome minus token KL, whitened over the batch.

    R' = R - kl_coef * (old_log_probs - ref_log_probs), G = sum of this and later R', A = whiten(G).

    Args:
        mask: [B, R] bool. rewards: [B] float, or token_rewards: [B, R] float.
        old_log_probs, ref_log_probs: [B, R] float, needed when kl_coef > 0.
    Returns:
        Advantages; returns = G before whitening.
    Raises:
        BatchError: a column is missing or has the wrong shape or dtype.
    Source: REINFORCE++, arXiv:2501.03262.
    """
    folded, valid = folded_rewards(mask, rewards, token_rewards)
    if kl_coef > 0:
        old_log_probs = need("reinforce_pp with kl_coef > 0", "old_log_probs", old_log_probs)
        ref_log_probs = need("reinforce_pp with kl_coef > 0", "ref_log_probs", ref_log_probs)
        folded = kl_in_reward(folded, old_log_probs, ref_log_probs, mask, kl_coef=kl_coef)
    returns = reward_to_go(folded, mask)
    dtype = output_dtype(rewards, token_rewards)
    return Advantages(cast(whiten(returns, mask & valid[:, None]), dtype), cast(returns, dtype))


@ADVANTAGES.register("reinforce_pp_baseline", aggregation="token-mean", traits=("groups",))
@torch.no_grad()
def reinforce_pp_baseline_advantages(
    group_ids: Tensor,
    mask: Tensor,
    rewards: Tensor | None = None,
    token_rewards: Tensor | None = None,
    trajectory_ids: Tensor | None = None,
) -> Advantages:
    """Reward minus group mean, whitened over all tokens of the batch.

    a = r - mean(group), repeated over tokens; A = whiten(a). Constant groups stay in the whitening population
    with value 0.

    Args:
        group_ids: [B] int64. mask: [B, R] bool. rewards: [B] float, or token_rewards: [B, R] float.
        trajectory_ids: [B] int64, rows that share a trajectory count once in the group mean.
    Returns:
        Advantages; returns equal the advantages.
    Raises:
        BatchError: a column is missing or has the wrong shape or dtype.
    Source: REINFORCE++, arXiv:2501.03262.
    """
    groups, rows, valid = outcome_groups(mask, group_ids, rewards, token_rewards, trajectory_ids)
    scalars = groups.centred()[rows.index]
    spread = select(scalars[:, None].expand(mask.shape), mask)
    white = cast(whiten(spread, mask & valid[:, None]), output_dtype(rewards, token_rewards))
    return Advantages(white, white)
