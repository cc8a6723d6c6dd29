"""The gap between the engines that a sync accepts."""

import pytest
import torch

from hybridrl.config import SyncConfig
from hybridrl.errors import SyncError
from hybridrl.workers.weights.sync import check_gap


@pytest.mark.parametrize("gap, max_gap, message", [
    (0.9e-3, 0.0, None), (1.1e-3, 0.0, "differ by 0.0011, more than the accepted 0.001"),
    (1.1e-3, 1.0, None), (torch.inf, 1.0, "log-probs are not finite: training has diverged"),
])
def test_a_gap_is_accepted_or_refused_with_its_reason(gap, max_gap, message):
    if message is None:
        return check_gap(gap, SyncConfig(max_gap=max_gap), torch.float32, version=7)
    with pytest.raises(SyncError, match=message) as caught:
        check_gap(gap, SyncConfig(max_gap=max_gap), torch.float32, version=7)
    assert "weight sync 7" in str(caught.value)
