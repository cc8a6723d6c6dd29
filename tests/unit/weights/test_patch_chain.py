"""Chains of patches: bit-identity through loss and damage, and what a receiver refuses."""

import random

import pytest
import torch
import xxhash

from hybridrl.errors import ConfigError, DamagedPatchError, PatchBaseError, PatchError, SyncError
from hybridrl.workers.weights.patch_chain import PatchReceiver, PatchSender

SHAPES = {"embed": (40, 16), "norm": (16,), "proj": (16, 48), "one": (1,), "empty": (0, 16), "scalar": ()}


def make_weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in SHAPES.items()}


def zeros(dtype=torch.bfloat16):
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}


def step(weights, generator, scale=1e-4):
    """One optimizer step's worth of change, in float32; now and then a whole tensor is replaced or left alone."""
    for weight in weights.values():
        kind = float(torch.rand((), generator=generator))
        if kind < 0.1:
            weight.copy_(torch.randn(weight.shape, generator=generator))
        elif kind < 0.9:
            weight.add_(torch.randn(weight.shape, generator=generator) * scale)


def assert_same(held, weights, dtype=torch.bfloat16):
    for name, weight in weights.items():
        expected = weight.to(dtype)
        assert torch.equal(held[name].view(torch.uint8) if held[name].dim() else held[name],
                           expected.view(torch.uint8) if expected.dim() else expected), name


