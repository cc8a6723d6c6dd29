"""Digests add up over parts, and see changed, swapped and moved elements."""

import pytest
import torch

from hybridrl.workers.weights import digests
from hybridrl.workers.weights.digests import Digests, region_digest
from hybridrl.workers.weights.plan import Sharded
from hybridrl.workers.weights.regions import Copy, Region, cut, whole

MASK = (1 << 64) - 1


def splitmix(x: int) -> int:
    """The published generator's output function, in Python's integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@pytest.mark.parametrize("dtype, view", [(torch.float32, torch.int32), (torch.bfloat16, torch.int16)])
def test_a_digest_is_the_sum_of_its_elements(dtype, view):
    values = torch.tensor([1.5, -2.0, 0.0, -0.0], dtype=dtype)
    expected = sum(splitmix((bits & MASK) + splitmix(5 + 3 * i) & MASK)
                   for i, bits in enumerate(values.view(view).tolist())) & MASK
    assert region_digest(values, Region(5, (4,), (3,))) & MASK == expected


def test_parts_add_up_and_large_regions_are_split(monkeypatch):
    values = torch.randn(40)
    region = Region(3, (5, 4), (7, 1))
    total = region_digest(region.of(values), region)
    parts = [region.part(box) for low, high in ((0, 12), (12, 40)) for box in cut(region, low, high)]
    assert (sum(region_digest(part.of(values), part) for part in parts) - total) & MASK == 0
    monkeypatch.setattr(digests, "CHUNK", 4)
    assert region_digest(region.of(values), region) == total


def test_every_change_is_seen():
    region = whole((2, 3))
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    seen = {region_digest(values, region)}
    for other in (values.flip(0), values[:, [1, 0, 2]], values.nextafter(torch.tensor(9.0)), values * -1):
        seen.add(region_digest(other.contiguous(), region))
    seen.add(region_digest(values, region.moved(1)))
    assert len(seen) == 6


def test_both_sides_of_a_sync():
    weight = torch.arange(12.0)
    copies = [Copy("w", Region(0, (3, 2), (4, 1)), "left", whole((3, 2))),
              Copy("w", Region(2, (3, 2), (4, 1)), "right", whole((3, 2)))]
    left, right = (copy.source.of(weight).contiguous() for copy in copies)
    for broken in (None, "left", "right"):
        both = Digests(copies, torch.float32)
        both.inspect("left", left + 1 if broken == "left" else left)
        both.inspect("right", right.flip(0) if broken == "right" else right)
        training = both.of_training([("w", weight)], [Sharded("w", (3, 4), 1)], [copies], 0, None)
        assert both.different(training) == ([f"{broken} (from w)"] if broken else [])
    assert Digests(copies, torch.float32).different(training) == ["left (from w)", "right (from w)"]  # never inspected
