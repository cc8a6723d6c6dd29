"""A weight patch as bytes, and back. Nothing is unpickled.

    8 bytes     b"hrlpatch"
    8 bytes     length of the header, little-endian
    header      JSON: base and result as [version, digest]; for each tensor [name, dtype, shape, digest, entries (-1:
                dense), bytes of gaps]; for each element size [bytes, planes]; the streams' sizes [plain, compressed]
    body        the streams, each a zstd frame or as it is, then the dense tensors as they are
    16 bytes    xxh3-128 of all that comes before

The first stream holds the gaps between entries, over all sparse tensors in order. Then come, for each element size
among them, smallest first, the planes of the steps of all tensors of that size. The receiver adds steps to the bits of
the base that the header names, so what it writes are the absolute bits of the result, and their digest says so.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from hybridrl.errors import DamagedPatchError
from hybridrl.workers.weights.changes import UNSIGNED, Digest
from hybridrl.workers.weights.patch import Patch, Sparse, State, TensorPatch, state_digest
from hybridrl.workers.weights.patch_streams import (
    compressed,
    decompressed,
    gap_bytes,
    plane_bytes,
    planes_of,
    positions,
    steps_from,
)
from hybridrl.workers.weights.threads import each

MAGIC = b"hrlpatch"
FIXED, CHECKSUM = 16, 16


_Frame = tuple[memoryview, int]
"""What `compressed` made of a stream, and the stream's bytes."""


