"""What rows cost, against counts made by torch and by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hybridrl.batch import make_batch
from hybridrl.config import ModelConfig, TrainingConfig
from hybridrl.workers.training.costs import Costs
from hybridrl.workers.training.engine import TrainingEngine
from hybridrl.workers.training.models import ValueModel
from tests.models import KINDS

pytestmark = pytest.mark.usefixtures("one_rank")


def test_a_row_by_hand():
    costs = Costs(per_token=10, per_target=100, per_pair=1)
    assert costs.of(3, 2) == 30 + 200 + 6
    # 2 prompt and 2 response tokens feed 3; a row without a response feeds nothing
    assert costs(make_batch(prompt_ids=[[1, 2], [1, 2]], response_ids=[[3, 4], []])) == [236, 0]
    assert costs(make_batch(prompt_ids=[[1]])) is None


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_that_torch_counts(folder, kind):
    """Of one row; torch counts the whole square of causal attention, and no grouped products of experts."""
    ours = TrainingEngine(ModelConfig(path=str(folder(kind))), TrainingConfig(), torch.device("cpu"))
    batch = make_batch(prompt_ids=[list(range(1, 21))], response_ids=[list(range(11))])
    with FlopCounterMode(display=False) as counter:
        ours.log_probs(batch)
    costs, (row,) = ours.costs, ours.costs(batch)
    assert row == costs.per_token * 30 + costs.per_target * 11 + costs.per_pair * 30 * 31 / 2
    assert costs.per_target == 2 * 64 * 64 and costs.per_pair == 4 * 2 * 2 * 32
    products = costs.per_token * 30 + costs.per_target * 11
    if kind == "qwen3_moe":
        experts = 2 * 2 * 2 * 3 * 64 * 48 * 30  # layers, experts a token, products of two; three matrices
        assert products - experts == counter.get_total_flops() - attention(counter)
    else:
        assert products == counter.get_total_flops() - attention(counter)


def attention(counter):
    return sum(flops for op, flops in counter.get_flop_counts()["Global"].items() if "attention" in str(op))


def test_a_value_head_costs_next_to_nothing(folder):
    ours = TrainingEngine(ModelConfig(path=str(folder())), TrainingConfig(), torch.device("cpu"), module=ValueModel)
    assert ours.costs.per_target == 2 * 64
