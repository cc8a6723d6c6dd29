"""Compiled loops over the bit patterns of a tensor on CPU.

torch and numpy make an index of a few scattered entries at a fifth of memory speed; these loops run at memory speed.
numba needs no C compiler. The first call in a process compiles or reads a cache (a second); all release the GIL.
Loops that each do one thing are kept apart: fused, they are three times slower.
"""

from collections.abc import Callable

import numpy as np
from numba import carray, njit, types, uint64
from numba.extending import intrinsic

BLOCK = 1 << 15
"""Words compared before their entries are fetched: small enough to stay in the processor's cache."""

ENTRIES = 1 << 12
"""Entries changed at a time, likewise."""

# Odd constants with well-spread bits, as of splitmix64 and xxHash.
_SPREAD, _VALUE = uint64(0x9E3779B97F4A7C15), uint64(0xC2B2AE3D27D4EB4F)
_FIRST, _SECOND = uint64(0xBF58476D1CE4E5B9), uint64(0x94D049BB133111EB)


@njit(inline="always")
def _mixed(index, bits):
    x = uint64(index) * _SPREAD ^ (uint64(bits) + uint64(1)) * _VALUE
    x = (x ^ (x >> uint64(32))) * _FIRST
    x = (x ^ (x >> uint64(29))) * _SECOND
    return x ^ (x >> uint64(32))


@njit(inline="always")
def _second(x):
    return x * (x >> uint64(32) | uint64(1))


@njit(nogil=True, cache=True)
def digest_dense(bits, start):
    """Sums over elements of two mixes of (start + position, bits), modulo 2^64."""
    low, high = uint64(0), uint64(0)
    for i in range(bits.shape[0]):
        x = _mixed(start + i, bits[i])
        low += x
        high += _second(x)
    return low, high


@njit(nogil=True, cache=True)
def digest_change(index, old, new):
    """How the sums of `digest_dense` change when old bits at `index` become new ones."""
    low, high = uint64(0), uint64(0)
    for k in range(index.shape[0]):
        x, y = _mixed(index[k], new[k]), _mixed(index[k], old[k])
        low += x - y
        high += _second(x) - _second(y)
    return low, high


@njit(nogil=True, cache=True)
def fetch(bits, index, out):
    """out = bits[index]."""
    for k in range(index.shape[0]):
        out[k] = bits[uint64(index[k])]


@njit(nogil=True, cache=True)
def store(bits, index, values):
    """bits[index] = values."""
    for k in range(index.shape[0]):
        bits[uint64(index[k])] = values[k]


def _comparison(lane_bits: int) -> Callable[..., int]:
    """The comparison for elements of 8, 16, 32 or 64 bits; made apart, so that each knows its lanes when compiled."""
    lanes, mask, shift = 64 // lane_bits, uint64(2**lane_bits - 1), uint64(lane_bits % 64)

    @njit(nogil=True)
    def scan(base, current, first, index):
        found = 0
        for w in range(base.shape[0]):
            x = base[w] ^ current[w]
            if x != 0:
                at = first + w * lanes
                for lane in range(lanes):  # without branches: a guess would be wrong every other time
                    index[found] = at + lane
                    found += (x & mask) != 0
                    x >>= shift
        return found

    @njit(nogil=True, cache=True)
    def compare(base_words, current_words, base, current, start, index, old, new):
        """Write index (from `start` on), old and new bits of the elements that differ; returns how many.

        The words are the elements eight bytes at a time; the outputs hold one element more than there can be entries.
        """
        found, words = 0, base_words.shape[0]
        for block in range(0, words, BLOCK):
            stop = min(block + BLOCK, words)
            entries = scan(base_words[block:stop], current_words[block:stop], block * lanes, index[found:])
            here = index[found:found + entries]
            fetch(base, here, old[found:])
            fetch(current, here, new[found:])
            found += entries
        for i in range(words * lanes, base.shape[0]):
            index[found], old[found], new[found] = i, base[i], current[i]
            found += base[i] != current[i]
        for k in range(found):
            index[k] += start
        return found

    return compare


COMPARE = {size: _comparison(8 * size) for size in (1, 2, 4, 8)}
"""Element size in bytes -> compare(base_words, current_words, base, current, index, old, new) -> entries found."""


@intrinsic
def _pointer(context, address):
    """An address as a pointer, so that one call handles many arrays: they can't be passed as a list cheaply."""
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), generate


