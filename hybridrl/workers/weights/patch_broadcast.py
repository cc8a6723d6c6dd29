"""Weight patches over a torch.distributed group: one rank sends, the others receive.

    patch ──> all receivers ──> who refused? ── nobody ──> acknowledged
                                     └── anyone ──> the full state ──> all receivers ──> acknowledged
"""

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.errors import PatchError, SyncError
from hybridrl.workers.weights.patch_chain import Named, PatchReceiver, PatchSender


def send_patch(sender: PatchSender, weights: Named, version: int, group: dist.ProcessGroup | None = None) -> int:
    """Bring every receiver of the group to `weights`, as `version`; returns the bytes broadcast. Collective.

    A receiver that refuses the patch, having missed one or been restarted, is repaired by a full state.
    Raises SyncError when a receiver refuses that too; the next patch is then a full one.
    """
    weights = list(weights)
    data = sender.encode(weights, version)
    total = _broadcast(data, dist.get_rank(group), group).numel()
    if _refusals(False, group):
        data = sender.full(weights, version)
        total += _broadcast(data, dist.get_rank(group), group).numel()
        refused = _refusals(False, group)
        if refused:
            raise SyncError(f"ranks {refused} refused the full weights of version {version}; they say why.")
    sender.acknowledge(version)
    return total


def receive_patch(receiver: PatchReceiver, source: int = 0, group: dist.ProcessGroup | None = None) -> bool:
    """The other side of `send_patch`, whose rank in the group is `source`; False when nothing changed. Collective.

    Raises PatchError when even the full state is refused.
    """
    changed, error = _apply(receiver, _broadcast(None, source, group))
    if _refusals(error is not None, group):
        again, error = _apply(receiver, _broadcast(None, source, group))
        changed = changed or again
        _refusals(error is not None, group)
        if error is not None:
            raise error
    return changed


def _apply(receiver: PatchReceiver, data: Tensor) -> tuple[bool, PatchError | None]:
    try:
        return receiver.apply(data.numpy().data), None
    except PatchError as error:
        return False, error


def _broadcast(data: bytes | None, source: int, group: dist.ProcessGroup | None) -> Tensor:
    """The bytes of rank `source` as a tensor in CPU memory."""
    device = _device(group)
    size = torch.tensor([len(data) if data is not None else 0], device=device)
    dist.broadcast(size, group=group, group_src=source)
    if data is None:
        tensor = torch.empty(int(size), dtype=torch.uint8, device=device)
    else:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    dist.broadcast(tensor, group=group, group_src=source)
    return tensor.cpu()


def _refusals(refused: bool, group: dist.ProcessGroup | None) -> list[int]:
    """Ranks of the group that refused."""
    flags = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=_device(group))
    flags[dist.get_rank(group)] = refused
    dist.all_reduce(flags, group=group)
    return flags.nonzero().flatten().tolist()


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group's collectives run: gloo takes CPU tensors, also beside another backend."""
    return torch.device("cpu" if "gloo" in dist.get_backend_config(group) else "cuda")
