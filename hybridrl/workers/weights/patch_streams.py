"""The byte streams of a sparse change: gaps between its positions, bit planes of its steps; zstd where it pays.

At a density of 1% a gap takes 8 bits, and a step of one or two units in the last place 2: near their entropy.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow

from hybridrl.errors import DamagedPatchError
from hybridrl.workers.weights import bit_kernels
from hybridrl.workers.weights.changes import UNSIGNED

_ZSTD = pyarrow.Codec("zstd", compression_level=1)
WORTH = 0.9
"""Largest share of its bytes that a stream is compressed to, or not at all."""


def gap_bytes(index: np.ndarray, numel: int) -> np.ndarray:
    """Ascending positions below numel as bytes: 255 skips 255 elements, g < 255 skips g and is an entry."""
    gaps = np.empty(len(index) + numel // 255, np.uint8)
    return gaps[:bit_kernels.write_gaps(index, gaps)]


def positions(gaps: np.ndarray, used: np.ndarray, entries: np.ndarray, numels: np.ndarray) -> np.ndarray:
    """The positions [sum(entries)] in the joined gap bytes of several tensors.

    Args:
        used, entries, numels: bytes, entries and elements [tensors] of each.
    Raises DamagedPatchError when a tensor has other entries, or one beyond its elements.
    """
    index = np.empty(int(entries.sum()) + 1, np.int64)
    bad = bit_kernels.read_gaps(gaps, used, entries, numels, index)
    if bad < len(used):
        raise DamagedPatchError(f"weight patch refused: the positions of tensor {bad} are not {entries[bad]} below "
                                f"{numels[bad]}.")
    return index[:-1]


def planes_of(steps: np.ndarray) -> list[np.ndarray]:
    """Planes of four bits of the steps [k], lowest first, two steps a byte; planes of zeros at the end are left out.

    A step's sign is folded into its lowest bit first: 0 -1 1 -2 2 become 0 1 2 3 4, small steps small numbers.
    """
    folded = (steps << 1) ^ -(steps >> (8 * steps.itemsize - 1))
    bits = int(folded.max()).bit_length() if len(folded) else 0
    planes = [np.empty(plane_bytes(len(steps)), np.uint8) for _ in range(0, bits, 4)]
    for i, plane in enumerate(planes):
        bit_kernels.pack_plane(folded, 4 * i, plane)
    return planes


def steps_from(planes: Sequence[np.ndarray], entries: int, itemsize: int) -> np.ndarray:
    """The steps [entries] of that element size whose planes these are."""
    folded = np.zeros(entries, UNSIGNED[itemsize])
    for i, plane in enumerate(planes):
        bit_kernels.unpack_plane(plane, 4 * i, folded)
    return (folded >> 1) ^ -(folded & 1)


def plane_bytes(entries: int) -> int:
    """Bytes of a plane."""
    return (entries + 1) // 2


def compressed(stream: np.ndarray) -> bytes:
    """One zstd frame; the stream as it is where that saves little, which is quicker to read."""
    frame = _ZSTD.compress(stream, asbytes=True)
    return frame if len(frame) < WORTH * len(stream) else stream.tobytes()


def decompressed(frame: memoryview, size: int) -> np.ndarray:
    """The `size` bytes that `compressed` made a frame of. Raises DamagedPatchError."""
    if len(frame) == size:
        return np.frombuffer(frame, np.uint8)
    try:
        plain = np.frombuffer(_ZSTD.decompress(frame, size), np.uint8)
    except (OSError, ValueError) as error:  # pyarrow's own errors are among them
        raise DamagedPatchError(f"weight patch refused: a stream can't be decompressed: {error}.") from error
    if len(plain) != size:
        raise DamagedPatchError(f"weight patch refused: a stream holds {len(plain)} bytes, where {size} are due.")
    return plain
