"""Which elements every rank sends to whom, a bucket at a time: a pure function of both engines' layouts.

A rank of the group that shards training holds a contiguous range of each flat weight. It needs the elements that
its rollout engine's copies read. Every rank computes the same cuts, so senders and receivers agree without talking.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from hybridrl.workers.weights.regions import Box, Copy, Region, cut

Range = tuple[int, int]
"""Positions first <= p < last of a flat weight."""


@dataclass(frozen=True, slots=True)
class Sharded:
    """One weight of training: its shape, and how many parts its rows are in (1: every rank holds it whole)."""

    name: str
    shape: tuple[int, ...]
    parts: int

    def held(self, index: int) -> Range:
        """The range that part `index` holds: FSDP gives each ceil(rows / parts) rows until none are left."""
        rows, row = (self.shape[0], prod(self.shape[1:])) if self.shape else (1, 1)
        share = -(-rows // self.parts)
        first, last = min(rows, index * share), min(rows, (index + 1) * share)
        return (0, rows * row) if self.parts == 1 else (first * row, last * row)


@dataclass(slots=True)
class Bucket:
    """What one rank does with one bucket of weights. Sources are regions of what a rank holds of the weight."""

    weights: list[str]
    """The weights that it reads, in training's order."""
    sends: list[list[tuple[str, Region]]]
    """By receiver: what goes into the buffer, in this order."""
    receives: list[list[list[tuple[str, Region]]]]
    """By sender, for each region in the buffer: the places (parameter, target) that it goes to."""
    local: list[tuple[str, Region, str, Region]] = field(default_factory=list)
    """(weight, source, parameter, target) of what this rank holds itself."""

    @property
    def sent(self) -> list[int]:
        """Elements for each receiver."""
        return [sum(region.numel for _, region in regions) for regions in self.sends]

    @property
    def received(self) -> list[int]:
        """Elements from each sender."""
        return [sum(places[0][1].numel for places in regions) for regions in self.receives]


def make_plan(weights: Sequence[Sharded], layouts: Sequence[Sequence[Copy]], index: int,
              bucket_elements: int) -> list[Bucket]:
    """The buckets of rank `index`.

    Args:
        weights: of training, in the order in which it hands them out.
        layouts: by rank of the group, the copies that its rollout engine makes.
        bucket_elements: a bucket covers at most so many elements of the weights; larger weights are cut by rows.
    """
    readers = [_by_weight(layout) for layout in layouts]
    return [_bucket(slices, readers, index) for slices in _slices(weights, bucket_elements)]


def needed_elements(weights: Sequence[Sharded], copies: Sequence[Copy], index: int) -> int:
    """Elements that rank `index` reads and does not hold, each counted once however many copies read it."""
    reads, total = _by_weight(copies), 0
    for weight in weights:
        missing = torch.zeros(prod(weight.shape), dtype=torch.bool)
        for source in reads.get(weight.name, {}):
            source.of(missing)[...] = True
        first, last = weight.held(index)
        missing[first:last] = False
        total += int(missing.sum())
    return total


def _by_weight(layout: Sequence[Copy]) -> dict[str, dict[Region, list[tuple[str, Region]]]]:
    """{weight: {source region: places}}: a region that several parameters take (a tied head) travels once."""
    reads: dict[str, dict[Region, list[tuple[str, Region]]]] = {}
    for copy in layout:
        reads.setdefault(copy.weight, {}).setdefault(copy.source, []).append((copy.parameter, copy.target))
    return reads


def _slices(weights: Sequence[Sharded], bucket_elements: int) -> Iterator[list[tuple[Sharded, Range]]]:
    """Consecutive ranges of the weights, as lists of at most `bucket_elements` together, or of one row."""
    pending: list[tuple[Sharded, Range]] = []
    room = bucket_elements
    for weight in weights:
        total = prod(weight.shape)
        row = prod(weight.shape[1:]) or 1
        if not total:
            pending.append((weight, (0, 0)))
        first = 0
        while first < total:
            if total - first > room and pending and (total <= bucket_elements or room < row):
                yield pending
                pending, room = [], bucket_elements
            last = min(total, first + max(1, room // row) * row)
            pending.append((weight, (first, last)))
            room -= last - first
            first = last
    if pending:
        yield pending


def _bucket(slices: Sequence[tuple[Sharded, Range]], readers: Sequence[dict], index: int) -> Bucket:
    ranks = range(len(readers))
    bucket = Bucket([weight.name for weight, _ in slices], [[] for _ in ranks], [[] for _ in ranks])
    for weight, bounds in slices:
        for source, places in readers[index].get(weight.name, {}).items():
            for owner in ranks if weight.parts > 1 else [index]:
                for box, held in _cut(weight, owner, bounds, source):
                    targets = [(parameter, target.part(box)) for parameter, target in places]
                    if owner == index:
                        bucket.local += [(weight.name, held, *place) for place in targets]
                    else:
                        bucket.receives[owner].append(targets)
        if weight.parts > 1:
            for receiver in ranks:
                if receiver != index:
                    bucket.sends[receiver] += [(weight.name, held) for source in readers[receiver].get(weight.name, {})
                                               for _, held in _cut(weight, index, bounds, source)]
    return bucket


def _cut(weight: Sharded, owner: int, bounds: Range, source: Region) -> list[tuple[Box, Region]]:
    """What `owner` holds of `source` within `bounds`: boxes of its indices, and where they are in what is held."""
    first, last = weight.held(owner)
    boxes = cut(source, max(first, bounds[0]), min(last, bounds[1]))
    return [(box, source.part(box).moved(-first)) for box in boxes]
