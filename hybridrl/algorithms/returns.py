"""Where rewards sit and how they add up: placement, folding, row scores, reward-to-go.

A scalar outcome sits on the row's last trainable token. A reward on an environment token is folded back to
the closest earlier trainable token. Discounting counts policy tokens only.
"""

import torch
from torch import Tensor

from hybridrl.algorithms.columns import check_rows, check_tokens, given
from hybridrl.algorithms.masked import finite, last_trainable, select
from hybridrl.errors import BatchError


def place_outcome(rewards: Tensor, mask: Tensor) -> Tensor:
    """Token rewards [B, R] with each row's scalar on its last trainable token.

    A row without trainable tokens has no place and gets zeros.

    Args:
        rewards: [B] float; NaN stays NaN at its place.
        mask: [B, R] bool.
    Returns:
        [B, R], dtype of `rewards`.
    Raises:
        BatchError: shapes or dtypes don't fit.
    """
    check_rows(mask, rewards=rewards)
    placed = torch.zeros(mask.shape, dtype=rewards.dtype, device=mask.device)
    if mask.shape[1] == 0:
        return placed
    last = last_trainable(mask)
    return placed.scatter_(1, last.clamp(min=0)[:, None], torch.where(last >= 0, rewards, 0.0)[:, None])


def fold_rewards(token_rewards: Tensor, mask: Tensor) -> Tensor:
    """Move rewards of masked columns to the closest earlier trainable column.

    Rewards before the first trainable column are dropped: the policy can't have caused them.

    Args:
        token_rewards: [B, R] float, meaningful also where mask is false.
        mask: [B, R] bool.
    Returns:
        [B, R], dtype of `token_rewards`, zero where mask is false.
    Raises:
        BatchError: shapes or dtypes don't fit.
    """
    check_tokens(mask, token_rewards=token_rewards)
    if mask.numel() == 0:
        return torch.zeros_like(token_rewards)
    columns = torch.arange(mask.shape[1], device=mask.device)
    target = torch.where(mask, columns, -1).cummax(dim=1).values
    caused = torch.where(target >= 0, token_rewards, token_rewards.new_zeros(()))
    return torch.zeros_like(token_rewards).scatter_add(1, target.clamp(min=0), caused)


def folded_rewards(mask: Tensor, rewards: Tensor | None, token_rewards: Tensor | None) -> tuple[Tensor, Tensor]:
    """Folded token rewards [B, R] float64 and row validity [B] bool, from whichever column is given.

    `token_rewards` replaces the placement of `rewards`. A row is invalid when its scalar or any of its token
    rewards is not finite; its rewards read 0.
    """
    if rewards is None and token_rewards is None:
        raise BatchError("needs 'rewards' [B] or 'token_rewards' [B, R], got neither.")
    check_rows(mask, **given(rewards=rewards))
    check_tokens(mask, **given(token_rewards=token_rewards))
    valid = torch.ones(mask.shape[0], dtype=torch.bool, device=mask.device)
    if rewards is not None:
        valid = rewards.isfinite()
    if token_rewards is None:
        assert rewards is not None
        return place_outcome(torch.where(valid, rewards.double(), 0.0), mask), valid
    valid = valid & finite(token_rewards).all(dim=1)
    return fold_rewards(torch.where(valid[:, None], token_rewards.double(), 0.0), mask), valid


def row_scores(mask: Tensor, rewards: Tensor | None, token_rewards: Tensor | None) -> Tensor:
    """One scalar per row [B] float64, NaN where unscorable.

    The sum of folded token rewards when they are given, else `rewards`. A row without trainable tokens keeps
    its `rewards`, because it still counts in group statistics.
    """
    if token_rewards is None and rewards is not None:
        check_rows(mask, rewards=rewards)
        return torch.where(rewards.isfinite(), rewards.double(), torch.nan)
    folded, valid = folded_rewards(mask, rewards, token_rewards)
    score = folded.sum(dim=1)
    if rewards is not None:
        score = torch.where(mask.any(dim=1), score, rewards.double())
    return torch.where(valid, score, torch.nan)


def backward_scan(x: Tensor, decay: Tensor | float, mask: Tensor) -> Tensor:
    """y_j = x_j + decay * y_{j+1} over trainable columns, from the last; masked columns are skipped.

    Args:
        x: [B, R] float64, zero where mask is false.
        decay: a number, or [B, 1].
        mask: [B, R] bool.
    Returns:
        [B, R] float64, zero where mask is false.
    """
    if isinstance(decay, int | float) and decay == 1.0:
        return select(x.flip(1).cumsum(1).flip(1), mask)
    # Columns become rows so that each step reads contiguous memory; one fused step per column.
    steps = x.T.contiguous()
    factors = torch.where(mask, torch.as_tensor(decay, dtype=x.dtype, device=x.device), 1.0).T.contiguous()
    out = torch.empty_like(steps)
    carry = torch.zeros_like(x[:, 0]) if x.shape[1] else x.new_zeros(x.shape[0])
    for step, factor, slot in zip(
        reversed(steps.unbind(0)), reversed(factors.unbind(0)), reversed(out.unbind(0)), strict=True
    ):
        carry = torch.addcmul(step, factor, carry, out=slot)
    return select(out.T, mask)


def reward_to_go(folded: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Discounted sum of this and later rewards: G(t_j) = R(t_j) + gamma * G(t_{j+1}) over trainable tokens.

    Args:
        folded: [B, R] float, rewards on trainable tokens only (see `fold_rewards`).
        mask: [B, R] bool.
        gamma: discount per policy token.
    Returns:
        [B, R] float64, zero where mask is false.
    Raises:
        BatchError: shapes or dtypes don't fit.
    """
    check_tokens(mask, folded=folded)
    return backward_scan(select(folded.double(), mask), gamma, mask)
