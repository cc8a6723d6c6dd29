"""The weight channel within a process, moving only what changed since the sync before.

    own shards, cast ──compare──> changes ──all-gather──> changes of all ranks ──places──> the engine's parameters
         published <──────────────── once every rank's engine has them ─────────────────────────┘

An engine whose parameters can be written in place gets the new elements and nothing else. One that packs them (vLLM)
can't be read or written in place: its parameters are kept beside it as they were before packing, in CPU memory, changed
there, and loaded anew; the exchange is saved, the packing is not.
"""

import time
import warnings
from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.config import SyncConfig
from hybridrl.errors import ConfigError, SyncError
from hybridrl.workers.rollout.engine import Changes, RolloutEngine
from hybridrl.workers.training.engine import TrainingEngine
from hybridrl.workers.weights.changes import Change, as_bits, compare, overwrite
from hybridrl.workers.weights.exchange import Traffic, flat
from hybridrl.workers.weights.patch_streams import gap_bytes, positions
from hybridrl.workers.weights.regions import Copy, Write
from hybridrl.workers.weights.sync import WeightSync

PAYS_BELOW = 0.25
"""Share of changed elements from which on all of them are sent: entries have positions, and land one by one."""


class DeltaSync(WeightSync):
    """As WeightSync; what was published last is kept, each rank its own shards in the engine's dtype.

    The first sync is a full one, as is any after a failure, and one where too much has changed.

    Raises:
        ConfigError: training's weights are not float32, so that every update would show.
        SyncError: a layout that repeats elements.
    """

    def __init__(self, training: TrainingEngine, rollout: RolloutEngine, cfg: SyncConfig, dtype: torch.dtype,
                 tensor_parallel: int):
        super().__init__(training, rollout, cfg, dtype, tensor_parallel)
        coarse = [name for name, weight in self.held() if weight.dtype.itemsize < 4]
        if coarse:
            raise ConfigError(f"policy.sync.mode=delta needs float32 weights in training, {coarse[0]} is not: in a "
                              "coarser dtype updates are either lost or all visible.")
        self.sizes = [torch.Size(weight.shape).numel() for weight in self.weights]
        self.published: list[Tensor] = []
        """Bits of this rank's shards as the engines have them; empty before the first sync and after a failure."""
        self.readers: dict[str, list[Copy]] = {}
        for copy in self.copies:
            check_places(copy)
            self.readers.setdefault(copy.weight, []).append(copy)
        self.mirror: dict[str, Tensor] | None = None
        if rollout.parameters is None:
            ends: dict[str, int] = {}
            for copy in self.copies:
                ends[copy.parameter] = max(ends.get(copy.parameter, 0), copy.target.last + 1)
            self.mirror = {name: torch.zeros(end, dtype=dtype) for name, end in ends.items()}

    def run(self, version: int) -> dict[str, float]:
        """As WeightSync.run, with the changed share of this rank's elements, and the seconds of each part.

        Returns:
            Also `sync/changed_frac`, `time/sync_encode`, `time/sync_send` and `time/sync_apply`; `sync/bytes` are
            those of the elements written.
        """
        started = time.perf_counter()
        ready = self.rollout.version is not None and bool(self.published)
        changes = self._changes() if self._largest(not ready) == 0 else []
        changed = sum(len(change.index) for change in changes) / max(sum(b.numel() for b in self.published), 1)
        encoded = time.perf_counter()
        if not changes or self._largest(changed) > PAYS_BELOW:
            if changes:
                warnings.warn(f"{changed:.0%} of the weights changed since the sync before, so all of them were sent: "
                              "policy.sync.mode=delta pays at smaller learning rates, and for a rollout in bfloat16.",
                              stacklevel=2)
            metrics = self._run_full(version)
            return metrics | {"sync/changed_frac": changed if changes else 1.0, "time/sync_encode": encoded - started}
        published, self.published = self.published, []  # until all is done
        pieces, received = self._gathered(changes)
        sent = time.perf_counter()
        written = self._apply(pieces, version)
        for bits, change in zip(published, changes, strict=True):
            overwrite(bits, change.index, change.new)
        self.published = published
        return {"sync/version": float(version), "sync/bytes": float(written), "sync/received_bytes": float(received),
                "sync/changed_frac": changed, "time/sync_load": time.perf_counter() - started,
                "time/sync_encode": encoded - started, "time/sync_send": sent - encoded,
                "time/sync_apply": time.perf_counter() - sent}

    def writes(self, traffic: Traffic) -> Iterator[list[Write]]:
        for some in super().writes(traffic):
            if self.mirror is not None:
                for write in some:
                    write.target.of(self.mirror[write.parameter]).copy_(write.values)
            yield some

    def _run_full(self, version: int) -> dict[str, float]:
        self.published = []
        metrics = super().run(version)
        self.published = [as_bits(flat(weight).to(self.dtype, copy=True)) for _, weight in self.held()]
        return metrics

    def _changes(self) -> list[Change]:
        """What this rank's shards differ in from what was published; positions are those in the shard."""
        return [compare(bits, as_bits(flat(weight).to(self.dtype)))
                for bits, (_, weight) in zip(self.published, self.held(), strict=True)]

    def _largest(self, number: float) -> float:
        """The largest over all ranks. Collective."""
        box = torch.tensor([float(number)], device=self.training.device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return float(box)

    def _gathered(self, changes: list[Change]) -> tuple[list[tuple[np.ndarray, np.ndarray]], int]:
        """Positions in all weights laid end to end and new bits, by rank of the group; bytes from other ranks."""
        index, bits, start = [], [], 0
        for shard, size, change in zip(self.weights, self.sizes, changes, strict=True):
            if shard.parts > 1 or self.index == 0:  # what every rank holds whole is sent by one
                index.append(change.index + (start + shard.held(self.index)[0]))
                bits.append(change.new)
            start += size
        mine = np.concatenate(index), np.concatenate(bits)
        if self.group is None:
            return [mine], 0
        gaps = gap_bytes(mine[0], start)
        everyone = gather_bytes([gaps, mine[1].view(np.uint8)], self.group, self.training.device)
        pieces = []
        for theirs, new in everyone:
            new = new.view(mine[1].dtype)
            count = (np.array([n], np.int64) for n in (len(theirs), len(new), start))
            pieces.append((positions(theirs, *count), new))
        return pieces, sum(len(a) + len(b) for a, b in everyone) - len(gaps) - mine[1].nbytes

    def _apply(self, pieces: list[tuple[np.ndarray, np.ndarray]], version: int) -> int:
        """Bring this rank's engine to the changes; returns the bytes of the elements written."""
        digests = self.digests()
        inspect = digests.inspect if digests else None
        counted = _Counted(self._placed(pieces))
        if self.mirror is None:
            self.rollout.patch_weights(counted, version, inspect)
        else:
            for parameter, index, bits in counted:
                overwrite(as_bits(self.mirror[parameter]), index, bits)
            whole = ([Write(c.parameter, c.target, c.target.of(self.mirror[c.parameter]))] for c in self.copies)
            self.rollout.load_weights(whole, version, inspect)
        if digests:
            self.compare_digests(digests, version)
        return counted.bytes

    def _placed(self, pieces: list[tuple[np.ndarray, np.ndarray]]) -> Changes:
        """The changes of every parameter of this rank's engine."""
        ends = np.cumsum([0, *self.sizes])
        bounds = [np.searchsorted(index, ends) for index, _ in pieces]
        for i, weight in enumerate(self.weights):
            parts = [slice(bound[i], bound[i + 1]) for bound in bounds]
            index = np.concatenate([piece[0][part] for piece, part in zip(pieces, parts, strict=True)]) - ends[i]
            bits = np.concatenate([piece[1][part] for piece, part in zip(pieces, parts, strict=True)])
            for copy in self.readers.get(weight.name, []):
                first, last = np.searchsorted(index, [copy.source.offset, copy.source.last + 1])
                target, chosen = places(copy, index[first:last])
                if len(target):
                    yield copy.parameter, target, bits[first:last][chosen]


class _Counted:
    """Changes, and the bytes of the elements that passed."""

    def __init__(self, changes: Changes):
        self.changes, self.bytes = changes, 0

    def __iter__(self) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        for parameter, index, bits in self.changes:
            self.bytes += bits.nbytes
            yield parameter, index, bits


def places(copy: Copy, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where a copy puts elements of its weight.

    Args:
        source: positions in the flat weight.
    Returns:
        Positions in the flat parameter of those that it copies, and a mask [len(source)] of which those are.
    """
    rest, target = source - copy.source.offset, np.full(len(source), copy.target.offset)
    inside = rest >= 0
    for step, size, there in _axes(copy):
        along = rest // step
        inside &= along < size
        rest = rest - along * step
        target += along * there
    inside &= rest == 0
    return target[inside], inside


def check_places(copy: Copy) -> None:
    """Raise SyncError unless each element of a copy's source goes to one place."""
    inner = 0
    for step, size, _ in reversed(_axes(copy)):
        if step <= inner:
            raise SyncError(f"policy.sync.mode=delta can't follow {copy.weight} into {copy.parameter}, which takes "
                            "elements more than once; policy.sync.mode=full can.")
        inner += step * (size - 1)


def _axes(copy: Copy) -> list[tuple[int, int, int]]:
    """(stride in the source, size, stride in the target) of each axis, the source's outermost first."""
    axes = zip(copy.source.stride, copy.source.size, copy.target.stride, strict=True)
    return sorted((axis for axis in axes if axis[1] != 1), reverse=True)


def gather_bytes(parts: list[np.ndarray], group: dist.ProcessGroup, device: torch.device) -> list[list[np.ndarray]]:
    """The byte arrays of every rank of the group, in its order; their sizes may differ. Collective."""
    sizes = torch.tensor([len(part) for part in parts], device=device)
    everyone = torch.empty(dist.get_world_size(group) * len(parts), dtype=sizes.dtype, device=device)
    dist.all_gather_into_tensor(everyone, sizes, group=group)
    table = everyone.view(-1, len(parts)).cpu()
    longest = int(table.sum(1).max())
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[:sum(map(len, parts))] = torch.from_numpy(np.concatenate(parts))
    gathered = torch.empty(len(table) * longest, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(gathered, mine.to(device), group=group)
    rows = gathered.cpu().numpy().reshape(len(table), longest)
    return [_cut(row, sizes) for row, sizes in zip(rows, table.tolist(), strict=True)]


def _cut(row: np.ndarray, sizes: Iterable[int]) -> list[np.ndarray]:
    ends = np.cumsum([0, *sizes])
    return [row[start:end].copy() for start, end in zip(ends[:-1], ends[1:], strict=True)]
