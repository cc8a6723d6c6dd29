"""How a call on a worker group splits over its workers and how their results join.

A worker class tags its methods; `hybridrl.controller.WorkerGroup` reads the tags:

    class Counter(Worker):
        @to_all                 # every worker, same arguments; a list of results by rank
        def reset(self): ...

        @to_first               # rank 0 alone; its result
        def save(self, path): ...

        @over_rows()            # batches are split by rows; results are joined in row order
        def score(self, batch): ...

Nothing here knows about processes: the functions below are arithmetic on row counts and row costs.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from tensordict import TensorDict

from hybridrl.batch import concat, select, split_sizes
from hybridrl.errors import BatchError, ConfigError

Method = TypeVar("Method", bound=Callable[..., Any])

RowCosts = Callable[[TensorDict], list[float] | None]
"""What each row of a batch costs, in any unit; None when the batch lacks the columns to tell."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The tag of a worker method: `split` is `all`, `first` or `rows`; `axis` and `join` belong to `rows`."""

    split: str
    axis: str = ""
    join: str = "rows"


@dataclass(frozen=True, slots=True)
class Axis:
    """What a worker says of an axis: consecutive ranks of one shard, and what rows cost (None: all the same)."""

    peers: int = 1
    costs: RowCosts | None = None


def to_all(method: Method) -> Method:
    """Tag: every worker runs the method with the same arguments; the result is the list of values by rank."""
    return _tag(method, Dispatch("all"))


def to_first(method: Method) -> Method:
    """Tag: rank 0 alone runs the method; the result is its value."""
    return _tag(method, Dispatch("first"))


def over_rows(axis: str = "training", join: str = "rows") -> Callable[[Method], Method]:
    """Tag: batch arguments are split by rows over the shards of `axis`, the results join in row order.

    `Worker.peers(axis)` consecutive ranks are one shard: they get the same rows, and the first of them answers.
    A shard without rows gets an empty batch and runs all the same, so that it joins every collective.
    Where `Worker.costs(axis)` tells what rows cost, shards get about equal costs, whichever rows that takes; otherwise
    (and for futures, whose rows nobody has seen yet) consecutive rows, equally many. Results are in row order always.

    Args:
        axis: name that `Worker.peers` knows.
        join: `rows` concatenates batches, lists or tensors over the shards; `first` takes the first shard's
            value, for numbers that the workers already reduced among themselves.
    """
    if not isinstance(axis, str) or join not in ("rows", "first"):
        raise ConfigError(f"over_rows(axis, join) needs a name and join='rows' or 'first', got {axis!r}, {join!r}.")
    return lambda method: _tag(method, Dispatch("rows", axis, join))


def _tag(method: Method, dispatch: Dispatch) -> Method:
    method.dispatch = dispatch  # type: ignore[attr-defined]
    return method


def dispatched(worker_cls: type) -> dict[str, Dispatch]:
    """Tagged methods of a worker class by name; an override without a tag keeps that of the base class."""
    tags = {}
    for cls in reversed(worker_cls.__mro__):
        for name, member in vars(cls).items():
            if isinstance(getattr(member, "dispatch", None), Dispatch):
                tags[name] = member.dispatch
    return tags


def row_range(total: int, shards: int, shard: int) -> tuple[int, int]:
    """First and one-past-last row of a shard's share of `total` rows."""
    sizes = split_sizes(total, shards)
    start = sum(sizes[:shard])
    return start, start + sizes[shard]


def balanced(costs: Sequence[float], parts: int, sizes: Sequence[int] | None = None,
             room: int = 0) -> list[list[int]] | None:
    """Numbers 0..len(costs) in `parts` ascending lists, so that the largest sum of costs is small.

    The costliest first, each to the part with the smallest sum so far: at most 4/3 of the best possible (Graham 1969).

    Args:
        sizes: with them no part takes more than `room`, unless one alone does.
    Returns:
        None when something found no room on the way.
    """
    taken: list[list[int]] = [[] for _ in range(parts)]
    left = [room] * parts
    sums = [(0.0, part) for part in range(parts)]
    for row in sorted(range(len(costs)), key=lambda row: -costs[row]):
        full = []
        while sums and sizes is not None and taken[sums[0][1]] and sizes[row] > left[sums[0][1]]:
            full.append(heapq.heappop(sums))
        if not sums:
            return None
        total, part = heapq.heappop(sums)
        taken[part].append(row)
        if sizes is not None:
            left[part] -= sizes[row]
        for entry in [*full, (total + costs[row], part)]:
            heapq.heappush(sums, entry)
    return [sorted(part) for part in taken]


def in_row_order(joined: Any, shares: Sequence[Sequence[int]]) -> Any:
    """What `join_rows` made of shards that had the rows `shares`, in the order of the rows."""
    order = torch.tensor([row for share in shares for row in share], dtype=torch.int64).argsort()
    if joined is not None and len(joined) != len(order):
        raise BatchError(f"a call whose rows are spread by cost must return all of its {len(order)} rows, "
                         f"got {len(joined)}.")
    if isinstance(joined, TensorDict):
        return select(joined, order)
    if isinstance(joined, list):
        return [joined[i] for i in order.tolist()]
    return None if joined is None else joined[order]


def overlaps(counts: Sequence[int], start: int, stop: int) -> list[tuple[int, int, int]]:
    """Which parts, laid end to end, hold rows start..stop: (part, first row, one-past-last row) within each part."""
    found, begin = [], 0
    for part, count in enumerate(counts):
        low, high = max(start, begin), min(stop, begin + count)
        if low < high:
            found.append((part, low - begin, high - begin))
        begin += count
    return found


def join_rows(values: Sequence[Any]) -> Any:
    """Results of the shards in one: batches, tensors and lists are laid end to end, all-None stays None.

    Raises BatchError for any other type.
    """
    if all(isinstance(value, TensorDict) for value in values):
        return concat(values)
    if all(isinstance(value, torch.Tensor) for value in values):
        return torch.cat(list(values))
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    if all(value is None for value in values):
        return None
    kinds = sorted({type(value).__name__ for value in values})
    raise BatchError(f"over_rows joins batches, tensors or lists, one type for all shards; got {', '.join(kinds)}.")
