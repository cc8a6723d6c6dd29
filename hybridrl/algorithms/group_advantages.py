"""Estimators that compare responses to the same prompt: one scalar per row, repeated over its tokens.

r is the row's outcome, mu and s the mean and sample standard deviation of its group's scorable members. A
constant group gives exactly 0, and so does a lone member unless `singleton` is "raw".
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.algorithms.advantages import ADVANTAGES, Advantages, broadcast, outcome_groups, output_dtype
from hybridrl.algorithms.columns import check_components, check_ids, given
from hybridrl.algorithms.groups import Groups, Trajectories, exact_standardize, std_of
from hybridrl.algorithms.tables import option
from hybridrl.errors import BatchError

EPS = 1e-6


@dataclass(kw_only=True)
class GrpoOptions:
    std: str = option("group", choices=("group", "batch", "none"))
    """Whose standard deviation divides: the row's group, all rewards of the batch, or nobody's."""
    singleton: str = option("zero", choices=("zero", "raw"))
    """Advantage of a lone group member: 0, or its reward."""
    eps: float = option(EPS, gt=0)
    """Added to the standard deviation."""


@ADVANTAGES.register("grpo", options=GrpoOptions, aggregation="seq-mean-token-mean", traits=("groups",))
@torch.no_grad()
def grpo_advantages(
    rewards: Tensor | None,
    group_ids: Tensor,
    mask: Tensor,
    token_rewards: Tensor | None = None,
    trajectory_ids: Tensor | None = None,
    *,
    std: str = GrpoOptions.std,
    singleton: str = GrpoOptions.singleton,
    eps: float = GrpoOptions.eps,
) -> Advantages:
    """Standardize each response's reward within its prompt's group.

    A = (r - mean(group)) / (s + eps), repeated over response tokens; s divides by n - 1 and is the deviation
    of the group, of all scorable rewards of the batch (arXiv:2508.08221), or absent.

    Args:
        rewards: [B] float, one outcome per response; NaN = unscorable.
        group_ids: [B] int64, equal for responses to the same prompt; any order and size.
        mask: [B, R] bool, true on tokens to train.
        token_rewards: [B, R] float; when given, r is their sum over the row.
        trajectory_ids: [B] int64; rows that share a trajectory count once.
    Returns:
        Advantages; returns equal the advantages.
    Raises:
        BatchError: a column is missing or has the wrong shape or dtype.
    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2.
    """
    groups, rows, _ = outcome_groups(mask, group_ids, rewards, token_rewards, trajectory_ids)
    scalars = _standardized(groups, std, eps)
    if singleton == "raw":
        lone = groups.count()[groups.index] == 1
        scalars = torch.where(lone & groups.valid, groups.rewards, scalars)
    return broadcast(scalars[rows.index], mask, output_dtype(rewards, token_rewards))


def _standardized(groups: Groups, std: str, eps: float) -> Tensor:
    """[N] centred reward over the chosen deviation."""
    centred = groups.centred()
    if std == "none":
        return centred
    if std == "batch":
        return centred / (std_of(groups.rewards[groups.valid]) + eps)
    return centred / (groups.std()[groups.index] + eps)


@dataclass(kw_only=True)
class CentredOptions:
    singleton: str = option("zero", choices=("zero", "raw"))
    """Advantage of a lone group member: 0, or its reward."""


@ADVANTAGES.register("dr_grpo", options=CentredOptions, aggregation="seq-mean-token-sum-norm", traits=("groups",))
@torch.no_grad()
def dr_grpo_advantages(
    rewards: Tensor | None,
    group_ids: Tensor,
    mask: Tensor,
    token_rewards: Tensor | None = None,
    trajectory_ids: Tensor | None = None,
    *,
    singleton: str = CentredOptions.singleton,
) -> Advantages:
    """Reward minus group mean, without division: A = r - mu.

    Meant for the aggregation "seq-mean-token-sum-norm": one half removes the difficulty bias, the other the
    length bias. Arguments, result and errors as `grpo_advantages`.
    Source: Dr. GRPO, arXiv:2503.20783.
    """
    groups, rows, _ = outcome_groups(mask, group_ids, rewards, token_rewards, trajectory_ids)
    return broadcast(groups.centred(singleton)[rows.index], mask, output_dtype(rewards, token_rewards))


@ADVANTAGES.register("rloo", options=CentredOptions, aggregation="seq-mean-token-sum", traits=("groups",))
@torch.no_grad()
def rloo_advantages(
    rewards: Tensor | None,
    group_ids: Tensor,
    mask: Tensor,
    token_rewards: Tensor | None = None,
    trajectory_ids: Tensor | None = None,
    *,
    singleton: str = CentredOptions.singleton,
) -> Advantages:
    """Reward minus the mean of the other members: A = n / (n - 1) * (r - mu).

    Arguments, result and errors as `grpo_advantages`.
    Source: RLOO, arXiv:2402.14740.
    """
    groups, rows, _ = outcome_groups(mask, group_ids, rewards, token_rewards, trajectory_ids)
    count = groups.count()[groups.index]
    scale = count / (count - 1).clamp(min=1)
    scalars = groups.centred(singleton) * torch.where(count > 1, scale, 1.0)
    return broadcast(scalars[rows.index], mask, output_dtype(rewards, token_rewards))


@ADVANTAGES.register("opo", aggregation="token-mean", traits=("groups",))
@torch.no_grad()
def opo_advantages(
    rewards: Tensor | None,
    group_ids: Tensor,
    mask: Tensor,
    token_rewards: Tensor | None = None,
    trajectory_ids: Tensor | None = None,
) -> Advantages:
    """Reward minus the length-weighted group mean: A = r - sum(n_i r_i) / sum(n_i).

    n_i counts trainable tokens (of the whole trajectory). 0 when the group has none. Meant for exact on-policy
    updates, one optimizer step per batch. Arguments, result and errors as `grpo_advantages`.
    Source: OPO, arXiv:2505.23585.
    """
    groups, rows, _ = outcome_groups(mask, group_ids, rewards, token_rewards, trajectory_ids)
    lengths = rows.total(mask.sum(dim=1))
    some = groups.sum(lengths)[groups.index] > 0
    scalars = torch.where(some, groups.centred(weights=lengths), 0.0)
    return broadcast(scalars[rows.index], mask, output_dtype(rewards, token_rewards))


@dataclass(kw_only=True)
class GpgOptions:
    scale: float = option(1.0, gt=0)
    """F, divides the centred reward."""


@ADVANTAGES.register("gpg", options=GpgOptions, aggregation="token-mean", traits=("groups",))
@torch.no_grad()
def gpg_advantages(
    rewards: Tensor | None,
    group_ids: Tensor,
    mask: Tensor,
    token_rewards: Tensor | None = None,
    trajectory_ids: Tensor | None = None,
    *,
    scale: float = GpgOptions.scale,
) -> Advantages:
    """Centred reward, enlarged by the share of rows without signal: A = alpha * (r - mu) / scale.

    alpha = scorable rows / scorable rows in groups whose rewards are not all equal; 0 when no group is
    informative. Lone members are uninformative. Arguments, result and errors as `grpo_advantages`.
    Source: GPG, arXiv:2504.02546.
    """
    groups, rows, _ = outcome_groups(mask, group_ids, rewards, token_rewards, trajectory_ids)
    informative = (groups.max(groups.rewards) > groups.min(groups.rewards))[groups.index] & groups.valid
    alpha = groups.valid.sum().double() / informative.sum().clamp(min=1)
    scalars = alpha * groups.centred() / scale
    return broadcast(scalars[rows.index], mask, output_dtype(rewards, token_rewards))


@ADVANTAGES.register("maxrl", aggregation="token-mean", traits=("groups",))
@torch.no_grad()
def maxrl_advantages(
    rewards: Tensor | None,
    group_ids: Tensor,
    mask: Tensor,
    token_rewards: Tensor | None = None,
    trajectory_ids: Tensor | None = None,
) -> Advantages:
    """Centred reward relative to the group's success rate: A = (r - mu) / mu, 0 where mu = 0.

    Arguments and result as `grpo_advantages`.

    Raises:
        BatchError: a reward is negative, or a column is missing or has the wrong shape or dtype.
    Source: MaxRL, arXiv:2602.02710.
    """
    groups, rows, _ = outcome_groups(mask, group_ids, rewards, token_rewards, trajectory_ids)
    if bool((groups.rewards < 0).any()):
        raise BatchError(f"maxrl needs rewards of at least 0, got {groups.rewards.min().item():g}.")
    mean = groups.mean()[groups.index]
    scalars = torch.where(mean > 0, groups.centred() / torch.where(mean > 0, mean, 1.0), 0.0)
    return broadcast(scalars[rows.index], mask, output_dtype(rewards, token_rewards))


@dataclass(kw_only=True)
class GdpoOptions:
    weights: list[float] | None = None
    """Weight of each reward component; null weighs all 1."""
    eps: float = option(EPS, gt=0)
    """Added to both standard deviations."""


@ADVANTAGES.register("gdpo", options=GdpoOptions, aggregation="token-mean", traits=("groups",))
@torch.no_grad()
def gdpo_advantages(
    reward_components: Tensor,
    group_ids: Tensor,
    mask: Tensor,
    trajectory_ids: Tensor | None = None,
    *,
    weights: list[float] | None = None,
    eps: float = GdpoOptions.eps,
) -> Advantages:
    """Normalize each reward component within the group, add them, standardize over the batch.

    a = sum_k w_k * GRPO(r^k); A = (a - mean(a)) / (std(a) + eps), std divides by n - 1, 0 if a is constant.

    Args:
        reward_components: [B, K] float; a row with a NaN component is unscorable.
        group_ids: [B] int64. mask: [B, R] bool. trajectory_ids: [B] int64, optional.
    Returns:
        Advantages; returns equal the advantages.
    Raises:
        BatchError: wrong shape or dtype, or not one weight per component.
    Source: GDPO, arXiv:2601.05242.
    """
    check_ids(mask, group_ids=group_ids, **given(trajectory_ids=trajectory_ids))
    check_components(mask, reward_components=reward_components)
    weights = [1.0] * reward_components.shape[1] if weights is None else weights
    if len(weights) != reward_components.shape[1]:
        raise BatchError(f"'weights' must have one number per component ({reward_components.shape[1]}), got {weights}.")
    scored = reward_components.isfinite().all(dim=1, keepdim=True)
    components = torch.where(scored, reward_components.double(), torch.nan)
    rows = Trajectories.of(components, trajectory_ids)
    ids = rows.same("group_ids", group_ids)
    total = torch.zeros(ids.shape[0], dtype=torch.float64, device=mask.device)
    for weight, column in zip(weights, components.unbind(1), strict=True):
        groups = Groups.of(rows.same("reward_components", column), ids)
        total = total + weight * _standardized(groups, "group", eps)
    scalars = exact_standardize(total, rows.same("reward_components", scored[:, 0]), eps)
    return broadcast(scalars[rows.index], mask, output_dtype(reward_components))
