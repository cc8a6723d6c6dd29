"""Patches as bytes: what the bytes mean, that everything comes back, and that nothing damaged is accepted."""

import json

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.errors import DamagedPatchError
from hybridrl.workers.weights.changes import (
    Change,
    _compare_on_device,
    as_bits,
    compare,
    digest,
    digest_after,
    to_numpy,
)
from hybridrl.workers.weights.patch import Patch, Sparse, State, TensorPatch, is_sparse, state_digest
from hybridrl.workers.weights.patch_codec import decode, encode, states_of
from hybridrl.workers.weights.patch_streams import decompressed, gap_bytes, planes_of, positions, steps_from

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn)


def tensor_of(bits, dtype):
    """A tensor from its bit patterns."""
    size = dtype.itemsize
    return torch.from_numpy(np.array(bits, f"u{size}").view(f"i{size}").copy()).view(dtype)


def patch_of(before, after, version=2):
    """The patch between two {name: tensor}, always sparse."""
    tensors = {}
    for name, old in before.items():
        change = compare(as_bits(old), as_bits(after[name]))
        found = digest_after(digest(to_numpy(as_bits(old))), change)
        tensors[name] = TensorPatch(old.dtype, tuple(old.shape), found, Sparse(change.index, change.new - change.old))
    return Patch(State(version - 1, "0" * 32), State(version, state_digest(tensors)), tensors)


def same(first, second):
    assert (first.base, first.result, list(first.tensors)) == (second.base, second.result, list(second.tensors))
    for name, tensor in first.tensors.items():
        other = second.tensors[name]
        assert tensor[:3] == other[:3]
        assert type(tensor.contents) is type(other.contents)
        if isinstance(tensor.contents, Sparse):
            assert np.array_equal(tensor.contents.index, other.contents.index)
            assert np.array_equal(tensor.contents.steps, other.contents.steps)
        else:
            assert np.array_equal(tensor.contents, other.contents)


# ---- comparing


def test_bits_are_compared_not_values():
    # bfloat16: 0x0000 +0, 0x8000 -0, 0x7fc0 and 0x7fc1 two NaNs, 0x3f80 one, 0x3f81 its neighbour
    before = tensor_of([0x0000, 0x7fc0, 0x7fc0, 0x3f80, 0x3f80], torch.bfloat16)
    after = tensor_of([0x8000, 0x7fc0, 0x7fc1, 0x3f81, 0x3f80], torch.bfloat16)
    change = compare(as_bits(before), as_bits(after))
    assert change.index.tolist() == [0, 2, 3]
    assert change.old.tolist() == [0x0000, 0x7fc0, 0x3f80]
    assert change.new.tolist() == [0x8000, 0x7fc1, 0x3f81]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 3, 7, 8, 9, 1000, (1 << 20) + 5, (2 << 20) + 1])
