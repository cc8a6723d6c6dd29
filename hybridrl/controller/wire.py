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

from hybridrl.batch import from_lengths, is_ragged, num_rows, objects, objects_of
from hybridrl.errors import BatchError

# numpy has no bfloat16 or float8: such columns travel as integers of the same size.
_STAND_INS = {1: torch.int8, 2: torch.int16}


@dataclass(slots=True)
class Column:
    """One column of a packed batch.

    `values` holds the rows: laid end to end when ragged, then row i lies from offsets[i] to offsets[i + 1], counted
    from offsets[0]; `offsets` is None otherwise. `dtype` is None when `values` is a list of Python objects.
    """

    values: Any
    offsets: np.ndarray | None
    dtype: torch.dtype | None

    def rows(self, start: int, stop: int) -> "Column":
        """Rows start..stop, as views."""
        if self.offsets is None:
            return Column(self.values[start:stop], None, self.dtype)
        first, last = self.offsets[[start, stop]] - self.offsets[0]
        return Column(self.values[first:last], self.offsets[start : stop + 1], self.dtype)

    def take(self, rows: list[int]) -> "Column":
        """The rows named, as copies."""
        if self.dtype is None:
            return Column([self.values[row] for row in rows], None, None)
        if self.offsets is None:
            return Column(self.values[rows], None, self.dtype)
        starts, sizes = self.offsets[:-1][rows] - self.offsets[0], np.diff(self.offsets)[rows]
        ends = np.concatenate([[0], np.cumsum(sizes)])
        within = np.arange(ends[-1]) - ends[:-1].repeat(sizes)
        return Column(self.values[starts.repeat(sizes) + within], ends, self.dtype)


@dataclass(slots=True)
class Wire:
    """A packed batch: its row count and its columns by name."""

    rows: int
    columns: dict[str, Column]

    def part(self, start: int, stop: int) -> "Wire":
        """Rows start..stop, as views."""
        if (start, stop) == (0, self.rows):
            return self
        return Wire(stop - start, {name: column.rows(start, stop) for name, column in self.columns.items()})

    def take(self, rows: list[int]) -> "Wire":
        """The rows named, as copies."""
        return Wire(len(rows), {name: column.take(rows) for name, column in self.columns.items()})


def pack(batch: TensorDict) -> Wire:
    """A batch for the wire, without copying tensors that lie in CPU memory. Raises BatchError for a nested batch."""
    return Wire(num_rows(batch), {name: _pack_column(name, batch) for name in batch.keys()})


def _pack_column(name: str, batch: TensorDict) -> Column:
    stored = batch.get(name)
    if isinstance(stored, TensorDict):
        raise BatchError(f"field {name!r} is a nested batch; a batch holds tensors and Python objects.")
    if not isinstance(stored, Tensor):
        return Column(objects_of(batch, name), None, None)
    if not is_ragged(stored):
        return Column(_to_numpy(stored), None, stored.dtype)
    return Column(_to_numpy(stored.values()), _to_numpy(stored.offsets()), stored.dtype)


def _to_numpy(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu().contiguous()
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view(_STAND_INS[tensor.element_size()]).numpy()


def unpack(wires: Sequence[Wire]) -> TensorDict:
    """One batch from wires laid end to end; its tensors are copies and may be written.

    Raises BatchError when the fields of wires with rows differ.
    """
    # A wire without rows adds nothing, and its empty columns may have lost their kind.
    wires = [wire for wire in wires if wire.rows] or list(wires[:1])
    names = wires[0].columns.keys()
    for wire in wires[1:]:
        if wire.columns.keys() != names:
            raise BatchError(f"shards returned different fields: {sorted(names ^ wire.columns.keys())} are not in all.")
    batch = TensorDict({}, batch_size=[sum(wire.rows for wire in wires)])
    for name in names:
        batch.set(name, _unpack_column([wire.columns[name] for wire in wires]))
    return batch


def _unpack_column(pieces: list[Column]) -> Any:
    first = pieces[0]
    if first.dtype is None:
        return objects([value for column in pieces for value in column.values])
    joined = np.concatenate([column.values for column in pieces]) if len(pieces) > 1 else first.values.copy()
    values = torch.from_numpy(joined)
    values = values if values.dtype == first.dtype else values.view(first.dtype)
    if first.offsets is None:
        return values
    sizes = [np.diff(column.offsets) for column in pieces if column.offsets is not None]
    return from_lengths(values, torch.from_numpy(np.concatenate(sizes)))


def unpack_one(wire: Wire) -> TensorDict:
    """The batch of one wire."""
    return unpack([wire])
