"""AdamW with averages in 8 bits: near torch's AdamW, the same for any split of rows, and refused without torchao."""

import sys

import pytest
import torch
from torch import nn

from hybridrl.config import TrainingConfig
from hybridrl.errors import ConfigError
from hybridrl.workers.training.adamw_8bit import block_size
from hybridrl.workers.training.optimizer import Optimizer


def optimizer(parameters, name="adamw_8bit"):
    return Optimizer(parameters, TrainingConfig(optimizer=name, learning_rate=0.01, weight_decay=0.1,
                                                max_grad_norm=1e9), None)


def gradients(step):
    return torch.randn(96, 64, generator=torch.Generator().manual_seed(step))


def test_blocks_lie_within_rows():
    assert block_size(torch.Size((10, 1024))) == 256
    assert block_size(torch.Size((576, 576))) == 192
    assert block_size(torch.Size((4, 100, 64))) == 256  # experts: 6400 = 25 * 256
    assert block_size(torch.Size((2, 4099))) == 0  # prime
    assert block_size(torch.Size((4, 64))) == 0  # small
    assert block_size(torch.Size((100000,))) == 0  # rows of one element
    assert block_size(torch.Size(())) == 0


def test_without_torchao_the_extra_is_named(monkeypatch):
    for name in ("torchao", "torchao.optim", "torchao.optim.adam"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"adamw_8bit needs torchao; run pip install \"hybridrl\[adamw-8bit\]\""):
        optimizer([nn.Parameter(torch.zeros(3))])


def test_steps_are_near_those_of_adamw_with_a_quarter_of_the_memory():
    pytest.importorskip("torchao")
    ours, theirs = (nn.Parameter(torch.zeros(96, 64)) for _ in range(2))
    small, plain = optimizer([ours]), optimizer([theirs], "adamw")
    for step in range(5):
        ours.grad, theirs.grad = gradients(step), gradients(step)
        small.step()
        plain.step()
    assert (ours - theirs).abs().mean() < 0.05 * theirs.detach().abs().mean()
    assert not torch.equal(ours, theirs)
    assert small.held_bytes < 0.28 * plain.held_bytes


def test_a_split_of_rows_and_a_restart_change_nothing():
    pytest.importorskip("torchao")
    whole, part = nn.Parameter(torch.zeros(96, 64)), nn.Parameter(torch.zeros(64, 64))
    one, two = optimizer([whole]), optimizer([part])
    for step in range(3):
        whole.grad, part.grad = gradients(step), gradients(step)[:64]
        one.step()
        two.step()
    assert torch.equal(whole[:64], part)
    again = nn.Parameter(whole.detach().clone())
    resumed = optimizer([again])
    for name, tensor in resumed.tensors()[again].items():
        tensor.copy_(one.tensors()[whole][name])
    resumed.restore(one.steps, 0)
    whole.grad, again.grad = gradients(9), gradients(9)
    one.step()
    resumed.step()
    assert torch.equal(whole, again)