def _addition(size: int) -> Callable[..., None]:
    """The addition for elements of so many bytes."""
    kind = np.dtype(f"u{size}").type

    @njit(nogil=True, cache=True)
    def add_steps(bits_at, index_at, steps_at, ends, first, last, low, high):
        """bits[index] += steps in several tensors, modulo the elements' width, for some of the entries.

        Args:
            bits_at, index_at, steps_at: addresses of each tensor's bits and of its positions (int64) and steps.
            ends: where the entries of each tensor begin among all, and their number.
            first, last: the range of entries to handle.
            low, high: for how the sums of `digest_dense` change, by tensor; zeros.
        """
        old, new = np.empty(ENTRIES, kind), np.empty(ENTRIES, kind)
        for tensor in range(bits_at.shape[0]):
            start, stop = max(first, ends[tensor]), min(last, ends[tensor + 1])
            if start >= stop:
                continue
            count = ends[tensor + 1] - ends[tensor]
            index = carray(_pointer(index_at[tensor]), (count,), np.int64)[start - ends[tensor]:stop - ends[tensor]]
            steps = carray(_pointer(steps_at[tensor]), (count,), kind)[start - ends[tensor]:stop - ends[tensor]]
            bits = carray(_pointer(bits_at[tensor]), (index[-1] + 1,), kind)
            low_sum, high_sum = uint64(0), uint64(0)
            for at in range(0, stop - start, ENTRIES):
                here, by = index[at:at + ENTRIES], steps[at:at + ENTRIES]
                for k in range(here.shape[0]):
                    old[k] = bits[uint64(here[k])]
                for k in range(here.shape[0]):
                    new[k] = kind(old[k] + by[k])
                for k in range(here.shape[0]):
                    x, y = _mixed(here[k], new[k]), _mixed(here[k], old[k])
                    low_sum += x - y
                    high_sum += _second(x) - _second(y)
                for k in range(here.shape[0]):
                    bits[uint64(here[k])] = new[k]
            low[tensor], high[tensor] = low_sum, high_sum

    return add_steps


ADD_STEPS = {size: _addition(size) for size in (1, 2, 4, 8)}
"""Element size in bytes -> add_steps."""


@njit(nogil=True, cache=True)
def write_gaps(index, gaps):
    """Ascending positions as bytes: 255 skips 255 elements, g < 255 skips g and is an entry. Returns bytes written."""
    used, before = 0, -1
    for k in range(index.shape[0]):
        gap = index[k] - before - 1
        before = index[k]
        while gap >= 255:
            gaps[used] = 255
            used += 1
            gap -= 255
        gaps[used] = gap
        used += 1
    return used


@njit(nogil=True, cache=True)
def read_gaps(gaps, used, entries, numels, index):
    """The positions of several tensors, from what `write_gaps` wrote for each, one after the other.

    Args:
        used, entries, numels: bytes, entries and elements of each tensor.
        index: for the positions; sum(entries) + 1 elements.
    Returns:
        The first tensor that has other entries, or one beyond its elements; else the number of tensors.
    """
    at = first = 0
    for tensor in range(used.shape[0]):
        position, here, room = -1, 0, entries[tensor]
        for j in range(at, at + used[tensor]):
            entry = gaps[j] != 255
            position += np.int64(gaps[j]) + entry
            index[first + min(here, room)] = position
            here += entry
        if here != room or (position >= numels[tensor] and used[tensor] > 0):
            return tensor
        at += used[tensor]
        first += room
    return used.shape[0]


@njit(nogil=True, cache=True)
def pack_plane(values, shift, plane):
    """Four bits of each value, from bit `shift` on, two values a byte, the first in the lower half."""
    for k in range(values.shape[0] // 2):
        low, high = uint64(values[2 * k]) >> uint64(shift), uint64(values[2 * k + 1]) >> uint64(shift)
        plane[k] = low & uint64(15) | (high & uint64(15)) << uint64(4)
    if values.shape[0] % 2:
        plane[-1] = uint64(values[-1]) >> uint64(shift) & uint64(15)


@njit(nogil=True, cache=True)
def unpack_plane(plane, shift, values):
    """Set, in zeros, the bits that `pack_plane` took."""
    for k in range(values.shape[0] // 2):
        values[2 * k] |= uint64(plane[k] & 15) << uint64(shift)
        values[2 * k + 1] |= uint64(plane[k] >> 4) << uint64(shift)
    if values.shape[0] % 2:
        values[-1] |= uint64(plane[-1] & 15) << uint64(shift)
