"""Muon over parameter shards: momentum by element, the orthogonalisation on whole matrices, each on one rank."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hybridrl.workers.training.mesh import local

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


class Muon(torch.optim.Optimizer):
    """Momentum SGD whose update of a matrix is made nearly orthogonal.

    M = mu M + (1 - mu) G; U = orthogonal(mu M + (1 - mu) G);
    W = (1 - lr decay) W - 0.2 sqrt(max(rows, columns)) lr U,

    where the factor gives updates the size of AdamW's, so that its learning rates and decays do.
    Source: arXiv:2502.16982, section 2.2, with the momentum of `torch.optim.Muon`.
    """

    def __init__(self, matrices: list[nn.Parameter], lr: float, momentum: float, weight_decay: float):
        """`matrices` are whole, or DTensors whose rows are sharded over the last dimension of one mesh."""
        super().__init__(matrices, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    def tensors(self, matrix: nn.Parameter) -> dict[str, Tensor]:
        """The state of a matrix; zero before its first step."""
        if "momentum" not in self.state[matrix]:
            self.state[matrix]["momentum"] = torch.zeros_like(matrix.detach())
        return {"momentum": self.state[matrix]["momentum"]}

    @torch.no_grad()
    def step(self) -> None:
        """One step of every matrix that has a gradient; collective over the ranks that hold its rows."""
        (group,) = self.param_groups
        lr, mu = group["lr"], group["momentum"]
        matrices = [p for p in group["params"] if p.grad is not None]
        updates = []
        for p in matrices:
            momentum = self.tensors(p)["momentum"].lerp_(p.grad, 1 - mu)
            updates.append(torch.lerp(p.grad, momentum, mu))
        for p, update in zip(matrices, orthogonal(updates), strict=True):
            rows, columns = p.shape
            local(p).mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-0.2 * math.sqrt(max(rows, columns)) * lr)


def orthogonal(updates: list[Tensor]) -> list[Tensor]:
    """This rank's rows of the nearest orthogonal matrices.

    The ranks of a shard group take one matrix each at a time: its rows travel to one rank and back.
    """
    if not updates or not isinstance(updates[0], DTensor):
        return [newton_schulz(update) for update in updates]
    mesh = updates[0].device_mesh
    assert all(u.placements[-1] == Shard(0) for u in updates), "matrices are sharded by rows"
    group = mesh.get_group(mesh.ndim - 1)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    results: list[Tensor] = []
    for some in (updates[first:first + ranks] for first in range(0, len(updates), ranks)):
        mine = [u.to_local() for u in some]
        shape = some[rank].shape if rank < len(some) else torch.Size((0, 0))
        shares = [share * shape[1] for share in _shares(shape[0], ranks)]
        sizes = [m.numel() for m in mine] + [0] * (ranks - len(some))
        rows = _exchange(torch.cat([m.flatten() for m in mine]), sizes, shares, group)
        whole = newton_schulz(rows.view(shape)) if rank < len(some) else rows
        back = _exchange(whole.flatten(), shares, sizes, group).split(sizes[:len(some)])
        results += [flat.view(m.shape) for flat, m in zip(back, mine, strict=True)]
    return results


def newton_schulz(matrix: Tensor) -> Tensor:
    """U V^T of the singular value decomposition, nearly: its singular values are about 0.7 to 1.2.

    Five steps X = a X + b (X X^T) X + c (X X^T)^2 X from X = M / |M|; in bfloat16 on CUDA, else in M's dtype.
    Source: Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024).
    """
    a, b, c = COEFFICIENTS
    x = matrix.to(torch.bfloat16) if matrix.is_cuda else matrix
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.T).to(matrix.dtype)


def _shares(rows: int, ranks: int) -> list[int]:
    """Rows on each rank of a tensor that is sharded on dimension 0."""
    share = -(-rows // ranks)
    return [max(0, min(share, rows - rank * share)) for rank in range(ranks)]


def _exchange(flat: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Pieces of `flat` to the ranks of the group, in order; their pieces for this rank."""
    out = flat.new_empty(sum(received))
    dist.all_to_all_single(out, flat.contiguous(), received, sent, group=group)
    return out
