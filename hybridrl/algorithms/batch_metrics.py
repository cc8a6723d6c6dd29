"""What a training batch looked like: rewards, lengths, groups, advantages, and the gap between the two engines."""

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from hybridrl.algorithms.columns import padded_columns
from hybridrl.algorithms.diagnostics import batch_mismatch
from hybridrl.algorithms.groups import Trajectories
from hybridrl.algorithms.metrics import (
    advantage_metrics,
    group_metrics,
    length_metrics,
    pass_at_k_metrics,
    reward_metrics,
    staleness_metrics,
)
from hybridrl.algorithms.partials import Partial, finalize, max_of, min_of
from hybridrl.algorithms.values import explained_variance
from hybridrl.batch import lengths, require


def batch_metrics(batch: TensorDict, *, version: int | None = None, max_response_tokens: int | None = None,
                  bounds: tuple[float, float] = (0.0, 2.0)) -> dict[str, float]:
    """Metrics of a whole batch after advantages and corrections.

    Names are `reward/...` (the environment's), `shaped_reward/...`, `response/...`, `group/...` (with pass@k for each
    power of 2 up to the largest group), `advantage/...`, `critic/explained_variance` where the batch has values,
    `version/min`, `version/max` of the weights that sampled it, and, where the batch has `old_log_probs` (else they
    come with the update), `mismatch/...`: rollout against training log-probs, `mismatch/max_gap` the largest
    difference of any token. Rows of one trajectory count once in rewards and groups.

    Args:
        version: of the weights that were trained; with it `staleness/mean`, `staleness/max`.
        max_response_tokens: the configured limit; with it `response/at_limit_ratio`.
        bounds: of the ratio, for `mismatch/frac_below_lo` and `mismatch/frac_above_hi`.
    Raises BatchError when a column is missing.
    """
    require(batch, "rewards", "group_ids", "finish_reason", "rollout_log_probs", "advantages", "weight_versions")
    columns = padded_columns(batch)
    mask, versions = columns["mask"], columns["weight_versions"]
    first = Trajectories.of(columns["rewards"], columns.get("trajectory_ids")).first
    shaped, groups = columns["rewards"][first], columns["group_ids"][first]
    raw = columns.get("outcomes", columns["rewards"])[first]
    named: dict[str, dict[str, Partial]] = {
        "reward": _without("reward_", reward_metrics(raw)),
        "shaped_reward": _without("reward_", reward_metrics(shaped)),
        "response": _without("response_", _lengths(batch, mask.shape[1], max_response_tokens)),
        "group": _without("group_", group_metrics(raw, groups)) | pass_at_k_metrics(raw, groups, _powers(groups)),
        "advantage": _without("advantage_", advantage_metrics(columns["advantages"], mask)),
        "critic": _critic(columns),
        "version": {"min": min_of(versions, mask), "max": max_of(versions, mask)},
        "staleness": {} if version is None else _without("staleness_", staleness_metrics(versions, mask, version)),
    }
    mismatch = batch_mismatch(columns, bounds) if "old_log_probs" in columns else {}
    return {f"{group}/{name}": value for group, parts in named.items()
            for name, value in finalize(parts).items()} | finalize(mismatch)


def _lengths(batch: TensorDict, width: int, limit: int | None) -> dict[str, Partial]:
    """Of what was sampled: rows that left the loss have lost their mask, and count all the same."""
    sizes = batch["response_lengths"] if "response_lengths" in batch.keys() else lengths(batch["response_ids"])
    truncated = torch.tensor([reason == "length" for reason in batch["finish_reason"]], dtype=torch.bool)
    return length_metrics(torch.arange(width) < sizes[:, None], truncated=truncated, max_response_length=limit)


def _powers(group_ids: Tensor) -> tuple[int, ...]:
    """1, 2, 4, ... up to the size of the largest group."""
    largest = int(group_ids.unique(return_counts=True)[1].max()) if len(group_ids) else 0
    return tuple(2**i for i in range(largest.bit_length()))


def _critic(columns: Mapping[str, Tensor]) -> dict[str, Partial]:
    if not {"values", "returns"} <= columns.keys():
        return {}
    return {"explained_variance": explained_variance(columns["values"], columns["returns"], columns["mask"])}


def _without(prefix: str, parts: dict[str, Partial]) -> dict[str, Partial]:
    return {name.removeprefix(prefix): part for name, part in parts.items()}
