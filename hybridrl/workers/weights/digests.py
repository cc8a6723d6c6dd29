"""Digests of weights that can be added up: of a slice from the ranks that hold its parts.

    digest = sum over elements of mix(bits of the value, position in the weight), modulo 2^64

Each element counts with its position, so that exchanged elements and swapped ones change the sum.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.workers.weights.exchange import flat
from hybridrl.workers.weights.plan import Sharded
from hybridrl.workers.weights.regions import Box, Copy, Region, cut

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 20
"""Elements hashed at a time: the sums take several int64 an element."""


class Digests:
    """Digests of what one sync wrote into this rank's engine, and of the same slices as training holds them.

    The engine's are taken from its parameters as they are before it packs them, training's from its own shards;
    neither passes through the exchange.

    Args:
        copies: this rank's layout.
        dtype: in which both sides are compared.
    """

    def __init__(self, copies: Sequence[Copy], dtype: torch.dtype):
        self.copies, self.dtype = copies, dtype
        self.of_engine: dict[Copy, int] = {}
        self._of_parameter: dict[str, list[Copy]] = {}
        for copy in copies:
            self._of_parameter.setdefault(copy.parameter, []).append(copy)

    def inspect(self, parameter: str, values: Tensor) -> None:
        """Take the digests of the slices of one filled engine parameter."""
        for copy in self._of_parameter.get(parameter, []):
            self.of_engine[copy] = region_digest(copy.target.of(values).to(self.dtype), copy.source)

    @torch.no_grad()
    def of_training(self, weights: Iterable[tuple[str, Tensor]], sharded: Sequence[Sharded],
                    layouts: Sequence[Sequence[Copy]], index: int, group: dist.ProcessGroup | None) -> list[int]:
        """The digest of each of this rank's copies, summed over the ranks that hold its parts. Collective."""
        distinct = {id(layout): layout for layout in layouts}
        sums = {key: [0] * len(layout) for key, layout in distinct.items()}
        readers: dict[str, list[tuple[int, int, Region]]] = {}
        for key, layout in distinct.items():
            for place, copy in enumerate(layout):
                readers.setdefault(copy.weight, []).append((key, place, copy.source))
        for shard, (name, weight) in zip(sharded, weights, strict=True):
            first, last = shard.held(index)
            values = flat(weight).to(self.dtype)
            for key, place, source in readers.get(name, []) if shard.parts > 1 or index == 0 else []:
                for region in map(source.part, cut(source, first, last)):
                    sums[key][place] = _signed(sums[key][place] +
                                               region_digest(region.moved(-first).of(values), region))
        table = torch.tensor([number for key in distinct for number in sums[key]], device=values.device)
        if group is not None:
            dist.all_reduce(table, group=group)
        start = 0
        for key, layout in distinct.items():
            if key == id(layouts[index]):
                return table[start:start + len(layout)].tolist()
            start += len(layout)
        raise AssertionError("this rank is one of the group")

    def different(self, of_training: Sequence[int]) -> list[str]:
        """Names of the copies whose two digests differ."""
        return [f"{copy.parameter} (from {copy.weight})" for copy, digest in zip(self.copies, of_training, strict=True)
                if self.of_engine.get(copy) != digest]


def region_digest(values: Tensor, region: Region) -> int:
    """Digest of `values`, shaped as `region`, which says where in the weight they are."""
    if region.numel > CHUNK and region.size[0] > 1:
        half = region.size[0] // 2
        boxes = [Box((start,) + (0,) * (len(region.size) - 1), (rows, *region.size[1:]))
                 for start, rows in ((0, half), (half, region.size[0] - half))]
        first, second = values.split([half, region.size[0] - half])
        return _signed(region_digest(first, region.part(boxes[0])) + region_digest(second, region.part(boxes[1])))
    bits = values.contiguous().view(BITS[values.element_size()]).to(torch.int64)
    return int(_mix(bits + _mix(region.positions(values.device))).sum())


def _mix(x: Tensor) -> Tensor:
    """The finalizer of splitmix64 on int64, a bijection that spreads every bit over all."""
    x = x + _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << 64 - bits) - 1)  # int64 shifts keep the sign


def _signed(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
