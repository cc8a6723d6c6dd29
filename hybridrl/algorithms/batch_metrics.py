"""What a training batch looked like: rewards, lengths, groups, advantages, and the gap between the two engines."""

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from hybridrl.algorithms.algorithm import padded_columns
from hybridrl.algorithms.diagnostics import batch_mismatch
from hybridrl.algorithms.metrics import advantage_metrics, group_metrics, length_metrics, reward_metrics
from hybridrl.algorithms.partials import Partial, finalize, max_of, min_of
from hybridrl.algorithms.values import explained_variance
from hybridrl.batch import lengths, require


def batch_metrics(batch: TensorDict) -> dict[str, float]:
    """Metrics of a whole batch after advantages and corrections.

    Names are `reward/...` (the environment's), `shaped_reward/...`, `response/...`, `group/...`, `advantage/...`,
    `version/min`, `version/max` of the weights that sampled it, and, where the batch has `old_log_probs` (else they
    come with the update), `mismatch/...`: rollout against training log-probs, `mismatch/max_gap` the largest
    difference of any token.

    Raises BatchError when a column is missing.
    """
    require(batch, "rewards", "group_ids", "finish_reason", "rollout_log_probs", "advantages", "weight_versions")
    columns = padded_columns(batch)
    mask = columns["mask"]
    truncated = torch.tensor([reason == "length" for reason in batch["finish_reason"]], dtype=torch.bool)
    # rows that left the loss have lost their mask, and were sampled all the same
    sampled = torch.arange(mask.shape[1]) < lengths(batch["response_ids"])[:, None]
    versions = columns["weight_versions"]
    named: dict[str, dict[str, Partial]] = {
        "reward": _without("reward_", reward_metrics(columns.get("outcomes", columns["rewards"]))),
        "shaped_reward": _without("reward_", reward_metrics(columns["rewards"])),
        "response": _without("response_", length_metrics(sampled, truncated=truncated)),
        "group": _without("group_", group_metrics(columns.get("outcomes", columns["rewards"]), columns["group_ids"])),
        "advantage": _without("advantage_", advantage_metrics(columns["advantages"], mask)),
        "critic": _critic(columns),
        "version": {"min": min_of(versions, mask), "max": max_of(versions, mask)},
    }
    mismatch = batch_mismatch(columns) if "old_log_probs" in columns else {}
    return {f"{group}/{name}": value for group, parts in named.items()
            for name, value in finalize(parts).items()} | finalize(mismatch)


def _critic(columns: Mapping[str, Tensor]) -> dict[str, Partial]:
    if not {"values", "returns"} <= columns.keys():
        return {}
    return {"explained_variance": explained_variance(columns["values"], columns["returns"], columns["mask"])}


def _without(prefix: str, parts: dict[str, Partial]) -> dict[str, Partial]:
    return {name.removeprefix(prefix): part for name, part in parts.items()}
