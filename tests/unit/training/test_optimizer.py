"""Schedule, clipping and skipped steps, by hand."""

import math

import pytest
import torch
from torch import nn

from hybridrl.config import TrainingConfig
from hybridrl.errors import TrainingError
from hybridrl.workers.training.optimizer import Optimizer, learning_rate


def rates(steps, **options):
    cfg = TrainingConfig(learning_rate=8.0, **options)
    return [learning_rate(cfg, step) for step in range(steps)]


def test_schedules_by_hand():
    assert rates(4) == [8, 8, 8, 8]
    assert rates(5, warmup_steps=4) == [2, 4, 6, 8, 8]
    assert rates(8, warmup_steps=2, schedule="linear", total_steps=6) == [4, 8, 8, 6, 4, 2, 0, 0]
    # x = 0, 1/4, 1/2, 3/4, 1: (1 + cos(pi x)) / 2
    half = math.sqrt(0.5)
    assert rates(6, schedule="cosine", total_steps=4) == pytest.approx(
        [8, 4 * (1 + half), 4, 4 * (1 - half), 0, 0], abs=1e-12)


def optimizer(*values, **options):
    parameters = [nn.Parameter(torch.tensor(v, dtype=torch.float64)) for v in values]
    return parameters, Optimizer(parameters, TrainingConfig(**options), group=None)


def test_the_first_step_by_hand():
    # Adam's first step is lr * sign(gradient); decoupled decay takes lr * decay * weight before
    (weight,), adamw = optimizer([1.0, -2.0], learning_rate=0.1, weight_decay=0.5, max_grad_norm=100.0)
    weight.grad = torch.tensor([3.0, -4.0], dtype=torch.float64)
    assert adamw.step() == (5.0, 0.1, False)
    assert weight.tolist() == pytest.approx([1 * 0.95 - 0.1, -2 * 0.95 + 0.1], abs=1e-7)
    assert weight.grad is None
    assert adamw.steps == 1


def test_the_norm_is_over_all_parameters_and_clipping_scales_all():
    (a, b), adamw = optimizer([0.0], [0.0, 0.0], learning_rate=0.1, max_grad_norm=1.0, beta1=0.5)
    a.grad = torch.tensor([3.0], dtype=torch.float64)
    b.grad = torch.tensor([0.0, 4.0], dtype=torch.float64)
    assert adamw.step()[0] == 5.0
    kept = adamw.tensors()
    assert kept[a]["exp_avg"].tolist() == pytest.approx([0.5 * 0.6])  # (1 - beta1) * 3 / 5
    assert kept[b]["exp_avg"].tolist() == pytest.approx([0.0, 0.5 * 0.8])


def test_a_gradient_below_the_limit_is_left_as_it_is():
    (a,), adamw = optimizer([0.0], max_grad_norm=1.0, beta1=0.0)
    a.grad = torch.tensor([0.25], dtype=torch.float64)
    adamw.step()
    assert adamw.tensors()[a]["exp_avg"].tolist() == [0.25]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_changes_nothing(bad):
    (a, b), adamw = optimizer([1.0], [2.0], learning_rate=0.1, warmup_steps=10)
    a.grad, b.grad = torch.tensor([1.0], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    adamw.step()
    before = [a.item(), b.item(), *(t.item() for kept in adamw.tensors().values() for t in kept.values())]
    a.grad, b.grad = torch.tensor([bad], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    norm, lr, skipped = adamw.step()
    assert skipped
    assert not math.isfinite(norm)
    assert lr == pytest.approx(0.02)
    assert [a.item(), b.item(), *(t.item() for kept in adamw.tensors().values() for t in kept.values())] == before
    assert a.grad is None
    assert (adamw.steps, adamw.skipped_in_a_row) == (1, 1)  # the schedule waits too


def test_too_many_skipped_steps_in_a_row_stop_the_run():
    (a,), adamw = optimizer([1.0], max_skipped_steps=1)
    for gradient in (math.nan, 1.0, math.nan):  # a good step in between starts the count again
        a.grad = torch.tensor([gradient], dtype=torch.float64)
        adamw.step()
    a.grad = torch.tensor([math.nan], dtype=torch.float64)
    with pytest.raises(TrainingError, match="2 optimizer steps in a row .*max_skipped_steps is 1"):
        adamw.step()
