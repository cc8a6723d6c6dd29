"""Micro-batches: which rows go together, and how their tokens lie in one packed row.

A row feeds its prompt and its response but for the last token, which nothing predicts from. Rows without a
response cost nothing and stay in the batch. What a prompt's tokens are computed to does not depend on the response:
rows that have it in common can have it fed once, and are attended to as if each had its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from hybridrl.batch import FIELDS, fed_lengths, lengths, ranges
from hybridrl.dispatch import balanced
from hybridrl.errors import BatchError
from hybridrl.workers.training.attention import Pack, Shared


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass: T fed tokens for b rows with N response tokens in all, the longest R.

    A micro-batch without rows feeds one token and has no targets; it only takes part in collectives.
    """

    rows: list[int]
    """Row numbers in the batch, longest first."""
    input_ids: Tensor
    """[1, T] int64."""
    position_ids: Tensor
    """[1, T] int64, from 0 in every row."""
    predictors: Tensor
    """[N] int64: the fed token whose hidden state predicts each response token."""
    targets: Tensor
    """[N] int64: the response tokens."""
    sources: Tensor
    """[N] int64, on CPU: where each response token lies in the batch's ragged columns."""
    cells: Tensor
    """[N] int64: where each response token lies in the padded [b, R] view, flattened."""
    width: int
    """R."""
    pack: Pack
    """Where each row lies, for attention."""
    experts: Tensor | None
    """[T, L, K] uint8 or uint16, on CPU: experts that the fed tokens went to, as they travel; None without them."""

    def padded(self, values: Tensor) -> Tensor:
        """[N, ...] values as right-padded [b, R, ...], zero in the padding; keeps the gradient."""
        cells = values.new_zeros(len(self.rows) * self.width, *values.shape[1:])
        return cells.index_copy(0, self.cells, values).unflatten(0, (len(self.rows), self.width))


def cut(sizes: list[int], costs: list[float], budget: int, count: int = 0) -> list[list[int]]:
    """Bins of row numbers with at most `budget` tokens each and about equal costs, the costliest bin first.

    There are as few as first-fit by decreasing size needs, or `count` if that is more; bins may stay empty then.
    A row larger than the budget gets a bin of its own. Rows in a bin are ordered by decreasing size.
    """
    fitted = _first_fit(sizes, budget)
    count = max(count, len(fitted))
    bins = balanced(costs, count, sizes, budget) or fitted + [[] for _ in range(count - len(fitted))]
    return sorted((sorted(rows, key=lambda row: -sizes[row]) for rows in bins),
                  key=lambda rows: -sum(costs[row] for row in rows))


