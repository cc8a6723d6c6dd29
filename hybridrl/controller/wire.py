"""A batch as it travels between processes: numpy buffers, which Ray moves without copying or pickling them.

Received buffers are read-only shared memory. `unpack` copies them once, so a worker may write into its batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from hybridrl.batch import from_lengths, is_ragged, lengths, num_rows, objects, objects_of
from hybridrl.errors import BatchError

# numpy has no bfloat16 or float8: such columns travel as integers of the same size.
_STAND_INS = {1: torch.int8, 2: torch.int16}


@dataclass(slots=True)
class Column:
    """One column: rows laid end to end in `values`; `sizes` has the row lengths of a ragged one, else None."""

    values: Any
    sizes: np.ndarray | None
    dtype: torch.dtype | None
    """None: `values` is a list of Python objects."""


@dataclass(slots=True)
class Wire:
    """A packed batch."""

    rows: int
    columns: dict[str, Column]


def pack(batch: TensorDict, start: int = 0, stop: int | None = None) -> Wire:
    """Rows start..stop of a batch, without copying tensors that lie in CPU memory."""
    stop = num_rows(batch) if stop is None else stop
    return Wire(stop - start, {name: _pack_column(name, batch, start, stop) for name in batch.keys()})


def _pack_column(name: str, batch: TensorDict, start: int, stop: int) -> Column:
    stored = batch.get(name)
    if isinstance(stored, TensorDict):
        raise BatchError(f"field {name!r} is a nested batch; a batch holds tensors and Python objects.")
    if not isinstance(stored, Tensor):
        return Column(objects_of(batch, name)[start:stop], None, None)
    if not is_ragged(stored):
        return Column(_to_numpy(stored[start:stop]), None, stored.dtype)
    offsets = stored.offsets()
    values = stored.values()[int(offsets[start]) : int(offsets[stop])]
    return Column(_to_numpy(values), _to_numpy(lengths(stored)[start:stop]), stored.dtype)


def _to_numpy(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu().contiguous()
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view(_STAND_INS[tensor.element_size()]).numpy()


def unpack(pieces: Sequence[tuple[Wire, int, int]]) -> TensorDict:
    """One batch from pieces (wire, first row, one-past-last row), laid end to end; its tensors are writable.

    Raises BatchError when fields of pieces with rows differ.
    """
    # A piece without rows adds nothing, and its empty columns may have lost their kind.
    pieces = [piece for piece in pieces if piece[1] < piece[2]] or list(pieces[:1])
    names = pieces[0][0].columns.keys()
    for wire, _, _ in pieces[1:]:
        if wire.columns.keys() != names:
            raise BatchError(f"shards returned different fields: {sorted(names ^ wire.columns.keys())} are not in all.")
    batch = TensorDict({}, batch_size=[sum(stop - start for _, start, stop in pieces)])
    for name in names:
        batch.set(name, _unpack_column([(wire.columns[name], start, stop) for wire, start, stop in pieces]))
    return batch


def _unpack_column(pieces: list[tuple[Column, int, int]]) -> Any:
    first = pieces[0][0]
    if first.dtype is None:
        return objects([value for column, start, stop in pieces for value in column.values[start:stop]])
    if first.sizes is None:
        return _to_tensor([column.values[start:stop] for column, start, stop in pieces], first.dtype)
    values, sizes = [], []
    for column, start, stop in pieces:
        begin = int(column.sizes[:start].sum())
        sizes.append(column.sizes[start:stop])
        values.append(column.values[begin : begin + int(sizes[-1].sum())])
    return from_lengths(_to_tensor(values, first.dtype), _to_tensor(sizes, torch.int64))


def _to_tensor(arrays: list[np.ndarray], dtype: torch.dtype) -> Tensor:
    """One writable tensor with a copy of all arrays."""
    joined = torch.from_numpy(np.concatenate(arrays) if len(arrays) > 1 else arrays[0].copy())
    return joined if joined.dtype == dtype else joined.view(dtype)


def unpack_whole(wire: Wire) -> TensorDict:
    """All rows of one wire."""
    return unpack([(wire, 0, wire.rows)])
