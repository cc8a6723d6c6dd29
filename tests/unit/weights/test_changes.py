"""Steps added to the bits of several tensors at once."""

import numpy as np
import pytest
import torch

from hybridrl.workers.weights.changes import UNSIGNED, add_steps, added, as_bits, digest, to_numpy


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_steps_of_several_tensors(monkeypatch, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator, numpy = torch.Generator().manual_seed(0), np.random.default_rng(0)
    dtypes = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float64)
    tensors = [torch.randn(size, generator=generator).to(dtype) for dtype in dtypes for size in (20_000, 7, 1, 0)]
    changes, expected, digests = [], [], []
    for tensor in tensors:
        bits, kind = as_bits(tensor), UNSIGNED[tensor.itemsize]
        index = np.flatnonzero(numpy.random(len(bits)) < 0.5)
        steps = numpy.integers(0, np.iinfo(kind).max, len(index), kind, endpoint=True)
        after = to_numpy(bits).copy()
        after[index] += steps
        changes.append((bits, index, steps))
        expected.append(after)
        digests.append(digest(to_numpy(bits)))
    before = [to_numpy(bits).copy() for bits, _, _ in changes]
    for (bits, _, _), first, by, after in zip(changes, digests, add_steps(changes), expected, strict=True):
        assert np.array_equal(to_numpy(bits), after)
        assert added(first, by) == digest(after)
    add_steps([(bits, index, -steps) for bits, index, steps in changes])
    assert all(np.array_equal(to_numpy(bits), first) for (bits, _, _), first in zip(changes, before, strict=True))
    assert add_steps([]) == []
