"""Strided regions: cut by position ranges, by hand and against a list of positions."""

import random

import pytest
import torch

from hybridrl.workers.weights.regions import Box, Region, cut, whole

ROWS = Region(offset=8, size=(3, 2), stride=(4, 1))
"""Columns 0 and 1 of rows 2 to 4 of a matrix with 4 columns: positions 8, 9, 12, 13, 16, 17."""


def test_positions_and_views_by_hand():
    assert ROWS.positions().tolist() == [[8, 9], [12, 13], [16, 17]]
    assert (ROWS.numel, ROWS.last) == (6, 17)
    assert ROWS.of(torch.arange(24.0)).tolist() == [[8, 9], [12, 13], [16, 17]]
    assert whole((2, 3)) == Region(0, (2, 3), (3, 1))
    assert whole(()).of(torch.tensor([7.0])).item() == 7
    assert ROWS.part(Box((1, 1), (2, 1))).positions().tolist() == [[13], [17]]
    assert ROWS.moved(-8).positions()[0].tolist() == [0, 1]


@pytest.mark.parametrize("low, high, expected", [
    (0, 24, [Box((0, 0), (3, 2))]),
    (8, 18, [Box((0, 0), (3, 2))]),
    (0, 12, [Box((0, 0), (1, 2))]),  # the row boundary before row 3
    (12, 24, [Box((1, 0), (2, 2))]),
    (10, 12, []), (0, 8, []), (18, 24, []),
    (9, 17, [Box((1, 0), (1, 2)), Box((0, 1), (1, 1)), Box((2, 0), (1, 1))]),  # begins and ends inside a row
])
def test_cuts_by_hand(low, high, expected):
    assert sorted(cut(ROWS, low, high)) == sorted(expected)


def test_what_is_empty_gives_nothing():
    assert cut(Region(0, (0, 4), (4, 1)), 0, 100) == []
    assert cut(ROWS, 12, 12) == []


def test_cuts_hold_every_position_of_the_range_once():
    generator = random.Random(0)
    for _ in range(300):
        axes = generator.randint(1, 3)
        region = Region(generator.randint(0, 9), tuple(generator.randint(1, 5) for _ in range(axes)),
                        tuple(generator.sample([1, 2, 5, 7, 12, 40], axes)))  # transposed and gapped ones among them
        low, high = sorted(generator.randint(0, 200) for _ in range(2))
        inside = sorted(p for p in region.positions().flatten().tolist() if low <= p < high)
        found = sorted(p for box in cut(region, low, high) for p in region.part(box).positions().flatten().tolist())
        assert found == inside, (region, low, high)
