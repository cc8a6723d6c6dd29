"""Asynchronous training: admission of new rollouts, hard staleness limits, an approximate proximal policy."""

import torch
from torch import Tensor

from hybridrl.algorithms.columns import check_mask, check_tokens
from hybridrl.algorithms.masked import at_least_float32, select
from hybridrl.errors import BatchError


def free_slots(
    *,
    version: int,
    batch_trajectories: int,
    max_staleness: int,
    accepted: int,
    running: int,
    max_concurrent: int,
) -> int:
    """How many trajectories may be started now; negative when too many run already.

    min(max_concurrent - running, (max_staleness + version + 1) * batch_trajectories - (accepted + running)).
    Rejected and failed trajectories leave the counts. After resuming at version i start with
    `resumed_accepted(i, batch_trajectories)`, or a burst is admitted. max_staleness = 0 is synchronous.

    Args:
        version: policy version being trained. batch_trajectories: trajectories per optimizer iteration.
        accepted: finished trajectories so far. running: in flight.
    Source: AReaL, arXiv:2505.24298.
    """
    allowed = (max_staleness + version + 1) * batch_trajectories - (accepted + running)
    return min(max_concurrent - running, allowed)


def resumed_accepted(version: int, batch_trajectories: int) -> int:
    """Accepted count to continue with after resuming at `version`."""
    return version * batch_trajectories


@torch.no_grad()
def stale_rows(versions: Tensor, mask: Tensor, *, current_version: int, max_staleness: int) -> Tensor:
    """[B] bool: rows whose oldest trainable token is more than max_staleness versions old.

    Args:
        versions: [B, R] int64, version that sampled each token. mask: [B, R] bool.
    Raises:
        BatchError: shapes don't fit.
    """
    _check_versions(versions, mask)
    return ((current_version - versions > max_staleness) & mask).any(dim=1)


@torch.no_grad()
def approximate_old_log_probs(
    log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, versions: Tensor, *, current_version: int
) -> Tensor:
    """Log-probs of the proximal policy by interpolation, saving its forward pass.

    l_prox = l_rollout + a (sg(l) - l_rollout), a = clip((v - 1 - v_tok) / (v - v_tok), 0, 1), v the current
    version; a = 0 where v <= v_tok.

    Args:
        log_probs, rollout_log_probs: [B, R] float. mask: [B, R] bool. versions: [B, R] int64.
    Returns:
        [B, R], at least float32, zero where mask is false, without gradient.
    Raises:
        BatchError: shapes or dtypes don't fit.
    Source: A-3PO, arXiv:2512.06547.
    """
    check_tokens(mask, log_probs=log_probs, rollout_log_probs=rollout_log_probs)
    _check_versions(versions, mask)
    age = torch.where(mask, current_version - versions, 0).double()
    share = torch.where(age > 0, (age - 1) / age.clamp(min=1), 0.0)
    now, then = at_least_float32(log_probs), at_least_float32(rollout_log_probs)
    return select(then + share.to(then.dtype) * (now - then), mask)


def _check_versions(versions: Tensor, mask: Tensor) -> None:
    check_mask(mask)
    if versions.is_floating_point() or versions.shape != mask.shape:
        raise BatchError(
            f"'versions' must be integer {list(mask.shape)} like 'mask', got {versions.dtype} {list(versions.shape)}."
        )
