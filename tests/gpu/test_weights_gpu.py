"""Weights on a GPU: changes found and written there are those of the CPU."""

import pytest
import torch

from hybridrl.workers.weights.changes import as_bits, compare, fetch, overwrite
from hybridrl.workers.weights.patch_chain import PatchReceiver, PatchSender

pytestmark = pytest.mark.gpu


def weights(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in
            {"a": (300, 70), "b": (17,), "empty": (0, 4)}.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_changes_are_those_of_the_cpu(dtype):
    before, after = (torch.randn(100_000, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(2))
    after[::3] = before[::3]
    expected = compare(as_bits(before), as_bits(after))
    found = compare(as_bits(before.cuda()), as_bits(after.cuda()))
    for part in ("index", "old", "new"):
        assert (getattr(found, part) == getattr(expected, part)).all()
    there = before.cuda()
    assert (fetch(as_bits(there), expected.index) == expected.old).all()
    overwrite(as_bits(there), expected.index, expected.new)
    assert torch.equal(as_bits(there).cpu(), as_bits(after))


@pytest.mark.parametrize("sending, receiving", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_a_chain_from_device_to_device(sending, receiving):
    trained = {name: weight.to(sending) for name, weight in weights(0).items()}
    held = {name: torch.zeros_like(weight, dtype=torch.bfloat16, device=receiving) for name, weight in trained.items()}
    sender, receiver = PatchSender(torch.bfloat16), PatchReceiver(held)
    for version in range(4):
        receiver.apply(sender.encode(trained.items(), version))
        sender.acknowledge(version)
        receiver.verify()
        for name, weight in trained.items():
            assert torch.equal(as_bits(held[name]).cpu(), as_bits(weight.bfloat16()).cpu())
            weight.mul_(1 + 1e-3 * version)
