"""What a weight patch is: from one state of all weights to the next, tensor by tensor."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from hybridrl.workers.weights.changes import Change, Digest
from hybridrl.workers.weights.patch_streams import compressed, gap_bytes, planes_of


@dataclass(frozen=True, slots=True)
class State:
    """A version of all weights, and their digest: 32 hexadecimal digits."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Sparse:
    """The elements that change: flat `index` [k] ascending; `steps` [k], new bits - old bits modulo their width."""

    index: np.ndarray
    steps: np.ndarray


class TensorPatch(NamedTuple):
    """What one tensor becomes: changes of its elements, or the bits [numel] of them all. `digest` is of the result."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: Digest
    contents: Sparse | np.ndarray

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Patch:
    """From state `base` to state `result`. A full state has no base, and all its tensors are dense."""

    base: State | None
    result: State
    tensors: Mapping[str, TensorPatch] = field(repr=False)


def is_sparse(change: Change, numel: int) -> bool:
    """Whether a change takes fewer bytes by its entries than by all elements.

    Steps of a unit compress to a few bits: where the plain sizes leave it open, the compressed ones decide.
    """
    dense = numel * change.new.itemsize
    if len(change.index) * (1 + change.new.itemsize) < dense:
        return True
    streams = [gap_bytes(change.index, numel), *planes_of(change.new - change.old)]
    return sum(len(compressed(stream)) for stream in streams) < dense


def state_digest(tensors: Mapping[str, TensorPatch]) -> str:
    """One digest of all tensors' names, dtypes, shapes and digests, whatever their order."""
    rows = [f"{name!r} {tensor.dtype} {tensor.shape} {tensor.digest}" for name, tensor in sorted(
        tensors.items(), key=lambda item: item[0])]
    return xxhash.xxh3_128_hexdigest("\n".join(rows).encode())
