"""The one type that crosses processes: a TensorDict with declared fields.

One row is one prompt or one response. Per-token fields are ragged (jagged nested tensors, no padding);
`padded` gives the rectangular view that `hybridrl.algorithms` works on. Python objects (answers, task
descriptions) are one object a row.

Rows are selected, repeated, joined and padded with the functions below; they accept any row count, zero
included. They never reorder rows.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from hybridrl.errors import BatchError, unknown

# tensordict asks torch.fx a question that torch answers with a deprecation note, once a process.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class Field:
    """A declared column. `shape` is per row: "" scalar, "T" ragged prompt, "R" ragged response, "K" a vector; "RK" is a
    vector a response token; "FLK" is a matrix for each token that is fed: prompt and response without the last."""

    shape: str
    dtype: torch.dtype | tuple[torch.dtype, ...] | type
    writer: str
    meaning: str


FIELDS: dict[str, Field] = {
    # written by the prompt loader
    "prompt_ids": Field("T", torch.int64, "data", "token ids of the rendered prompt"),
    "prompt": Field("", object, "data", "the prompt as given: text, or chat messages"),
    "answer": Field("", object, "data", "reference answer handed to the reward; may be None"),
    "task": Field("", object, "data", "anything else the reward needs (for instance a reasoning-gym entry)"),
    "group_ids": Field("", torch.int64, "data", "equal for responses to the same prompt"),
    "episode_ids": Field("", torch.int64, "loop", "number of the row's episode, never used twice"),
    "seeds": Field("", torch.int64, "data", "sampling seed of the row: does not depend on how work is split"),
    # written by the rollout engine
    "response_ids": Field("R", torch.int64, "rollout", "sampled token ids, end token included; observations between"),
    "response_mask": Field("R", torch.bool, "rollout", "true on tokens the policy sampled and may train on"),
    "rollout_log_probs": Field("R", torch.float32, "rollout", "log-probs as sampled; 0 on observations"),
    "weight_versions": Field("R", torch.int64, "rollout", "weight version of each token; -1 on observations"),
    "routed_experts": Field("FLK", (torch.uint8, torch.uint16), "rollout",
                            "experts of each fed token in each layer; the largest value where they are not known"),
    "finish_reason": Field("", object, "rollout", "why it ended: one of FINISH_REASONS"),
    "response": Field("", object, "rollout", "decoded response, special tokens removed"),
    "trajectory_ids": Field("", torch.int64, "rollout", "equal for the rows of one agent in one episode"),
    "agent_ids": Field("", torch.int64, "rollout", "who acts in the row, for baselines by agent"),
    "agent": Field("", object, "rollout", "name of the agent that acts in the row"),
    "turns": Field("", object, "rollout", "the row's turns in order: what was shown, what was written, rewards, place"),
    # written by rewards
    "rewards": Field("", torch.float32, "rewards", "score of the row; NaN where scoring failed"),
    "outcomes": Field("", torch.float32, "loop", "rewards as the environment gave them, before shaping"),
    "greedy_rewards": Field("", torch.float32, "loop", "reward of the likeliest response to the row's prompt"),
    "response_lengths": Field("", torch.int64, "loop", "tokens that the policy sampled, rows out of the loss included"),
    "token_rewards": Field("R", torch.float32, "loop", "rewards by token: of turns, and where penalties are by token"),
    "reward_components": Field("K", torch.float32, "rewards", "unweighted score of each part of the reward, or NaN"),
    "reward_error": Field("", object, "rewards", "None, or why the row has no reward"),
    # written by the training engine
    "old_log_probs": Field("R", torch.float32, "training", "log-probs under the weights at the start of the update"),
    "ref_log_probs": Field("R", torch.float32, "training", "log-probs under the frozen reference"),
    "entropies": Field("R", torch.float32, "training", "entropy of each token's distribution"),
    "sum_squared_probs": Field("R", torch.float32, "training", "sum over the vocabulary of squared probabilities"),
    "values": Field("R", torch.float32, "training", "the critic's value of the state before each token"),
    "bootstrap_values": Field("", torch.float32, "training", "the critic's value after a cut response; 0 for others"),
    # written by a teacher
    "teacher_log_probs": Field("R", torch.float32, "teacher", "the teacher's log-probs of the sampled tokens"),
    "teacher_top_ids": Field("RK", torch.int64, "teacher", "the teacher's K likeliest tokens in each place"),
    "teacher_top_log_probs": Field("RK", torch.float32, "teacher", "their log-probs under the teacher"),
    # written by the loop
    "advantages": Field("R", torch.float32, "loop", "advantage of each token"),
    "returns": Field("R", torch.float32, "loop", "return of each token, for a critic"),
    "loss_weights": Field("R", torch.float32, "loop", "coefficient of each token's loss in the mini-batch total"),
    "correction_weights": Field("R", torch.float32, "loop", "rollout-correction weight times keep mask"),
}

FINISH_REASONS: dict[str, str] = {
    "stop": "the response ended with an end token",
    "length": "the last response was cut at its limit of tokens",
    "aborted": "the engine gave the response up",
    "done": "the environment ended the episode",
    "max_turns": "the episode had as many turns as it may have",
    "overflow": "the next observation did not fit the context",
    "failed": "the episode failed: `reward_error` says why",
}
"""Values of `finish_reason`; the last four are those of episodes."""


def make_batch(**fields: Any) -> TensorDict:
    """Build a batch from tensors, jagged nested tensors, lists of per-row 1-D tensors, or lists of objects.

    Raises BatchError when row counts differ or a declared field has another dtype.
    """
    if not fields:
        raise BatchError("a batch needs at least one field, got none.")
    counts = {name: len(value) if not isinstance(value, Tensor) else value.shape[0] for name, value in fields.items()}
    if len(set(counts.values())) > 1:
        raise BatchError(f"all fields of a batch need the same number of rows, got {counts}.")
    batch = TensorDict({}, batch_size=[next(iter(counts.values()))])
    for name, value in fields.items():
        put(batch, name, value)
    return batch


def put(batch: TensorDict, name: str, value: Any) -> None:
    """Write one column; accepts what `make_batch` accepts.

    Raises BatchError when the row count or the declared dtype does not fit.
    """
    if isinstance(value, Tensor):
        column = value
    elif name in FIELDS and isinstance(FIELDS[name].dtype, torch.dtype):
        field = FIELDS[name]
        column = ragged(value, field.dtype) if field.shape in ("T", "R") else torch.as_tensor(value, dtype=field.dtype)
    else:
        column = objects(value)
    if isinstance(column, Tensor) and name in FIELDS:
        declared = FIELDS[name].dtype
        accepted = declared if isinstance(declared, tuple) else (declared,)
        if object not in accepted and column.dtype not in accepted:
            raise BatchError(f"field {name!r} is declared {' or '.join(map(str, accepted))}, got {column.dtype}.")
    if column.shape[0] != num_rows(batch):
        raise BatchError(f"field {name!r} has {column.shape[0]} rows, the batch has {num_rows(batch)}.")
    batch.set(name, column)


def num_rows(batch: TensorDict) -> int:
    """Number of rows."""
    return batch.batch_size[0]


def require(batch: TensorDict, *names: str) -> None:
    """Raise BatchError naming the fields that are missing and who writes them."""
    for name in names:
        if name not in batch.keys():
            by = f" It is written by {FIELDS[name].writer}." if name in FIELDS else ""
            raise BatchError(unknown("batch field", name, batch.keys()) + by)


def ragged(rows: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Jagged nested tensor [B, *] from B sequences or 1-D tensors; B may be 0, rows may be empty."""
    if all(isinstance(row, list) for row in rows):  # one conversion for all
        values = torch.tensor([item for row in rows for item in row], dtype=dtype)
    else:
        rows = [torch.as_tensor(row, dtype=dtype).reshape(-1) for row in rows]
        values = torch.cat(rows)
    return from_lengths(values, torch.tensor([len(row) for row in rows], dtype=torch.int64))