def test_every_difference_is_found(dtype, numel):
    size = dtype.itemsize
    generator = np.random.default_rng(numel)
    before = generator.integers(0, 2 ** (8 * size), numel, f"u{size}", endpoint=False) if size < 8 else (
        generator.integers(0, 2**63, numel, "u8"))
    after = before.copy()
    moved = generator.random(numel) < 0.3
    moved[-1:] = True
    after[moved] ^= np.array(1, f"u{size}") << np.array(8 * size - 1, f"u{size}")
    change = compare(as_bits(tensor_of(before, dtype)), as_bits(tensor_of(after, dtype)))
    assert np.array_equal(change.index, np.flatnonzero(moved))
    assert np.array_equal(change.old, before[moved])
    assert np.array_equal(change.new, after[moved])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_way_of_gpus_finds_the_same(dtype):
    before, after = (torch.randn(5000, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(2))
    after[::3] = before[::3]
    found, expected = (find(as_bits(before), as_bits(after)) for find in (_compare_on_device, compare))
    for part in ("index", "old", "new"):
        assert np.array_equal(getattr(found, part), getattr(expected, part))
        assert getattr(found, part).dtype == getattr(expected, part).dtype


# ---- digests


def mixed(index, bits):
    """The two mixes of one element, in Python's integers."""
    word = 2**64
    x = (index * 0x9E3779B97F4A7C15 % word) ^ ((bits + 1) * 0xC2B2AE3D27D4EB4F % word)
    x = (x ^ x >> 32) * 0xBF58476D1CE4E5B9 % word
    x = (x ^ x >> 29) * 0x94D049BB133111EB % word
    x ^= x >> 32
    return x, x * (x >> 32 | 1) % word


def test_digest_of_three_elements():
    elements = [mixed(i, bits) for i, bits in enumerate([0x3f80, 0x0000, 0xffff])]
    expected = tuple(sum(column) % 2**64 for column in zip(*elements, strict=True))
    assert digest(np.array([0x3f80, 0x0000, 0xffff], "u2")) == expected
    first, rest = digest(np.array([0x3f80], "u2")), digest(np.array([0x0000, 0xffff], "u2"), start=1)
    assert tuple((a + b) % 2**64 for a, b in zip(first, rest, strict=True)) == expected


def test_a_digest_follows_from_the_change_and_sees_swaps():
    before = np.arange(1000, dtype="u2")
    after = before.copy()
    after[[3, 900]] = after[[900, 3]]
    change = Change(np.array([3, 900]), before[[3, 900]], after[[3, 900]])
    assert digest_after(digest(before), change) == digest(after) != digest(before)


def test_digests_of_single_bits_differ():
    found = set()
    for bit in range(16):
        for position in range(50):
            bits = np.zeros(50, "u2")
            bits[position] = 1 << bit
            found.add(digest(bits))
    assert len(found) == 16 * 50


# ---- the bytes


def test_gaps():
    # 0, 1: no gap, no gap. 300 - 1 - 1 = 298 = 255 + 43. 300 + 1 + 254 = 555; then a gap of exactly 255.
    index = np.array([0, 1, 300, 555, 811])
    gaps = gap_bytes(index, 812)
    assert gaps.tolist() == [0, 0, 255, 43, 254, 255, 0]
    back = positions(gaps, np.array([7]), np.array([5]), np.array([812]))
    assert back.tolist() == index.tolist()


def test_steps_fold_their_signs_and_are_split_into_planes_of_four_bits():
    steps = np.array([0, 1, -1, 2, -2, 100], "i2").view("u2")  # folded: 0 2 1 4 3 200 = 0xc8
    low, high = planes_of(steps)
    assert low.tolist() == [0x20, 0x41, 0x83]
    assert high.tolist() == [0x00, 0x00, 0xc0]
    assert np.array_equal(steps_from([low, high], 6, 2), steps)
    assert planes_of(np.empty(0, "u2")) == []


def test_the_bytes_of_a_small_patch():
    before = {"w": torch.zeros(600, dtype=torch.bfloat16), "same": torch.ones(2, dtype=torch.bfloat16)}
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["w"][2] = tensor_of([0x0003], torch.bfloat16)
    after["w"][599] = tensor_of([0x0001], torch.bfloat16)
    data = encode(patch_of(before, after))
    length = int.from_bytes(data[8:16], "little")
    header = json.loads(data[16:16 + length])
    assert data[:8] == b"hrlpatch"
    assert header["base"] == [1, "0" * 32]
    assert header["result"][0] == 2
    assert [row[:3] + row[4:] for row in header["tensors"]] == [
        ["w", "bfloat16", [600], 2, 4], ["same", "bfloat16", [2], 0, 0]]
    assert header["planes"] == [[2, 1]]
    (gap_plain, gap_packed), (step_plain, step_packed) = header["streams"]
    body = memoryview(data)[16 + length:-16]
    # position 2 after two; 599 - 2 - 1 = 596 = 255 + 255 + 86
    assert decompressed(body[:gap_packed], gap_plain).tolist() == [2, 255, 255, 86]
    assert decompressed(body[gap_packed:], step_plain).tolist() == [0x26]  # 3 folds to 6, 1 to 2
    assert len(body) == gap_packed + step_packed
    assert xxhash.xxh3_128_digest(data[:-16]) == data[-16:]
    assert states_of(data) == (State(1, "0" * 32), State(2, header["result"][1]))


@st.composite
def changes(draw):
    """(dtype, bits before, bits after) of a tensor: any bits, NaNs and zeros among them, and any density."""
    dtype = draw(st.sampled_from(DTYPES))
    numel = draw(st.sampled_from([0, 1, 2, 5, 255, 256, 257, 600, 70000]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = f"u{dtype.itemsize}"
    specials = tensor_of([0], dtype).new_tensor([0.0, -0.0, 1.0, float("nan")]).to(dtype)
    pool = np.concatenate([to_numpy(as_bits(specials)), generator.integers(0, 255, 20).astype(kind)])
    before = pool[generator.integers(0, len(pool), numel)]
    moved = generator.random(numel) < draw(st.sampled_from([0, 1e-5, 1e-3, 0.01, 0.5, 1]))
    after = before.copy()
    if draw(st.booleans()):
        after[moved] += generator.integers(0, 5, int(moved.sum())).astype(kind) - np.array(2, kind)
    else:
        after[moved] = np.frombuffer(generator.bytes(int(moved.sum()) * dtype.itemsize), kind)
    return dtype, before, after


@given(st.lists(changes(), max_size=4))
@settings(max_examples=60)
def test_a_patch_comes_back(tensors):
    before = {f"t{i}": tensor_of(bits, dtype) for i, (dtype, bits, _) in enumerate(tensors)}
    after = {f"t{i}": tensor_of(bits, dtype) for i, (dtype, _, bits) in enumerate(tensors)}
    patch = patch_of(before, after)
    for name, tensor in patch.tensors.items():
        assert tensor.digest == digest(to_numpy(as_bits(after[name])))
    same(decode(encode(patch)), patch)
    full = Patch(None, patch.result, {name: TensorPatch(t.dtype, t.shape, t.digest, to_numpy(as_bits(after[name])))
                                      for name, t in patch.tensors.items()})
    same(decode(encode(full)), full)


def test_long_gaps():
    before = {"w": torch.zeros(200_001, dtype=torch.bfloat16)}
    after = {"w": before["w"].clone()}
    after["w"][[0, 66_000, 66_256, 200_000]] = 1.0
    patch = patch_of(before, after)
    assert decode(encode(patch)).tensors["w"].contents.index.tolist() == [0, 66_000, 66_256, 200_000]


def test_a_change_is_sparse_while_that_is_smaller():
    generator = np.random.default_rng(0)
    old = generator.integers(0, 2**16, 10_000).astype("u2")
    everything = np.arange(len(old))
    assert is_sparse(Change(everything, old, old + np.array(1, "u2")), len(old))  # four bits a step, no gaps
    assert not is_sparse(Change(everything, old, generator.integers(0, 2**16, len(old)).astype("u2")), len(old))
    assert is_sparse(Change(everything[:3000], old[:3000], generator.integers(0, 2**16, 3000).astype("u2")), len(old))
    assert not is_sparse(Change(np.arange(1), old[:1], old[:1] + np.array(1, "u2")), 1)


def test_size_at_one_percent():
    """Uniformly spread steps of one or two units: 8.6 bits for the gap, 2 for the step."""
    generator = torch.Generator().manual_seed(0)
    before = {"w": (torch.randn(2_000_000, generator=generator) * 0.02).bfloat16()}
    moved = torch.rand(2_000_000, generator=generator) < 0.01
    steps = torch.tensor([-2, -1, 1, 2], dtype=torch.int16)[torch.randint(4, (2_000_000,), generator=generator)]
    after = {"w": (before["w"].view(torch.int16) + steps * moved).view(torch.bfloat16)}
    assert 4_000_000 / len(encode(patch_of(before, after))) > 145


# ---- damage


def small_patch():
    g = torch.Generator().manual_seed(0)
    before = {"a": torch.randn(3000, generator=g).bfloat16(), "b": torch.randn(4, 5, generator=g),
              "empty": torch.zeros(0)}
    after = {"a": before["a"] * (torch.rand(3000, generator=g) < 0.05).add(1).bfloat16(), "b": before["b"] * 1.01,
             "empty": before["empty"]}
    return encode(patch_of(before, after))


def test_truncated_anywhere():
    data = small_patch()
    for length in range(len(data)):
        with pytest.raises(DamagedPatchError):
            decode(data[:length])
    with pytest.raises(DamagedPatchError, match="checksum"):
        decode(data + b"\0")


def test_any_flipped_bit():
    data = small_patch()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(DamagedPatchError):
            decode(bytes(damaged))


def with_header(data, change):
    """A patch whose header was changed by someone who corrected the checksum."""
    length = int.from_bytes(data[8:16], "little")
    header = json.loads(data[16:16 + length])
    changed = change(header)
    text = changed if isinstance(changed, bytes) else json.dumps(header if changed is None else changed).encode()
    whole = data[:8] + len(text).to_bytes(8, "little") + text + data[16 + length:-16]
    return whole + xxhash.xxh3_128_digest(whole)


def set_row(column, value):
    def change(header):
        header["tensors"][0][column] = value
    return change


@pytest.mark.parametrize("change, reason", [
    (lambda h: b"{", "no JSON"),
    (lambda h: b"[" * 100_000, "no JSON"),
    (lambda h: [], "malformed"),
    (lambda h: h.pop("result") and None, "malformed"),
    (lambda h: h.update(base=[1]), "malformed"),
    (lambda h: h.update(result=[2.5, "0"]), "malformed"),
    (lambda h: h.update(planes=[[2, float("inf")]]), "malformed"),
    (lambda h: h.update(streams=[[1, float("inf")]]), "malformed"),
    (lambda h: h["tensors"][0].pop() and None, "malformed"),
    (lambda h: h["tensors"].append(h["tensors"][0]), "streams hold"),
    (lambda h: h["tensors"].append(h["tensors"][2]), "twice"),
    (lambda h: h["tensors"].pop() and None, "digest"),
    (lambda h: h["tensors"].reverse(), "positions"),
    (lambda h: h["planes"].reverse() or h["planes"].pop() and None, "planes"),
    (lambda h: h.update(planes=[[2, 9], [4, 8]]), "planes"),
    (lambda h: h["streams"][0].__setitem__(0, 10**15), "streams hold"),
    (lambda h: h["streams"][0].__setitem__(1, -1), "malformed"),
    (lambda h: h["streams"][0].__setitem__(1, 10**9), "body has"),
    (set_row(0, "other"), "digest"),
    (set_row(1, "float16"), "digest"),
    (set_row(0, 1), "malformed"),
    (set_row(1, "nn"), "malformed"),
    (set_row(1, "complex128"), "malformed"),
    (set_row(2, [-3000]), "malformed"),
    (set_row(2, [30]), "malformed"),
    (set_row(2, [1 << 63]), "malformed"),
    (set_row(2, [2500]), "positions"),
    (set_row(2, ["3000"]), "malformed"),
    (set_row(3, [1, 2]), "digest"),
    (set_row(3, [1]), "malformed"),
    (set_row(4, 1.5), "malformed"),
    (set_row(4, -2), "malformed"),
    (set_row(4, -1), "malformed"),
    (set_row(5, 10**12), "malformed"),
])
def test_malformed_headers(change, reason):
    with pytest.raises(DamagedPatchError, match=reason):
        decode(with_header(small_patch(), change))


def test_a_header_rewritten_as_it_was_is_accepted():
    assert decode(with_header(small_patch(), lambda header: None)).result.version == 2
