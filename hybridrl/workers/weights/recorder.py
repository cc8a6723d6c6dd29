"""What a weight loader reads and where it puts it, found by running it on tensors without values.

Loaders slice, chunk, transpose and copy. Run on meta tensors, each source with a storage of its own, every copy
says by offset, size and stride which elements of which source it takes and which elements of which parameter it
fills: fused projections, tensor-parallel slices, experts, padding and ties are found for any architecture at once.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridrl.workers.weights.regions import Copy, Region

aten = torch.ops.aten
SAME_ELEMENTS = (aten.clone.default, aten._to_copy.default)
FILLS = (aten.fill_.Scalar, aten.zero_.default)


class Recorder(TorchDispatchMode):
    """Inside, copies from `weights` into `parameters` are noted instead of made.

    Attributes:
        copies: in the order they were made.
        fills: (parameter, region, value) of elements set to a constant, such as vocabulary padding.
        computed: weights and parameters that went through an operation other than slicing and copying, so that
            where elements go is unknown.

    Args:
        weights: meta tensors, each contiguous with a storage of its own.
        parameters: what is loaded into, each likewise with a storage of its own.
    """

    def __init__(self, weights: Mapping[str, Tensor], parameters: Mapping[str, Tensor]):
        super().__init__()
        self.copies: list[Copy] = []
        self.fills: list[tuple[str, Region, float]] = []
        self.computed: set[str] = set()
        self._weights = {_storage(tensor): name for name, tensor in weights.items()}
        self._parameters = {_storage(tensor): (name, tensor) for name, tensor in parameters.items()}
        self._names = self._weights | {storage: name for storage, (name, _) in self._parameters.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is aten.copy_.default and self._noted(args[0], args[1]):
            return args[0]
        if func in FILLS and (place := self._place(args[0])):
            self.fills.append((*place, float(args[1]) if len(args) > 1 else 0.0))
            return args[0]
        if func in SAME_ELEMENTS and _storage(args[0]) in self._weights:
            return aten.alias.default(args[0])
        result = func(*args, **(kwargs or {}))
        views = set() if func._schema.is_mutable else _storages(result)
        self.computed |= {self._names[storage] for storage in _storages((args, kwargs)) - views
                          if storage in self._names}
        return result

    def _noted(self, target: Tensor, source: Tensor) -> bool:
        weight, place = self._weights.get(_storage(source)), self._place(target)
        if place is None:
            return False
        if weight is None:
            self.computed.add(place[0])
        else:
            self.copies.append(Copy(weight, _region(source.expand(target.shape)), *place))
        return True

    def _place(self, tensor: Tensor) -> tuple[str, Region] | None:
        found = self._parameters.get(_storage(tensor))
        if found is None:
            return None
        name, parameter = found
        return name, _region(tensor).moved(-parameter.storage_offset())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _storages(values: Any) -> set[int]:
    return {_storage(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}


def _region(tensor: Tensor) -> Region:
    return Region(tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
