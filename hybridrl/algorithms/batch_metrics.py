"""What a training batch looked like: rewards, lengths, groups, advantages, and the gap between the two engines."""

import torch
from tensordict import TensorDict

from hybridrl.algorithms.algorithm import padded_columns
from hybridrl.algorithms.corrections import Correction
from hybridrl.algorithms.diagnostics import mismatch_metrics
from hybridrl.algorithms.metrics import advantage_metrics, group_metrics, length_metrics, reward_metrics
from hybridrl.algorithms.partials import Max, Partial, finalize, max_of, min_of
from hybridrl.batch import lengths, require


def batch_metrics(batch: TensorDict) -> dict[str, float]:
    """Metrics of a whole batch after advantages and corrections.

    Names are `reward/...` (the environment's), `shaped_reward/...`, `response/...`, `group/...`, `advantage/...`,
    `mismatch/...` (rollout against training log-probs; `mismatch/max_gap` is the largest difference of any token) and
    `version/min`, `version/max` of the weights that sampled it.

    Raises BatchError when a column is missing.
    """
    require(batch, "rewards", "group_ids", "finish_reason", "rollout_log_probs", "old_log_probs", "advantages",
            "weight_versions")
    columns = padded_columns(batch)
    mask, weights = columns["mask"], columns.get("correction_weights")
    old, rollout = columns["old_log_probs"], columns["rollout_log_probs"]
    truncated = torch.tensor([reason == "length" for reason in batch["finish_reason"]], dtype=torch.bool)
    # rows that left the loss have lost their mask, and were sampled all the same
    sampled = torch.arange(mask.shape[1]) < lengths(batch["response_ids"])[:, None]
    gap = torch.where(mask, (old - rollout).abs(), 0.0)
    versions = columns["weight_versions"]
    named: dict[str, dict[str, Partial]] = {
        "reward": _without("reward_", reward_metrics(columns.get("outcomes", columns["rewards"]))),
        "shaped_reward": _without("reward_", reward_metrics(columns["rewards"])),
        "response": _without("response_", length_metrics(sampled, truncated=truncated)),
        "group": _without("group_", group_metrics(columns.get("outcomes", columns["rewards"]), columns["group_ids"])),
        "advantage": _without("advantage_", advantage_metrics(columns["advantages"], mask)),
        "mismatch": mismatch_metrics(
            old, rollout, mask, None if weights is None else Correction(weights, mask & (weights > 0))),
        "version": {"min": min_of(versions, mask), "max": max_of(versions, mask)},
    }
    named["mismatch"]["max_gap"] = Max(gap.max()) if gap.numel() else Max(0.0)
    return {f"{group}/{name}": value for group, parts in named.items() for name, value in finalize(parts).items()}


def _without(prefix: str, parts: dict[str, Partial]) -> dict[str, Partial]:
    return {name.removeprefix(prefix): part for name, part in parts.items()}