def pair(dtype=torch.bfloat16):
    """A sender and a receiver that hold version 0 of the same weights."""
    weights, held = make_weights(), zeros(dtype)
    sender, receiver = PatchSender(dtype), PatchReceiver(held)
    receiver.apply(sender.encode(weights.items(), 0))
    sender.acknowledge(0)
    return weights, held, sender, receiver


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(3))
def test_fifty_patches_that_are_dropped_corrupted_and_repeated(dtype, seed):
    """Whatever arrives, the receiver holds, bit by bit, the newest weights whose delivery was acknowledged."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    weights, held, sender, receiver = pair(dtype)
    fates = ["dropped", "corrupted", "truncated", "repeated", "delivered"] * 10
    dice.shuffle(fates)
    full, late = 0, []
    for version, fate in enumerate(fates, 1):
        step(weights, generator)
        data = sender.encode(weights.items(), version)
        expected = {name: weight.clone() for name, weight in held.items()}
        if fate == "dropped":  # and unnoticed: the sender believes it arrived
            sender.acknowledge(version)
            late.append(data)
            continue
        if fate == "corrupted":
            damaged = bytearray(data)
            damaged[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
            data = bytes(damaged)
        elif fate == "truncated":
            data = data[:dice.randrange(len(data))]
        try:
            receiver.apply(data)
        except PatchError:
            assert_same(held, expected, dtype)  # a refused patch leaves no trace
            receiver.apply(sender.full(weights.items(), version))
            full += 1
        sender.acknowledge(version)
        if fate == "repeated":
            assert receiver.apply(data) is False
        for old in late:  # what was dropped turns up after all
            with pytest.raises(PatchBaseError, match="came late"):
                receiver.apply(old)
        late.clear()
        assert_same(held, weights, dtype)
        assert receiver.state == sender.state and receiver.state.version == version
    receiver.verify()
    assert full >= 20, "whatever was damaged"


def test_the_base_advances_only_when_acknowledged():
    weights, held, sender, receiver = pair()
    generator = torch.Generator().manual_seed(1)
    step(weights, generator)
    sender.encode(weights.items(), 1)  # lost, and nobody said it arrived
    step(weights, generator)
    data = sender.encode(weights.items(), 2)
    assert receiver.apply(data)
    assert_same(held, weights)


def test_a_patch_from_a_missed_version_is_refused_and_a_full_state_repairs():
    weights, held, sender, receiver = pair()
    generator = torch.Generator().manual_seed(2)
    step(weights, generator)
    sender.encode(weights.items(), 1)
    sender.acknowledge(1)
    step(weights, generator)
    data = sender.encode(weights.items(), 2)
    with pytest.raises(PatchBaseError, match=r"from version 1 \(\w{8}\), version 0 .* is held: send a full state"):
        receiver.apply(data)
    assert receiver.state.version == 0
    assert receiver.apply(sender.full(weights.items(), 2))
    sender.acknowledge(2)
    assert_same(held, weights)


def test_late_and_repeated_patches():
    weights, held, sender, receiver = pair()
    first = sender.full(weights.items(), 1)
    assert receiver.apply(first)
    sender.acknowledge(1)
    weights["norm"].add_(1)
    second = sender.encode(weights.items(), 2)
    assert receiver.apply(second) and not receiver.apply(second)
    with pytest.raises(PatchBaseError, match="leads to version 1, version 2 .* is held: it came late"):
        receiver.apply(first)
    assert_same(held, weights)
    receiver.forget()
    with pytest.raises(PatchBaseError, match="no state is held"):
        receiver.apply(second)
    assert receiver.apply(first) and receiver.apply(second)  # a full state of any version, then on from there
    assert_same(held, weights)


def test_a_receiver_whose_weights_were_changed_by_others():
    weights, held, sender, receiver = pair()
    weights["proj"].view(-1)[5] += 1
    data = sender.encode(weights.items(), 1)
    before = {name: weight.clone() for name, weight in held.items()}
    held["proj"].view(-1)[5] *= 2
    before["proj"].view(-1)[5] *= 2
    with pytest.raises(PatchBaseError, match="proj would not become what was sent"):
        receiver.apply(data)
    assert_same(held, before)
    assert receiver.state.version == 0
    held["proj"].view(-1)[5] /= 2
    assert receiver.apply(data)
    receiver.verify()
    held["norm"][3] = 7  # where no patch writes
    with pytest.raises(SyncError, match="norm: something else"):
        receiver.verify()
    assert receiver.state is None
    with pytest.raises(SyncError, match="no state to verify"):
        receiver.verify()


def test_when_one_tensor_objects_none_is_written():
    weights, held, sender, receiver = pair()
    for weight in weights.values():
        weight.add_(0.5)
    data = sender.encode(weights.items(), 1)
    held["proj"][0, 0] = 3
    before = {name: weight.clone() for name, weight in held.items()}
    with pytest.raises(PatchBaseError, match="proj"):
        receiver.apply(data)
    assert_same(held, before)


def test_a_full_state_whose_elements_are_not_what_its_digests_say():
    weights, held, sender, receiver = pair()
    data = bytearray(sender.full(weights.items(), 1))
    data[-17] ^= 1  # in the last dense tensor, by someone who corrects the checksum
    data[-16:] = xxhash.xxh3_128_digest(data[:-16])
    before = {name: weight.clone() for name, weight in held.items()}
    with pytest.raises(DamagedPatchError, match="scalar is not what its digest says"):
        receiver.apply(bytes(data))
    assert_same(held, before)
    assert receiver.state.version == 0


def test_nothing_changed():
    weights, held, sender, receiver = pair()
    data = sender.encode(weights.items(), 1)
    assert sender.changed_frac == 0
    assert receiver.apply(data)
    assert receiver.state.version == 1
    assert_same(held, weights)


def test_changed_fraction():
    weights, _, sender, _ = pair()
    weights["embed"][:10] += 1
    sender.encode(weights.items(), 1)
    assert sender.changed_frac == 160 / (640 + 16 + 768 + 1 + 0 + 1)


def test_signed_zeros_and_nan_payloads_arrive():
    weights, held, sender, receiver = pair()
    bits = torch.tensor([-0x8000, 0x7fc1, 0x7f81, -1], dtype=torch.int16).view(torch.bfloat16)
    cast = {name: weight.bfloat16() for name, weight in weights.items()}
    cast["norm"][:4] = bits
    receiver.apply(sender.encode(cast.items(), 1))
    assert torch.equal(held["norm"][:4].view(torch.int16), bits.view(torch.int16))


def test_other_tensors_than_those_held():
    weights, held, sender, _ = pair()
    full = sender.full(weights.items(), 1)
    for other in ({**held, "extra": torch.zeros(2, dtype=torch.bfloat16)},
                  {**held, "norm": torch.zeros(17, dtype=torch.bfloat16)},
                  {**held, "norm": torch.zeros(16)}):
        with pytest.raises(DamagedPatchError, match="1 tensors are not those held; (extra|norm)"):
            PatchReceiver(other).apply(full)


def test_a_model_that_changes_its_tensors_is_sent_in_full():
    weights, _, sender, _ = pair()
    weights["extra"] = torch.ones(3)
    held = zeros() | {"extra": torch.zeros(3, dtype=torch.bfloat16)}
    assert PatchReceiver(held).apply(sender.encode(weights.items(), 1))
    assert_same(held, weights)


def test_misuse_of_a_sender():
    weights, _, sender, _ = pair()
    with pytest.raises(SyncError, match="version 3 can't be acknowledged"):
        sender.acknowledge(3)
    with pytest.raises(SyncError, match="version 0 can't follow version 0"):
        sender.encode(weights.items(), 0)


def test_tensors_that_patches_can_not_be_of():
    for dtype in (torch.int8, torch.complex64, "bfloat16"):
        with pytest.raises(ConfigError, match="dtype of weight patches must be a floating-point"):
            PatchSender(dtype)
    with pytest.raises(SyncError, match="contiguous tensors, a is not"):
        PatchReceiver({"a": torch.zeros(3, 4).T})
