"""How ranks are laid out in training: which of them share one copy of the model, and which share rows.

The two are independent. Every rank adds its own part of the gradient, so that sharding may run across ranks
that share rows.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hybridrl.errors import ConfigError


def make_mesh(device: torch.device, shard_ranks: int = 0, key: str = "policy.training") -> DeviceMesh:
    """Mesh of all ranks: (shard), or (replicate, shard) where several groups of `shard_ranks` hold a copy each.

    Args:
        shard_ranks: consecutive ranks that one copy of the model is sharded over; 0 takes all.
        key: of the options, for messages.
    Raises:
        ConfigError: `shard_ranks` does not divide the number of ranks.
    """
    ranks = dist.get_world_size()
    groups = num_groups(f"{key}.shard_ranks", shard_ranks or ranks)
    if groups == 1:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (groups, shard_ranks), mesh_dim_names=("replicate", "shard"))


def num_groups(key: str, size: int) -> int:
    """Groups of `size` consecutive ranks; raises ConfigError naming the option `key` if any is left over."""
    ranks = dist.get_world_size()
    if ranks % size:
        values = [n for n in range(1, ranks + 1) if ranks % n == 0]
        raise ConfigError(f"{key} must divide the {ranks} ranks of its devices, got {size}; "
                          f"accepted: {', '.join(map(str, values))}.")
    return ranks // size


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
