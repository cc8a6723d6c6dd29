"""Context parallelism: consecutive ranks share rows, each computes a slice of their tokens.

Layers work on tokens one by one, all but attention. There an all-to-all trades tokens for heads, so that each rank
has every token of some heads, and a second one trades back. Log-probs are joined before the loss, which therefore
sees whole rows on every rank, and backward goes only through a rank's own: gradients summed over ranks are those of
one rank.

Source: DeepSpeed Ulysses, arXiv:2309.14509, section 3.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import pad

from hybridrl.errors import ModelError
from hybridrl.workers.training.attention import Pack
from hybridrl.workers.training.mesh import num_groups


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of a packed row, which is filled up to a multiple of the ranks; shapes as in MicroBatch."""

    input_ids: Tensor
    position_ids: Tensor
    predictors: Tensor
    """Places within the share, of those response tokens whose predictor lies in it."""
    targets: Tensor
    pack: Pack
    """Of the whole row, fill included: attention sees every token."""
    counts: list[int]
    """Response tokens of each rank's share."""


class ContextParallel:
    """The ranks that share rows with this one.

    Attributes: size, rank (among them).
    """

    def __init__(self, device: torch.device, size: int, key: str = "policy.training"):
        """Collective over all ranks. Raises ConfigError when `size` does not divide their number."""
        mesh = init_device_mesh(device.type, (num_groups(f"{key}.context_parallel", size), size),
                                mesh_dim_names=("rows", "context"))
        self.size, self.rank, self.ranks = size, mesh.get_local_rank("context"), mesh.get_group("context")

    def share(self, input_ids: Tensor, position_ids: Tensor, predictors: Tensor, targets: Tensor,
              pack: Pack) -> Share:
        """This rank's part of a packed row; shapes as in MicroBatch."""
        fill = -input_ids.shape[1] % self.size
        tokens = (input_ids.shape[1] + fill) // self.size
        start, stop = self.rank * tokens, (self.rank + 1) * tokens
        owners = torch.div(predictors, tokens, rounding_mode="floor")
        counts = torch.bincount(owners, minlength=self.size).tolist()
        first = sum(counts[:self.rank])
        mine = slice(first, first + counts[self.rank])  # predictors ascend
        return Share(pad(input_ids, (0, fill))[:, start:stop], pad(position_ids, (0, fill))[:, start:stop],
                     predictors[mine] - start, targets[mine], pack.split_over(self, fill), counts)

    def join(self, values: Tensor, counts: list[int]) -> Tensor:
        """[N, ...] from each rank's values; the gradient goes back to a rank's own only."""
        return _Join.apply(values, counts, self.ranks, self.rank)

    def by_heads(self, *tensors: Tensor) -> list[Tensor]:
        """From [1, heads, T / size, d] to [1, heads / size, T, d]: one exchange for all tensors, in rank order.

        Key and value heads that don't divide among the ranks are repeated, as few times as it takes.
        """
        split = []
        for x in tensors:
            repeats = self.size // math.gcd(self.size, x.shape[1])
            whole = x.repeat_interleave(repeats, dim=1) if repeats > 1 else x
            split.append(whole[0].unflatten(0, (self.size, -1)))
        sizes = [x[0].numel() for x in split]
        received = _AllToAll.apply(torch.cat([x.flatten(1) for x in split], dim=1), self.ranks).split(sizes, dim=1)
        return [flat.view(x.shape).transpose(0, 1).flatten(1, 2)[None] for flat, x in zip(received, split, strict=True)]

    def by_tokens(self, out: Tensor) -> Tensor:
        """From [1, T, heads / size, d] to [1, T / size, heads, d]."""
        received = _AllToAll.apply(out[0].unflatten(0, (self.size, -1)), self.ranks)
        return received.transpose(0, 1).flatten(1, 2)[None]


class _AllToAll(torch.autograd.Function):
    """Slice i of dimension 0 goes to rank i, and slice i of the result came from it: its own inverse."""

    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=ranks)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _AllToAll.apply(grad, ctx.ranks), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, counts, ranks, rank):
        start = sum(counts[:rank])
        ctx.mine = slice(start, start + counts[rank])
        longest = max(counts)
        mine = values.new_zeros(longest, *values.shape[1:])
        mine[:len(values)] = values
        everyone = values.new_empty(len(counts) * longest, *values.shape[1:])
        dist.all_gather_single(everyone, mine, group=ranks)
        return torch.cat([part[:count] for part, count in zip(everyone.chunk(len(counts)), counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad[ctx.mine], None, None, None


def check_heads(heads: int, size: int, key: str) -> None:
    """Raise ModelError unless a model's query heads divide among `size` ranks."""
    if heads % size:
        values = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ModelError(f"{key}.context_parallel must divide the model's {heads} attention heads, got {size}; "
                         f"accepted: {', '.join(map(str, values))}.")
