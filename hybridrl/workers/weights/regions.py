"""Regions of flat tensors: which elements of a weight go where.

A rank's rows of a weight, a tensor-parallel slice, one expert of a fused tensor, a projection's place in a fused
one: each is a strided region of the flat tensor. Pure index arithmetic, no devices.
"""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Region:
    """The elements offset + sum_i index_i * stride_i, 0 <= index_i < size_i, of a flat tensor."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.size)

    @property
    def last(self) -> int:
        """Position of the last element; meaningless when there is none."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))

    def part(self, box: "Box") -> "Region":
        """The elements whose indices are in `box`."""
        first = self.offset + sum(i * s for i, s in zip(box.starts, self.stride, strict=True))
        return Region(first, box.sizes, self.stride)

    def moved(self, distance: int) -> "Region":
        """The same elements of a flat tensor that starts `distance` elements earlier."""
        return Region(self.offset + distance, self.size, self.stride)

    def of(self, flat: Tensor) -> Tensor:
        """The elements, as a view shaped `size` of a tensor that is contiguous in memory."""
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset)

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Positions of the elements, int64, shaped `size`."""
        positions = torch.full((1,) * len(self.size), self.offset, device=device)
        for axis, (n, s) in enumerate(zip(self.size, self.stride, strict=True)):
            shape = [n if i == axis else 1 for i in range(len(self.size))]
            positions = positions + (torch.arange(n, device=device) * s).view(shape)
        return positions


class Box(NamedTuple):
    """Some indices of a region: starts_i <= index_i < starts_i + sizes_i."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]


def whole(shape: tuple[int, ...]) -> Region:
    """All elements of a contiguous tensor."""
    return Region(0, tuple(shape), tuple(prod(shape[axis + 1:]) for axis in range(len(shape))))


def cut(region: Region, low: int, high: int) -> list[Box]:
    """The elements of `region` at positions low <= p < high, as boxes of its indices that don't overlap.

    Rows of a slice give one box; what begins or ends inside a row gives a few.
    """
    return _cut(region, low, high) if region.numel else []


def _cut(region: Region, low: int, high: int) -> list[Box]:
    if low <= region.offset and region.last < high:
        return [Box((0,) * len(region.size), region.size)]
    if region.last < low or high <= region.offset:
        return []
    axis = max((i for i, n in enumerate(region.size) if n > 1), key=lambda i: region.stride[i])
    count, step = region.size[axis], region.stride[axis]
    # Index k along the outermost axis is a slab of positions offset + k * step .. + inner.
    inner = region.last - region.offset - (count - 1) * step
    full = range(max(0, -((region.offset - low) // step)), min(count, (high - 1 - inner - region.offset) // step + 1))
    touched = range(max(0, -((region.offset + inner - low) // step)),
                    min(count, (high - 1 - region.offset) // step + 1))
    boxes = []
    if full:
        boxes.append(Box(*(tuple(x) for x in _along(region, axis, full.start, len(full)))))
    for k in touched:
        if k in full:
            continue
        slab = Box(*(tuple(x) for x in _along(region, axis, k, 1)))
        boxes += [Box(tuple(a + b for a, b in zip(slab.starts, box.starts, strict=True)), box.sizes)
                  for box in _cut(region.part(slab), low, high)]
    return boxes


def _along(region: Region, axis: int, start: int, length: int) -> tuple[list[int], list[int]]:
    starts, sizes = [0] * len(region.size), list(region.size)
    starts[axis], sizes[axis] = start, length
    return starts, sizes


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements `source` of the training weight `weight` are elements `target` of the engine's `parameter`.

    Both regions have the same size, and elements match index by index.
    """

    weight: str
    source: Region
    parameter: str
    target: Region


class Write(NamedTuple):
    """`values` for the elements `target` of the engine's `parameter`, shaped as the region."""

    parameter: str
    target: Region
    values: Tensor
