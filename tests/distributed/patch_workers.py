"""A worker that holds weights and sends or receives patches of them."""

import torch

from hybridrl.dispatch import to_all, to_first
from hybridrl.errors import PatchError
from hybridrl.workers.base import Worker, WorkerContext
from hybridrl.workers.weights.patch_broadcast import receive_patch, send_patch
from hybridrl.workers.weights.patch_chain import PatchReceiver, PatchSender


class PatchWorker(Worker):
    """Rank 0 trains and sends; every other rank receives."""

    def __init__(self, context: WorkerContext):
        super().__init__(context)
        generator = torch.Generator().manual_seed(0)
        self.weights = {"a": torch.randn(5000, generator=generator), "b": torch.randn(20, 30, generator=generator)}
        self.sender = PatchSender(torch.bfloat16)
        self.restart()

    @to_all
    def restart(self, rank: int | None = None) -> None:
        """Begin with an empty receiver, as a process that was restarted does."""
        if rank in (None, self.rank):
            self.held = {name: torch.zeros(w.shape, dtype=torch.bfloat16) for name, w in self.weights.items()}
            self.receiver = PatchReceiver(self.held)

    @to_all
    def train(self, version: int) -> None:
        generator = torch.Generator().manual_seed(version)
        for weight in self.weights.values():
            weight.add_((torch.rand(weight.shape, generator=generator) < 0.02).float())

    @to_all
    def broadcast(self, version: int) -> float:
        """Over the process group: bytes sent, or whether the receiver changed."""
        if self.rank == 0:
            return float(send_patch(self.sender, self.weights.items(), version))
        return float(receive_patch(self.receiver))

    @to_first
    def encode(self, version: int, full: bool = False) -> bytes:
        return (self.sender.full if full else self.sender.encode)(self.weights.items(), version)

    @to_first
    def acknowledge(self, version: int) -> None:
        self.sender.acknowledge(version)

    @to_all
    def apply(self, patch: bytes) -> str:
        """Why the patch was refused; empty when it was not. An exception would stop the whole pool."""
        try:
            self.receiver.apply(patch)
        except PatchError as error:
            return str(error)
        return ""

    @to_all
    def up_to_date(self) -> bool:
        """Whether what is held is, bit by bit, what this rank trained (all train alike)."""
        self.receiver.verify()
        return all(torch.equal(self.held[name].view(torch.int16), weight.bfloat16().view(torch.int16))
                   for name, weight in self.weights.items())

    @to_all
    def versions(self) -> int | None:
        return self.receiver.state and self.receiver.state.version
