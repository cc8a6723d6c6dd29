"""A scored response as an object of `samples.jsonl`; `hybridrl.samples` reads it."""

import math
from itertools import groupby
from typing import Any

from tensordict import TensorDict
from torch import Tensor

COPIED = ("prompt", "response", "answer", "reward_error", "finish_reason", "agent", "turns")
TOKEN_COLUMNS = ("response_ids", "response_mask", "weight_versions", "rollout_log_probs", "old_log_probs")
DIGITS = 4
"""Of log-prob gaps, after the point."""


def evenly(total: int, wanted: int) -> list[int]:
    """Up to `wanted` of the rows 0 to total - 1, evenly spread."""
    return sorted({i * total // wanted for i in range(wanted)}) if total else []


def sample_of(step: int, batch: TensorDict, row: int) -> dict[str, Any]:
    """What is known about one row, as far as the batch has the columns; null where a value is no number.

    `reward_components` is there when several parts make up the reward. `tokens` describes the response tokens: `ids`;
    `mask` and `versions` as runs [value, count]; and, once both engines scored them, `log_prob_gaps`, which is
    old_log_probs - rollout_log_probs in nats and 0 where the mask is false.
    """
    columns = batch.keys()
    sample: dict[str, Any] = {"step": step}
    sample |= {name: batch[name][row] for name in COPIED if name in columns}
    if "rewards" in columns:
        sample["reward"] = _number(float(batch["rewards"][row]))
    components = {name.removeprefix("reward/"): _number(float(batch[name][row])) for name in columns
                  if name.startswith("reward/")}
    if components:
        sample["reward_components"] = components
    if "weight_versions" in columns:
        sample["weight_versions"] = sorted(set(batch["weight_versions"][row].tolist()))
    if "response_ids" in columns:
        sample["tokens"] = _tokens({name: batch[name][row] for name in TOKEN_COLUMNS if name in columns})
    return sample


def _tokens(columns: dict[str, Tensor]) -> dict[str, Any]:
    tokens: dict[str, Any] = {"ids": columns["response_ids"].tolist()}
    for name, column in (("mask", "response_mask"), ("versions", "weight_versions")):
        if column in columns:
            tokens[name] = [[value, len(list(run))] for value, run in groupby(columns[column].tolist())]
    if "rollout_log_probs" in columns and "old_log_probs" in columns:
        gaps = (columns["old_log_probs"] - columns["rollout_log_probs"]).double()
        if "response_mask" in columns:
            gaps = gaps.where(columns["response_mask"], 0.0)
        tokens["log_prob_gaps"] = [_number(round(gap, DIGITS)) for gap in gaps.tolist()]
    return tokens


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