def from_lengths(values: Tensor, lengths: Tensor) -> Tensor:
    """Jagged nested tensor from rows laid end to end. values [sum(lengths)], lengths [B] int64."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    # Declared bounds keep the nested tensor from scanning its offsets on every access.
    low, high = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    return torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=low, max_seqlen=high)


def objects(values: Sequence[Any]) -> Any:
    """Column of one Python object a row."""
    values = list(values)
    return NonTensorStack(*values) if values else NonTensorData(data=[], batch_size=[0])


def is_ragged(column: Any) -> bool:
    """Whether a column is a jagged nested tensor."""
    return isinstance(column, Tensor) and column.is_nested


def lengths(column: Tensor) -> Tensor:
    """Row lengths [B] int64 of a ragged column."""
    return column.offsets().diff()


def ranges(starts: Tensor, sizes: Tensor) -> Tensor:
    """[sum(sizes)] int64: sizes[0] numbers from starts[0] on, then sizes[1] from starts[1] on, and so on."""
    before = sizes.cumsum(0) - sizes
    return torch.arange(int(sizes.sum())) + (starts - before).repeat_interleave(sizes)


def fed_lengths(batch: TensorDict) -> list[int]:
    """Tokens that each row feeds to the model.

    Raises BatchError for a row with a response and no prompt: nothing predicts its first token.
    """
    require(batch, "prompt_ids", "response_ids")
    prompts, responses = lengths(batch["prompt_ids"]).tolist(), lengths(batch["response_ids"]).tolist()
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if response and not prompt:
            raise BatchError(f"row {row} has a response and an empty prompt; a prompt needs at least one token.")
    return [p + r - 1 if r else 0 for p, r in zip(prompts, responses, strict=True)]


def padded(column: Tensor, fill: float | int | bool = 0, length: int | None = None) -> Tensor:
    """Right-padded [B, R, ...] copy of a ragged column; R is the longest row or `length`.

    Raises BatchError when a row is longer than `length`.
    """
    sizes, values = lengths(column), column.values()
    longest = int(sizes.max()) if len(sizes) else 0
    width = longest if length is None else length
    if longest > width:
        raise BatchError(f"can't pad to {width} tokens: the longest row has {longest}.")
    out = torch.full((len(sizes), width, *values.shape[1:]), fill, dtype=column.dtype, device=column.device)
    out[torch.arange(width, device=column.device) < sizes[:, None]] = values
    return out


def unpadded(rectangle: Tensor, like: Tensor) -> Tensor:
    """Ragged column with the row lengths of the ragged column `like`, from a right-padded [B, R] tensor."""
    sizes = lengths(like)
    if rectangle.shape[0] != len(sizes) or (len(sizes) and rectangle.shape[1] < int(sizes.max())):
        raise BatchError(f"can't cut {tuple(rectangle.shape)} into {len(sizes)} rows of {sizes.tolist()} tokens.")
    within = torch.arange(rectangle.shape[1], device=rectangle.device) < sizes[:, None]
    return from_lengths(rectangle[within], sizes)


def rows_of(column: Any) -> list[Any]:
    """A column as a list of rows: 1-D tensors for ragged columns, scalars or tensors, or objects."""
    if is_ragged(column):
        return list(column.values().split(lengths(column).tolist()))
    return list(column)


def objects_of(batch: TensorDict, name: str) -> list[Any]:
    """The rows of an object column; one object set for the whole batch counts for every row."""
    stored = batch.get(name)
    return list(batch[name]) if isinstance(stored, NonTensorStack) else [stored.data] * num_rows(batch)


def select(batch: TensorDict, index: Sequence[int] | Tensor | slice) -> TensorDict:
    """The rows named by `index`, in that order, as copies; rows may repeat. A boolean tensor [B] is a mask.

    Raises BatchError for a mask of another length, IndexError for a row that does not exist.
    """
    if isinstance(index, slice):
        index = list(range(num_rows(batch))[index])
    if isinstance(index, Tensor) and index.dtype == torch.bool:
        if index.shape != (num_rows(batch),):
            raise BatchError(f"a mask of {index.numel()} values can't select from {num_rows(batch)} rows.")
        index = index.nonzero().squeeze(1)
    index = torch.as_tensor(index, dtype=torch.int64)
    picked = TensorDict({}, batch_size=[len(index)])
    for name in batch.keys():
        picked.set(name, _select_column(batch, name, index))
    return picked


def _select_column(batch: TensorDict, name: str, index: Tensor) -> Any:
    stored = batch.get(name)
    if not isinstance(stored, Tensor):
        values = objects_of(batch, name)
        return objects([values[i] for i in index.tolist()])
    if not stored.is_nested:
        return stored[index]
    sizes = lengths(stored)[index]
    return from_lengths(stored.values()[ranges(stored.offsets()[:-1][index], sizes)], sizes)


def repeat(batch: TensorDict, times: int) -> TensorDict:
    """Each row `times` times in a row: a a b b."""
    return select(batch, torch.arange(num_rows(batch)).repeat_interleave(times))


def concat(batches: Sequence[TensorDict]) -> TensorDict:
    """All rows of all batches in order. Raises BatchError when fields differ."""
    if not batches:
        raise BatchError("nothing to concatenate: got an empty list of batches.")
    if len(batches) == 1:
        return batches[0]
    names = set(batches[0].keys())
    for other in batches[1:]:
        if set(other.keys()) != names:
            raise BatchError(f"batches have different fields: {sorted(names ^ set(other.keys()))} are not in all.")
    joined = TensorDict({}, batch_size=[sum(num_rows(b) for b in batches)])
    for name in batches[0].keys():
        columns = [b.get(name) for b in batches]
        if not isinstance(columns[0], Tensor):
            joined.set(name, objects([item for b in batches for item in objects_of(b, name)]))
        elif columns[0].is_nested:
            joined.set(name, from_lengths(torch.cat([c.values() for c in columns]),
                                          torch.cat([lengths(c) for c in columns])))
        else:
            joined.set(name, torch.cat(columns))
    return joined


def split_sizes(total: int, parts: int) -> list[int]:
    """Sizes of `parts` consecutive shares of `total` rows that differ by at most one, larger ones first."""
    share, extra = divmod(total, parts)
    return [share + (i < extra) for i in range(parts)]


def split(batch: TensorDict, parts: int) -> list[TensorDict]:
    """`parts` consecutive shares, in order; shares may be empty."""
    shares, start = [], 0
    for size in split_sizes(num_rows(batch), parts):
        shares.append(narrow(batch, start, size))
        start += size
    return shares


def narrow(batch: TensorDict, start: int, size: int) -> TensorDict:
    """Rows start..start+size as views: tensors are not copied."""
    part = TensorDict({}, batch_size=[size])
    for name in batch.keys():
        column = batch.get(name)
        if not isinstance(column, Tensor):
            part.set(name, objects(objects_of(batch, name)[start:start + size]))
        elif column.is_nested:
            offsets = column.offsets()
            first, last = int(offsets[start]), int(offsets[start + size])
            part.set(name, from_lengths(column.values()[first:last], lengths(column)[start:start + size]))
        else:
            part.set(name, column[start:start + size])
    return part
