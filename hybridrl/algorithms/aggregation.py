"""From per-token losses to one number: the table AGGREGATIONS.

Every mode is linear: loss = sum over b, t of c[b,t] * L[b,t], and c depends on the mask of the whole
mini-batch alone. Compute c once per optimizer step, before the batch is cut into micro-batches or spread over
ranks; each piece adds the sum of its c * L, and the pieces add up to the same loss and gradient however they
were cut. A backend that averages gradients over D ranks needs c * D.

Use the mask before rejected tokens are removed: a token that a correction drops stays in the denominator.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.columns import check_ids, check_mask, check_tokens, given, need
from hybridrl.algorithms.groups import Trajectories
from hybridrl.algorithms.masked import select
from hybridrl.algorithms.tables import Table, option
from hybridrl.errors import ConfigError

AGGREGATIONS = Table("aggregation")


def loss_weights(name: str, columns: Mapping[str, Any], options: Any = None) -> Tensor:
    """Coefficients c [B, R] float32 of aggregation `name` for a whole mini-batch.

    Raises:
        ConfigError: unknown name or option. BatchError: a column is missing or has the wrong shape or dtype.
    """
    return AGGREGATIONS.call(name, options, columns)


def aggregate(losses: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """Sum of weights * losses over trainable tokens (0-d): the partial loss of any piece of a mini-batch.

    An empty piece gives 0 that is still connected to the graph.

    Raises:
        BatchError: shapes or dtypes don't fit.
    """
    check_tokens(mask, losses=losses, weights=weights)
    return (select(losses, mask) * select(weights, mask)).sum()


def _coefficients(mask: Tensor, per_row: Tensor) -> Tensor:
    """[B, R] float32 with per_row [B] float64 on trainable tokens."""
    zero = torch.zeros((), dtype=torch.float32, device=mask.device)
    return torch.where(mask, per_row.float()[:, None], zero)


def _sequences(mask: Tensor, trajectory_ids: Tensor | None, per_trajectory: bool) -> tuple[Tensor, Tensor]:
    """Token count of each row's sequence [B] float64 and number of non-empty sequences (0-d)."""
    if per_trajectory:
        trajectory_ids = need("per_trajectory", "trajectory_ids", trajectory_ids)
    check_ids(mask, **given(trajectory_ids=trajectory_ids))
    lengths = mask.sum(dim=1)
    rows = Trajectories.of(lengths, trajectory_ids if per_trajectory else None)
    totals = rows.total(lengths)
    return totals[rows.index], (totals > 0).sum().double()


@AGGREGATIONS.register("token-mean")
@torch.no_grad()
def token_mean(mask: Tensor) -> Tensor:
    """Every token of the mini-batch weighs the same: c = 1 / M, M trainable tokens.

    Args:
        mask: [B, R] bool, of the whole mini-batch.
    Returns:
        [B, R] float32, zero where mask is false.
    Raises:
        BatchError: mask is not bool [B, R].
    Source: DAPO, arXiv:2503.14476.
    """
    check_mask(mask)
    total = mask.sum().double().clamp(min=1)
    return _coefficients(mask, (1 / total).expand(mask.shape[0]))


@dataclass(kw_only=True)
class SequenceOptions:
    per_trajectory: bool = False
    """A sequence is a trajectory (all its rows) instead of a row; needs trajectory_ids."""


@AGGREGATIONS.register("seq-mean-token-sum", options=SequenceOptions)
@torch.no_grad()
def seq_mean_token_sum(
    mask: Tensor,
    trajectory_ids: Tensor | None = None,
    *,
    per_trajectory: bool = SequenceOptions.per_trajectory,
) -> Tensor:
    """Mean over sequences of the token sum: c = 1 / S, S sequences with trainable tokens.

    Arguments, result and errors as `seq_mean_token_mean`.
    """
    check_mask(mask)
    _, count = _sequences(mask, trajectory_ids, per_trajectory)
    return _coefficients(mask, (1 / count.clamp(min=1)).expand(mask.shape[0]))


@AGGREGATIONS.register("seq-mean-token-mean", options=SequenceOptions)
@torch.no_grad()
def seq_mean_token_mean(
    mask: Tensor,
    trajectory_ids: Tensor | None = None,
    *,
    per_trajectory: bool = SequenceOptions.per_trajectory,
) -> Tensor:
    """Mean over sequences of the token mean: c = 1 / (S n_b), n_b the sequence's trainable tokens.

    Args:
        mask: [B, R] bool, of the whole mini-batch.
        trajectory_ids: [B] int64, needed with per_trajectory.
    Returns:
        [B, R] float32, zero where mask is false.
    Raises:
        BatchError: mask or trajectory_ids have the wrong shape or dtype, or the latter is missing.
    Source: GRPO, arXiv:2402.03300.
    """
    check_mask(mask)
    lengths, count = _sequences(mask, trajectory_ids, per_trajectory)
    return _coefficients(mask, 1 / (count.clamp(min=1) * lengths.clamp(min=1)))


@dataclass(kw_only=True)
class NormalizedOptions(SequenceOptions):
    max_response_length: int | None = option(None, ge=1)
    """C, constant for the whole run: the configured response limit. Null reads the argument of the call."""


@AGGREGATIONS.register("seq-mean-token-sum-norm", options=NormalizedOptions)
@torch.no_grad()
def seq_mean_token_sum_norm(
    mask: Tensor,
    trajectory_ids: Tensor | None = None,
    *,
    max_response_length: int | None = NormalizedOptions.max_response_length,
    per_trajectory: bool = NormalizedOptions.per_trajectory,
) -> Tensor:
    """Mean over sequences of the token sum over a constant: c = 1 / (S C), C = max_response_length.

    C must be given; the padded width of the tensor at hand is never used, because it changes between batches.
    Other arguments, result and errors as `seq_mean_token_mean`.

    Raises:
        ConfigError: max_response_length is missing or below 1.
    Source: Dr. GRPO, arXiv:2503.20783.
    """
    check_mask(mask)
    if max_response_length is None or max_response_length < 1:
        raise ConfigError(
            "aggregation 'seq-mean-token-sum-norm' needs 'max_response_length', the run's configured response "
            f"limit (at least 1), got {max_response_length}."
        )
    _, count = _sequences(mask, trajectory_ids, per_trajectory)
    return _coefficients(mask, (1 / (count.clamp(min=1) * max_response_length)).expand(mask.shape[0]))


@AGGREGATIONS.register("prompt-mean", traits=("groups",))
@torch.no_grad()
def prompt_mean(mask: Tensor, group_ids: Tensor) -> Tensor:
    """Mean over prompts of the token mean inside the prompt: c = 1 / (P M_q).

    P counts prompts with trainable tokens, M_q the prompt's trainable tokens.

    Args:
        mask: [B, R] bool, of the whole mini-batch. group_ids: [B] int64.
    Returns:
        [B, R] float32, zero where mask is false.
    Raises:
        BatchError: a column has the wrong shape or dtype.
    Source: ScaleRL, arXiv:2510.13786.
    """
    check_ids(mask, group_ids=group_ids)
    lengths = mask.sum(dim=1)
    prompts = Trajectories.of(lengths, group_ids)
    totals = prompts.total(lengths)
    count = (totals > 0).sum().double().clamp(min=1)
    return _coefficients(mask, 1 / (count * totals[prompts.index].clamp(min=1)))
