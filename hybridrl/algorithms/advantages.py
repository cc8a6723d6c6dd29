"""Rewards to advantages: the table ADVANTAGES, what its rows share, and two estimators with outside baselines.

An estimator is a pure function of batch columns. Names of columns are the same everywhere: rewards [B],
group_ids [B], trajectory_ids [B], mask [B, R], token_rewards [B, R], values [B, R], *_log_probs [B, R].
A row whose reward is NaN or infinite is unscorable: it enters no statistic and its advantage is 0.
Results are float32 (float64 for float64 rewards), zero where mask is false, and constant for autograd.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridrl.algorithms.columns import check_ids, check_rows, check_tokens, given, need
from hybridrl.algorithms.groups import Groups, Trajectories
from hybridrl.algorithms.masked import select
from hybridrl.algorithms.returns import folded_rewards, reward_to_go, row_scores
from hybridrl.algorithms.tables import Table, option
from hybridrl.algorithms.trajectories import over_trajectories

ADVANTAGES = Table("advantage")


class Advantages(NamedTuple):
    """What an estimator returns."""

    advantages: Tensor
    """[B, R], how much better each token did than expected."""
    returns: Tensor
    """[B, R], what a critic should have predicted; equal to the advantages where there is no critic."""


def compute_advantages(name: str, columns: Mapping[str, Any], options: Any = None) -> Advantages:
    """Look an estimator up by name and run it on a mapping of columns.

    Raises:
        ConfigError: unknown name or option. BatchError: a column is missing or has the wrong shape or dtype.
    """
    return ADVANTAGES.call(name, options, columns)


def output_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any given tensor is float64, else float32."""
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in dtype; values beyond its range saturate instead of becoming infinite."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def broadcast(scalars: Tensor, mask: Tensor, dtype: torch.dtype) -> Advantages:
    """Repeat one scalar per row [B] over its trainable tokens; returns equal the advantages."""
    spread = torch.where(mask, cast(scalars, dtype)[:, None], torch.zeros((), dtype=dtype, device=mask.device))
    return Advantages(spread, spread)


def outcome_groups(
    mask: Tensor,
    group_ids: Tensor,
    rewards: Tensor | None,
    token_rewards: Tensor | None,
    trajectory_ids: Tensor | None,
) -> tuple[Groups, Trajectories, Tensor]:
    """Groups over trajectories, the row -> trajectory map, and row validity [B]: start of every group estimator.

    Rows of one trajectory must share their group and, when outcomes are given as `rewards`, the reward;
    with `token_rewards` the trajectory's outcome is the sum over its rows.
    """
    need("a group estimator", "group_ids", group_ids)
    check_ids(mask, group_ids=group_ids, **given(trajectory_ids=trajectory_ids))
    scores = row_scores(mask, rewards, token_rewards)
    rows = Trajectories.of(scores, trajectory_ids)
    outcome = rows.same("rewards", scores) if token_rewards is None else rows.total(scores)
    groups = Groups.of(outcome, rows.same("group_ids", group_ids))
    return groups, rows, groups.valid[rows.index]


@ADVANTAGES.register("remax", aggregation="seq-mean-token-sum")
@over_trajectories
@torch.no_grad()
def remax_advantages(
    greedy_rewards: Tensor,
    mask: Tensor,
    rewards: Tensor | None = None,
    token_rewards: Tensor | None = None,
) -> Advantages:
    """Undiscounted reward-to-go minus the reward of one greedy response: A[b,t] = G[b,t] - r_greedy[b].

    Args:
        greedy_rewards: [B] float, reward of the temperature-0 response to the row's prompt; the row is
            unscorable where it is NaN.
        mask: [B, R] bool. rewards: [B] float, or token_rewards: [B, R] float.
    Returns:
        Advantages; returns = G.
    Raises:
        BatchError: a column is missing or has the wrong shape or dtype.
    Source: ReMax, arXiv:2310.10505.
    """
    check_rows(mask, greedy_rewards=greedy_rewards)
    folded, valid = folded_rewards(mask, rewards, token_rewards)
    valid = valid & greedy_rewards.isfinite()
    returns = reward_to_go(folded, mask)
    dtype = output_dtype(rewards, token_rewards)
    centred = select(returns - greedy_rewards.double()[:, None], mask & valid[:, None])
    return Advantages(cast(centred, dtype), cast(returns, dtype))


@dataclass(kw_only=True)
class DistillOptions:
    reward_coef: float = option(0.0, ge=0)
    """Weight of the outcome reward added to every token; 0 ignores rewards."""


@ADVANTAGES.register("distill", options=DistillOptions, aggregation="token-mean")
@torch.no_grad()
def distill_advantages(
    teacher_log_probs: Tensor,
    old_log_probs: Tensor,
    mask: Tensor,
    rewards: Tensor | None = None,
    *,
    reward_coef: float = DistillOptions.reward_coef,
) -> Advantages:
    """On-policy distillation: A[b,t] = teacher_log_probs - old_log_probs (+ reward_coef * r[b]), no baseline.

    Differences that are not finite (a token the teacher gives probability 0) become -20, 20 or 0.

    Args:
        teacher_log_probs, old_log_probs: [B, R] float, of the sampled tokens.
        mask: [B, R] bool. rewards: [B] float, needed when reward_coef > 0.
    Returns:
        Advantages; returns equal the advantages.
    Raises:
        BatchError: a column is missing or has the wrong shape or dtype.
    Source: the per-token reverse KL as reward; specification 3.13 (c).
    """
    check_tokens(mask, teacher_log_probs=teacher_log_probs, old_log_probs=old_log_probs)
    check_rows(mask, **given(rewards=rewards))
    gap = select(teacher_log_probs.double() - old_log_probs.double(), mask)
    gap = gap.nan_to_num(nan=0.0, posinf=20.0, neginf=-20.0)
    if reward_coef > 0:
        rewards = need("distill with reward_coef > 0", "rewards", rewards)
        gap = gap + reward_coef * rewards.double()[:, None]
        mask = mask & rewards.isfinite()[:, None]
    out = cast(select(gap, mask), output_dtype(teacher_log_probs, old_log_probs, rewards))
    return Advantages(out, out)