def _first_fit(sizes: list[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fit = next((i for i, left in enumerate(room) if sizes[row] <= left), None)
        if fit is None:
            bins.append([])
            room.append(budget)
            fit = len(bins) - 1
        bins[fit].append(row)
        room[fit] -= sizes[row]
    return bins


def micro_batches(batch: TensorDict, bins: list[list[int]], device: torch.device, kernel: str = "sdpa",
                  share: bool = False) -> Iterator[MicroBatch]:
    """One micro-batch a bin, in order, for a kernel of attention; an empty bin gives one without rows.

    With `share` a prompt that several rows of a micro-batch begin with is fed once, for all of them.
    """
    prompts, responses = batch["prompt_ids"], batch["response_ids"]
    experts = batch["routed_experts"] if "routed_experts" in batch.keys() else None
    if experts is not None and (found := lengths(experts).tolist()) != fed_lengths(batch):
        raise BatchError(f"routed_experts has rows of {found} tokens, those that are fed have {fed_lengths(batch)}.")
    for rows in bins:
        yield _micro_batch(prompts, responses, rows, device, kernel, share, experts)


def of_fed_tokens(column: Tensor, rows: list[int]) -> Tensor:
    """[T]: where the fed tokens of some rows lie in a ragged column of fed tokens."""
    index = torch.tensor(rows, dtype=torch.int64)
    return ranges(column.offsets()[index], lengths(column)[index])


def _micro_batch(prompts: Tensor, responses: Tensor, rows: list[int], device: torch.device,
                 kernel: str, share: bool, experts: Tensor | None) -> MicroBatch:
    index = torch.tensor(rows, dtype=torch.int64)
    sizes = lengths(responses)[index]
    width = int(sizes.max()) if rows else 0
    live = sizes.nonzero()[:, 0]  # rows without a response feed nothing
    index, num_targets, cells = index[live], sizes[live], ranges(live * width, sizes[live])
    num_prompt, source = lengths(prompts)[index], ranges(responses.offsets()[index], num_targets)
    fed = num_prompt + num_targets - 1
    starts = fed.cumsum(0) - fed
    predictors, positions = ranges(starts + num_prompt - 1, num_targets), ranges(torch.zeros_like(fed), fed)
    in_prompt = positions < num_prompt.repeat_interleave(fed)
    input_ids = torch.empty_like(positions)
    input_ids[in_prompt] = prompts.values()[ranges(prompts.offsets()[index], num_prompt)]
    input_ids[~in_prompt] = responses.values()[ranges(responses.offsets()[index], num_targets - 1)]
    shared = _shared_prompts(prompts, index, starts, in_prompt) if share else None
    if shared is not None:
        input_ids, positions, predictors = input_ids[shared.firsts], positions[shared.firsts], shared.places[predictors]
    if not len(live):
        fed, input_ids, positions = (torch.tensor([number]) for number in (1, 0, 0))
    return MicroBatch(
        rows=rows, input_ids=input_ids[None].to(device), position_ids=positions[None].to(device),
        predictors=predictors.to(device), targets=responses.values()[source].to(device), sources=source,
        cells=cells.to(device), width=width, pack=Pack(fed.tolist(), device, kernel, shared=shared),
        experts=experts.values()[of_fed_tokens(experts, rows)] if experts is not None and len(source) else None)


def _shared_prompts(prompts: Tensor, index: Tensor, starts: Tensor, in_prompt: Tensor) -> Shared | None:
    """Which fed tokens the rows `index` have in common, when each begins at `starts`; None when none are."""
    values, offsets = prompts.values().numpy(), prompts.offsets().tolist()
    leaders: dict[bytes, int] = {}
    leader = [leaders.setdefault(values[offsets[row]:offsets[row + 1]].tobytes(), i)
              for i, row in enumerate(index.tolist())]
    if len(leaders) == len(leader):
        return None
    token = torch.arange(len(in_prompt))
    first = token.clone()
    first[in_prompt] = ranges(starts[torch.tensor(leader)], lengths(prompts)[index])
    own = first == token
    return Shared((own.cumsum(0) - 1)[first], own.nonzero()[:, 0])


def columns(batch: TensorDict, part: MicroBatch, device: torch.device) -> dict[str, Tensor]:
    """The batch's tensor columns for the rows of a micro-batch: per-token ones padded [b, R], per-row ones [b, ...].

    Columns of prompts, of fed tokens and of Python objects are left out.
    Raises BatchError when a per-token column has other row lengths than `response_ids`.
    """
    sizes = lengths(batch["response_ids"])
    picked = {}
    for name in batch.keys():
        column = batch.get(name)
        if not isinstance(column, Tensor) or (name in FIELDS and FIELDS[name].shape in ("T", "FLK")):
            continue
        if not column.is_nested:
            picked[name] = column[torch.tensor(part.rows, dtype=torch.int64)].to(device)
        elif torch.equal(lengths(column), sizes):
            picked[name] = part.padded(column.values()[part.sources].to(device))
        else:
            raise BatchError(f"field {name!r} has rows of {lengths(column).tolist()} tokens, "
                             f"response_ids of {sizes.tolist()}.")
    return picked
