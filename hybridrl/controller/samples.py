"""A scored response as an object of `samples.jsonl`; `hybridrl.samples` reads it."""

import math
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from hybridrl.batch import rows_of

COPIED = ("prompt", "response", "answer", "reward_error", "finish_reason", "agent", "turns")
TOKEN_COLUMNS = ("response_ids", "response_mask", "weight_versions", "rollout_log_probs", "old_log_probs")
DIGITS = 4
"""Of log-prob gaps, after the point."""


def evenly(total: int, wanted: int) -> list[int]:
    """Up to `wanted` of the rows 0 to total - 1, evenly spread."""
    return sorted({i * total // wanted for i in range(wanted)}) if total else []


def samples_of(step: int, batch: TensorDict, rows: Iterable[int]) -> Iterator[dict[str, Any]]:
    """What is known about rows, as far as the batch has the columns; null where a value is no number.

    `reward_components` is there when several parts make up the reward. `tokens` describes the response tokens: `ids`;
    `mask` and `versions` as runs [value, count]; and, once both engines scored them, `log_prob_gaps`, which is
    old_log_probs - rollout_log_probs in nats and 0 where the mask is false.
    """
    # Taking one row out of a ragged column costs as much as taking all.
    columns = {name: rows_of(batch[name]) for name in batch.keys()
               if name in (*COPIED, *TOKEN_COLUMNS, "rewards") or name.startswith("reward/")}
    for row in rows:
        yield _sample(step, {name: column[row] for name, column in columns.items()})


def _sample(step: int, values: dict[str, Any]) -> dict[str, Any]:
    sample: dict[str, Any] = {"step": step}
    sample |= {name: values[name] for name in COPIED if name in values}
    if "rewards" in values:
        sample["reward"] = _number(float(values["rewards"]))
    components = {name.removeprefix("reward/"): _number(float(value)) for name, value in values.items()
                  if name.startswith("reward/")}
    if components:
        sample["reward_components"] = components
    if "weight_versions" in values:
        sample["weight_versions"] = sorted(set(values["weight_versions"].tolist()))
    if "response_ids" in values:
        sample["tokens"] = _tokens({name: values[name] for name in TOKEN_COLUMNS if name in values})
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