class _Row(NamedTuple):
    """A tensor's row in the header, checked."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: Digest
    entries: int
    gap_bytes: int
    numel: int
    itemsize: int


def _row(name: str, dtype: str, shape: list[int], digest: list[int], entries: int, num_bytes: int) -> _Row:
    """Raises ValueError for what no tensor has."""
    low, high = (_count(half, 64) for half in digest)
    kind, numel = getattr(torch, dtype), _count(math.prod(map(_count, shape)))
    itemsize = kind.itemsize if isinstance(kind, torch.dtype) else 0
    if (type(name) is not str or itemsize not in UNSIGNED or _count(num_bytes) > max(entries, 0) + numel // 255
            or _count(entries + 1) > numel + 1):
        raise ValueError(f"the row of {name}")
    return _Row(name, kind, tuple(shape), (low, high), entries, num_bytes, numel, itemsize)


def _count(number: Any, bits: int = 63) -> int:
    """A number that fits into so many bits without a sign. Raises ValueError for anything else."""
    if type(number) is not int or not 0 <= number < 1 << bits:
        raise ValueError(f"{number!r}, where a count is due")
    return number


def encode(patch: Patch) -> bytes:
    """The bytes of a patch."""
    rows: list[list[Any]] = []
    gaps: list[np.ndarray] = []
    dense: list[memoryview] = []
    steps: dict[int, list[np.ndarray]] = {}
    for name, tensor in patch.tensors.items():
        entries, num_bytes, contents = -1, 0, tensor.contents
        if isinstance(contents, Sparse):
            gaps.append(gap_bytes(contents.index, tensor.numel))
            steps.setdefault(contents.steps.itemsize, []).append(contents.steps)
            entries, num_bytes = len(contents.index), len(gaps[-1])
        else:
            dense.append(contents.view(np.uint8).data)
        rows.append([name, str(tensor.dtype).removeprefix("torch."), tensor.shape, tensor.digest, entries, num_bytes])
    planes = {size: planes_of(np.concatenate(steps[size])) for size in sorted(steps)}
    streams = [np.concatenate([*gaps, np.empty(0, np.uint8)]), *itertools.chain.from_iterable(planes.values())]
    frames = [compressed(stream) for stream in streams]
    header = json.dumps({
        "base": patch.base and [patch.base.version, patch.base.digest],
        "result": [patch.result.version, patch.result.digest],
        "planes": [[size, len(found)] for size, found in planes.items()],
        "streams": [[len(stream), len(frame)] for stream, frame in zip(streams, frames, strict=True)],
        "tensors": rows}, separators=(",", ":")).encode()
    pieces: list[bytes | memoryview] = [MAGIC, len(header).to_bytes(8, "little"), header, *frames, *dense]
    checksum = xxhash.xxh3_128()
    for piece in pieces:
        checksum.update(piece)
    return b"".join([*pieces, checksum.digest()])


def decode(data: bytes | memoryview) -> Patch:
    """The patch in `data`, with every size, bound, order and checksum verified.

    Dense contents are views of `data`. Raises DamagedPatchError with the reason.
    """
    header, body = _header(memoryview(data).cast("B"))
    try:
        base, result = _states(header)
        rows = [_row(*row) for row in header["tensors"]]
        planes = {_count(size): _count(count) for size, count in header["planes"]}
        sizes = [(_count(plain), _count(packed)) for plain, packed in header["streams"]]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DamagedPatchError(f"weight patch refused: its header is malformed: {error!r}.") from error
    contents = _contents(rows, planes, sizes, body)
    tensors = {row.name: TensorPatch(row.dtype, row.shape, row.digest, found)
               for row, found in zip(rows, contents, strict=True)}
    if len(tensors) < len(rows):
        raise DamagedPatchError("weight patch refused: a tensor comes twice.")
    if state_digest(tensors) != result.digest:
        raise DamagedPatchError("weight patch refused: the digests of its tensors don't make that of its result.")
    return Patch(base, result, tensors)


def states_of(data: bytes | memoryview) -> tuple[State | None, State]:
    """Base and result of a patch whose checksum is right. Raises DamagedPatchError."""
    return _states(_header(memoryview(data).cast("B"))[0])


def _contents(rows: list[_Row], planes: dict[int, int], sizes: list[tuple[int, int]],
              body: memoryview) -> Iterator[Sparse | np.ndarray]:
    """What the body holds for each row, given the number of planes by element size and the sizes of the streams."""
    sparse = [row for row in rows if row.entries >= 0]
    entries = {size: sum(row.entries for row in sparse if row.itemsize == size) for size in planes}
    if {row.itemsize for row in sparse} != planes.keys() or any(n > 2 * s for s, n in planes.items()):
        raise DamagedPatchError(f"weight patch refused: its planes are {planes}.")
    due = [sum(row.gap_bytes for row in sparse),
           *(plane_bytes(entries[size]) for size, count in planes.items() for _ in range(count))]
    if [plain for plain, _ in sizes] != due:  # before anything of that size is made
        raise DamagedPatchError(f"weight patch refused: its streams hold {[plain for plain, _ in sizes]} bytes, where "
                                f"{due} are due.")
    pieces = _cut(body, [packed for _, packed in sizes]
                  + [row.numel * row.itemsize for row in rows if row.entries < 0])
    gaps, *frames = [(next(pieces), plain) for plain, _ in sizes]
    counts = [np.array([getattr(row, count) for row in sparse], np.int64)
              for count in ("gap_bytes", "entries", "numel")]
    tasks: list[Callable[[], np.ndarray]] = [partial(_positions, gaps, counts)]
    for size, count in planes.items():
        tasks.append(partial(_steps, [frames.pop(0) for _ in range(count)], entries[size], size))
    index, *found = each(tasks, lambda task: task())
    steps = dict(zip(planes, found, strict=True))
    at, step_at = 0, dict.fromkeys(planes, 0)
    for row in rows:
        if row.entries < 0:
            yield np.frombuffer(next(pieces), f"<u{row.itemsize}")
            continue
        first = step_at[row.itemsize]
        yield Sparse(index[at:at + row.entries], steps[row.itemsize][first:first + row.entries])
        at += row.entries
        step_at[row.itemsize] += row.entries


def _positions(gaps: _Frame, counts: list[np.ndarray]) -> np.ndarray:
    return positions(decompressed(*gaps), *counts)


def _steps(frames: list[_Frame], entries: int, itemsize: int) -> np.ndarray:
    return steps_from([decompressed(*frame) for frame in frames], entries, itemsize)


def _header(data: memoryview) -> tuple[Any, memoryview]:
    """The header and the body of bytes whose checksum is right."""
    if bytes(data[:8]) != MAGIC:
        raise DamagedPatchError(f"weight patch refused: it starts with {bytes(data[:8])!r}, a patch with {MAGIC!r}.")
    end = FIXED + int.from_bytes(data[8:FIXED], "little")
    if len(data) < end + CHECKSUM:
        raise DamagedPatchError(f"weight patch refused: it is truncated: {len(data)} bytes, where its header alone "
                                f"takes {end + CHECKSUM}.")
    if xxhash.xxh3_128_digest(data[:-CHECKSUM]) != bytes(data[-CHECKSUM:]):
        raise DamagedPatchError(f"weight patch refused: the checksum of its {len(data)} bytes is wrong: truncated, or "
                                "changed on the way.")
    try:
        return json.loads(bytes(data[FIXED:end])), data[end:-CHECKSUM]
    except (ValueError, RecursionError) as error:
        raise DamagedPatchError(f"weight patch refused: its header is no JSON: {error}.") from error


def _states(header: Any) -> tuple[State | None, State]:
    base, result = header["base"], header["result"]
    return None if base is None else State(_count(base[0]), str(base[1])), State(_count(result[0]), str(result[1]))


def _cut(body: memoryview, sizes: list[int]) -> Iterator[memoryview]:
    """The body in pieces of these sizes."""
    if sum(sizes) != len(body):
        raise DamagedPatchError(f"weight patch refused: its body has {len(body)} bytes, where {sum(sizes)} are due.")
    return iter([body[start:end] for start, end in itertools.pairwise(itertools.accumulate(sizes, initial=0))])

