"""A chain of weight patches: what a sender has had acknowledged, and what a receiver holds.

    sender                                                receiver
      encode(weights, version) ──── bytes ────────────────> apply: verify, then write
      acknowledge(version)     <─── applied ──────────────  state: version and digest
      full(weights, version)   <─── PatchError: refused ──  the state before, untouched

A patch goes from one state to the next. The sender's base advances only when a patch is acknowledged; a receiver with
another base refuses, and a full state, accepted whatever is held, repairs it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridrl.errors import ConfigError, DamagedPatchError, PatchBaseError, SyncError
from hybridrl.workers.weights.changes import (
    Change,
    Digest,
    add_steps,
    added,
    as_bits,
    compare,
    digest,
    digest_after,
    overwrite,
    to_numpy,
)
from hybridrl.workers.weights.patch import Patch, Sparse, State, TensorPatch, is_sparse, state_digest
from hybridrl.workers.weights.patch_codec import decode, encode
from hybridrl.workers.weights.threads import each

Named = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class _Sent:
    """What an acknowledgement of the newest patch makes the base: changes of it, or all its bits."""

    state: State
    digests: dict[str, Digest]
    contents: dict[str, Change] | dict[str, Tensor]


class PatchSender:
    """Makes patches from the weights it is shown; keeps a copy of those that were last acknowledged.

    Args:
        dtype: the receivers' dtype; weights are compared after the cast to it.
    Raises:
        ConfigError: a dtype that weights can't have.
    """

    def __init__(self, dtype: torch.dtype):
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"the dtype of weight patches must be a floating-point torch.dtype, got {dtype!r}.")
        self.dtype = dtype
        self.state: State | None = None
        """The last acknowledged state; None before the first, and while a full one is under way."""
        self.changed_frac = 1.0
        """Share of the elements that the newest patch changes; 1 for a full state."""
        self._base: dict[str, Tensor] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._digests: dict[str, Digest] = {}
        self._sent: _Sent | None = None

    def encode(self, weights: Named, version: int) -> bytes:
        """A patch from the acknowledged state to `weights`; without one, or with other tensors, a full state.

        Raises SyncError when `version` does not come after that of the acknowledged state.
        """
        current = self._cast(weights)
        if self.state is None or {name: weight.shape for name, weight in current} != self._shapes:
            return self._full(current, version)
        if version <= self.state.version:
            raise SyncError(f"a patch to version {version} can't follow version {self.state.version}.")
        patched = dict(each(current, lambda item: (item[0], self._compared(*item))))
        changes = {name: change for name, (change, _) in patched.items()}
        total = sum(weight.numel() for _, weight in current)
        self.changed_frac = sum(len(change.index) for change in changes.values()) / max(total, 1)
        return self._encoded(self.state, version, {name: tensor for name, (_, tensor) in patched.items()}, changes)

    def full(self, weights: Named, version: int) -> bytes:
        """The full state, for receivers that refused a patch or hold nothing yet."""
        return self._full(self._cast(weights), version)

    def acknowledge(self, version: int) -> None:
        """Every receiver has `version`: the next patch starts from it. Raises SyncError when another was sent last."""
        if self._sent is None or self._sent.state.version != version:
            raise SyncError(f"version {version} can't be acknowledged: it is not the one that was sent last.")
        for name, new in self._sent.contents.items():
            if isinstance(new, Tensor):
                self._base[name] = new
            else:
                overwrite(self._base[name], new.index, new.new)
        self.state, self._digests, self._sent = self._sent.state, self._sent.digests, None

    def _cast(self, weights: Named) -> list[tuple[str, Tensor]]:
        return [(name, weight.detach().to(self.dtype).contiguous()) for name, weight in weights]

    def _compared(self, name: str, weight: Tensor) -> tuple[Change, TensorPatch]:
        bits = as_bits(weight)
        change = compare(self._base[name], bits)
        sparse = is_sparse(change, len(bits))
        contents = Sparse(change.index, change.new - change.old) if sparse else to_numpy(bits)
        after = digest_after(self._digests[name], change)
        return change, TensorPatch(self.dtype, tuple(weight.shape), after, contents)

    def _full(self, current: list[tuple[str, Tensor]], version: int) -> bytes:
        self._base, self.state, self.changed_frac = {}, None, 1.0  # never two copies at once
        self._shapes = {name: weight.shape for name, weight in current}
        kept = {name: as_bits(weight.clone()) for name, weight in current}
        arrays = {name: to_numpy(bits) for name, bits in kept.items()}
        digests = dict(each(list(arrays.items()), lambda item: (item[0], digest(item[1]))))
        tensors = {name: TensorPatch(self.dtype, tuple(self._shapes[name]), digests[name], bits)
                   for name, bits in arrays.items()}
        return self._encoded(None, version, tensors, kept)

    def _encoded(self, base: State | None, version: int, tensors: dict[str, TensorPatch],
                 contents: dict[str, Change] | dict[str, Tensor]) -> bytes:
        result = State(version, state_digest(tensors))
        self._sent = _Sent(result, {name: tensor.digest for name, tensor in tensors.items()}, contents)
        return encode(Patch(base, result, tensors))


class PatchReceiver:
    """Applies patches to tensors that it is given, in place.

    Args:
        weights: the tensors to keep up to date, contiguous; what they hold does not matter before the first full state.
    Raises:
        SyncError: a tensor that is not contiguous.
    """

    def __init__(self, weights: Mapping[str, Tensor]):
        scattered = [name for name, weight in weights.items() if not weight.is_contiguous()]
        if scattered:
            raise SyncError(f"weight patches are written into contiguous tensors, {scattered[0]} is not.")
        self.state: State | None = None
        """The state held; None while there is none that may be used."""
        self._kinds = {name: (weight.dtype, tuple(weight.shape)) for name, weight in weights.items()}
        self._bits = {name: as_bits(weight) for name, weight in weights.items()}
        self._digests: dict[str, Digest] = {}

    def apply(self, data: bytes | memoryview) -> bool:
        """Bring the tensors to a patch's result; False for the state that is held already.

        All of it is verified: checksum, sizes, order and bounds, the base, and by digest that every tensor became
        what was sent. A refused patch leaves the tensors, bit by bit, and the state as they were.
        Raises:
            DamagedPatchError: truncated, corrupted, malformed, or for other tensors.
            PatchBaseError: for a base that is not held, or not newer than what is held.
        """
        patch = decode(data)
        if patch.result == self.state:
            return False
        self._check(patch)
        held, self.state = self.state, None  # until all is written
        digests = {name: tensor.digest for name, tensor in patch.tensors.items()}
        self._write_sparse({n: t.contents for n, t in patch.tensors.items() if isinstance(t.contents, Sparse)}, digests,
                           held)
        for name, tensor in patch.tensors.items():
            if isinstance(tensor.contents, np.ndarray):
                overwrite(self._bits[name], None, tensor.contents)
        self._digests, self.state = digests, patch.result
        return True

    def verify(self) -> None:
        """Compare the digest of every held element with the state's. Raises SyncError; then no state is held."""
        if self.state is None:
            raise SyncError("no weight patch came, or the last one failed: there is no state to verify.")
        names = list(self._digests)
        found = each(names, lambda name: digest(to_numpy(self._bits[name])))
        wrong = [name for name, value in zip(names, found, strict=True) if value != self._digests[name]]
        if wrong:
            self.forget()
            raise SyncError(f"{len(wrong)} tensors are not what the last weight patch made them: {wrong[0]}: something "
                            "else has changed them.")

    def forget(self) -> None:
        """Hold no state any more: the next patch must be a full one, of any version."""
        self.state = None

    def _check(self, patch: Patch) -> None:
        """All that can be known before the tensors are read."""
        held = "no state" if self.state is None else f"version {self.state.version} ({self.state.digest[:8]})"
        if self.state is not None and patch.result.version <= self.state.version:
            raise PatchBaseError(f"weight patch refused: it leads to version {patch.result.version}, {held} is held: "
                                 "it came late, or from another run.")
        if patch.base is not None and patch.base != self.state:
            raise PatchBaseError(f"weight patch refused: it starts from version {patch.base.version} "
                                 f"({patch.base.digest[:8]}), {held} is held: send a full state.")
        given = {name: (tensor.dtype, tensor.shape) for name, tensor in patch.tensors.items()}
        odd = sorted(name for name in self._kinds.keys() | given.keys() if self._kinds.get(name) != given.get(name))
        if odd:
            raise DamagedPatchError(f"weight patch refused: {len(odd)} tensors are not those held; {odd[0]}: received "
                                    f"{given.get(odd[0])}, held {self._kinds.get(odd[0])}.")
        dense = {name: t.contents for name, t in patch.tensors.items() if isinstance(t.contents, np.ndarray)}
        if patch.base is None and len(dense) < len(given):
            raise DamagedPatchError("weight patch refused: a full state with changes in place of elements.")
        digests = each(list(dense.values()), digest)
        wrong = [name for name, found in zip(dense, digests, strict=True) if found != patch.tensors[name].digest]
        if wrong:
            raise DamagedPatchError(f"weight patch refused: {wrong[0]} is not what its digest says.")

    def _write_sparse(self, changes: dict[str, Sparse], results: dict[str, Digest], held: State | None) -> None:
        """Write all changes; take them back when any tensor did not become what was sent."""
        moved = self._add({name: (change.index, change.steps) for name, change in changes.items()})
        wrong = [name for name, by in moved.items() if added(self._digests[name], by) != results[name]]
        if wrong:
            self._add({name: (change.index, -change.steps) for name, change in changes.items()})
            self.state = held
            raise PatchBaseError(f"weight patch refused: {wrong[0]} would not become what was sent, so something else "
                                 "has changed it: send a full state.")

    def _add(self, steps: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, Digest]:
        """Add steps to some tensors; returns by how much the digests change."""
        found = add_steps([(self._bits[name], *places) for name, places in steps.items()])
        return dict(zip(steps, found, strict=True))
