"""What changed in a tensor: bitwise, in its own dtype. NaN payloads and signed zeros are bits like any others.

Tensors are handled as their bits (`as_bits`), on CPU or CUDA; entries are numpy arrays on the CPU. A digest is a pair
of sums over elements, modulo 2^64, of two mixes of position and bits. It therefore follows from what changed without
reading the rest, and those of a tensor's pieces add up to the tensor's own, however it is cut. It guards against
accidents, not against someone who searches for collisions.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridrl.workers.weights import bit_kernels
from hybridrl.workers.weights.threads import each, spans

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Element size in bytes -> the integers that torch computes with."""
UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
"""Element size in bytes -> the integers that entries are made of."""
PIECE = 1 << 20
"""Elements compared at a time."""

Digest = tuple[int, int]
"""Two sums modulo 2^64."""


@dataclass(frozen=True, slots=True)
class Change:
    """The elements of a tensor that differ: flat `index` [k] int64 ascending, `old` and `new` bits [k] unsigned."""

    index: np.ndarray
    old: np.ndarray
    new: np.ndarray


def as_bits(tensor: Tensor) -> Tensor:
    """The bits [numel] of a contiguous tensor as integers of its element size; the memory is shared."""
    return tensor.detach().view(-1).view(SIGNED[tensor.element_size()])


def to_numpy(bits: Tensor) -> np.ndarray:
    """Bits as unsigned integers; the memory is shared on the CPU."""
    return bits.cpu().numpy().view(UNSIGNED[bits.itemsize])


def compare(base: Tensor, current: Tensor) -> Change:
    """Where the bits of two tensors differ."""
    if base.is_cuda:
        return _compare_on_device(base, current)
    old, new = to_numpy(base), to_numpy(current)
    found = [_compare_piece(old[at:at + PIECE], new[at:at + PIECE], at) for at in range(0, max(len(old), 1), PIECE)]
    if len(found) == 1:
        return found[0]
    return Change(*(np.concatenate([getattr(piece, part) for piece in found]) for part in ("index", "old", "new")))


def _compare_piece(old: np.ndarray, new: np.ndarray, start: int) -> Change:
    whole = len(old) * old.itemsize // 8 * 8 // old.itemsize
    index, before, after = _scratch(old.dtype)
    found = bit_kernels.COMPARE[old.itemsize](old[:whole].view(np.uint64), new[:whole].view(np.uint64), old, new, start,
                                              index, before, after)
    return Change(index[:found].copy(), before[:found].copy(), after[:found].copy())


_THREAD = threading.local()


def _scratch(dtype: np.dtype) -> list[np.ndarray]:
    """Room for a change of a whole piece, kept by each thread: fresh memory costs more than the comparison."""
    if not hasattr(_THREAD, "room"):
        _THREAD.room = [np.empty(PIECE + 1, np.int64) for _ in range(3)]
    index, old, new = _THREAD.room
    return [index, old.view(dtype), new.view(dtype)]


def _compare_on_device(base: Tensor, current: Tensor) -> Change:
    index = (base != current).nonzero().squeeze(1)
    return Change(index.cpu().numpy(), to_numpy(base[index]), to_numpy(current[index]))


def fetch(bits: Tensor, index: np.ndarray) -> np.ndarray:
    """The bits at `index`."""
    if bits.is_cuda:
        return to_numpy(bits[torch.from_numpy(index).to(bits.device)])
    held = to_numpy(bits)
    out = np.empty(len(index), held.dtype)
    bit_kernels.fetch(held, index, out)
    return out


def overwrite(bits: Tensor, index: np.ndarray | None, values: np.ndarray) -> None:
    """Write values at `index`, or to all bits without one, in place."""
    if bits.is_cuda:
        at = slice(None) if index is None else torch.from_numpy(index).to(bits.device)
        bits[at] = torch.from_numpy(values.view(f"i{values.itemsize}").copy()).to(bits.device)
    elif index is None:
        to_numpy(bits)[:] = values
    else:
        bit_kernels.store(to_numpy(bits), index, values)


def add_steps(changes: Sequence[tuple[Tensor, np.ndarray, np.ndarray]]) -> list[Digest]:
    """To the bits of some tensors, at each index [k] int64 ascending, add its step [k] unsigned, in place.

    Returns by how much the tensors' digests change. Steps of the other sign undo it.
    """
    found: list[Digest] = [(0, 0)] * len(changes)
    by_size: dict[int, list[int]] = {}
    for number, (bits, index, steps) in enumerate(changes):
        if bits.is_cuda:
            old = fetch(bits, index)
            change = Change(index, old, old + steps)
            overwrite(bits, index, change.new)
            found[number] = digest_after((0, 0), change)
        else:
            by_size.setdefault(bits.itemsize, []).append(number)
    for size, numbers in by_size.items():
        for number, sums in zip(numbers, _add_steps([changes[number] for number in numbers], size), strict=True):
            found[number] = sums
    return found


def _add_steps(changes: Sequence[tuple[Tensor, np.ndarray, np.ndarray]], size: int) -> list[Digest]:
    kept = [(bits, np.ascontiguousarray(index), np.ascontiguousarray(steps)) for bits, index, steps in changes]
    bits_at, index_at, steps_at = (np.array(addresses, np.uint64) for addresses in zip(*[
        (bits.data_ptr(), _address(index), _address(steps)) for bits, index, steps in kept], strict=True))
    ends = np.cumsum([0, *(len(index) for _, index, _ in kept)])

    def add(span: tuple[int, int]) -> np.ndarray:
        sums = np.zeros((2, len(kept)), np.uint64)
        bit_kernels.ADD_STEPS[size](bits_at, index_at, steps_at, ends, *span, *sums)
        return sums

    low, high = sum(each(spans(int(ends[-1])), add), start=np.zeros((2, len(kept)), np.uint64))
    return list(zip(low.tolist(), high.tolist(), strict=True))


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def digest(bits: np.ndarray, start: int = 0) -> Digest:
    """Digest of elements that lie from flat position `start` on in their tensor."""
    return _pair(bit_kernels.digest_dense(bits, start))


def digest_after(before: Digest, change: Change) -> Digest:
    """Digest of a tensor after a change, from the one before it."""
    return added(before, _pair(bit_kernels.digest_change(change.index, change.old, change.new)))


def added(first: Digest, second: Digest) -> Digest:
    """Digest of two pieces of a tensor together."""
    return (first[0] + second[0]) % 2**64, (first[1] + second[1]) % 2**64


def _pair(sums: tuple[Any, Any]) -> Digest:
    return int(sums[0]), int(sums[1])
