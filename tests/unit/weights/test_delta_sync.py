"""Where a copy puts single elements, compared with where it puts all of them."""

import numpy as np
import pytest
import torch

from hybridrl.config import SyncConfig, validate_all
from hybridrl.errors import ConfigError, SyncError
from hybridrl.workers.weights.delta_sync import check_places, places
from hybridrl.workers.weights.regions import Copy, Region, whole

# of a weight of 6 x 8 elements into a parameter of 100
COPIES = {
    "all": Copy("w", whole((6, 8)), "p", Region(10, (6, 8), (8, 1))),
    "rows": Copy("w", Region(16, (3, 8), (8, 1)), "p", Region(40, (3, 8), (8, 1))),
    "columns": Copy("w", Region(4, (6, 4), (8, 1)), "p", Region(0, (6, 4), (4, 1))),
    "transposed": Copy("w", Region(0, (8, 6), (1, 8)), "p", Region(7, (8, 6), (6, 1))),
    "into a wider one": Copy("w", Region(0, (6, 4), (8, 1)), "p", Region(3, (6, 4), (16, 1))),
    "every second": Copy("w", Region(1, (6, 4), (8, 2)), "p", Region(0, (6, 4), (4, 1))),
    "expert": Copy("w", Region(24, (1, 2, 8), (24, 8, 1)), "p", Region(0, (1, 2, 8), (16, 8, 1))),
    "one": Copy("w", Region(47, (), ()), "p", Region(99, (), ())),
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_places(name, density):
    copy = COPIES[name]
    check_places(copy)
    weight = torch.arange(1, 49)
    expected, found = torch.zeros(100, dtype=torch.int64), np.zeros(100, np.int64)
    changed = np.flatnonzero(np.random.default_rng(0).random(48) < density)
    sparse = torch.zeros_like(weight)
    sparse[changed] = weight[changed]
    copy.target.of(expected).copy_(copy.source.of(sparse))
    target, chosen = places(copy, changed)
    found[target] = weight.numpy()[changed][chosen]
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("source", [Region(0, (4, 8), (0, 1)), Region(0, (4, 4), (2, 1)), Region(0, (3, 3), (2, 1))])
def test_elements_that_are_taken_twice_are_refused(source):
    with pytest.raises(SyncError, match="can't follow w into p, which takes elements more than once"):
        check_places(Copy("w", source, "p", whole(source.size)))


@pytest.mark.parametrize("options, message", [
    ({"mode": "sparse"}, "policy.sync.mode: Unknown choice 'sparse'"),
    ({"mode": "delta", "lora": "adapter"}, "policy.sync.mode must be full with policy.sync.lora=adapter"),
])
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        validate_all(SyncConfig(**options))
