"""Muon against torch's own, against singular values, and by hand."""

import pytest
import torch
from torch import nn

from hybridrl.config import TrainingConfig
from hybridrl.errors import ConfigError
from hybridrl.workers.training.muon import newton_schulz
from hybridrl.workers.training.optimizer import Optimizer


def matrices(*shapes, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=g, dtype=dtype)) for shape in shapes]


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (16, 16), (1, 5)])
def test_singular_values_go_to_one_and_singular_vectors_stay(shape):
    (matrix,) = matrices(shape, dtype=torch.float64)
    u, s, vh = torch.linalg.svd(matrix.detach(), full_matrices=False)
    inside = u.T @ newton_schulz(matrix.detach()) @ vh.T
    x = s / s.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    torch.testing.assert_close(inside, torch.diag(x), rtol=0, atol=1e-9)
    assert x.min() > 0.3 and x.max() < 1.3
    assert newton_schulz(torch.zeros(shape)).count_nonzero() == 0


def test_steps_are_those_of_torch():
    """torch orthogonalises in bfloat16, this one in the weights' dtype."""
    ours, theirs = matrices((24, 40), (40, 8)), matrices((24, 40), (40, 8))
    muon = Optimizer(ours, TrainingConfig(optimizer="muon", learning_rate=0.1, weight_decay=0.5, max_grad_norm=1e9,
                                          muon_momentum=0.9), None, ours)
    other = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.5, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    g = torch.Generator().manual_seed(1)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=g)
            b.grad = a.grad.clone()
        muon.step()
        other.step()
    for a, b in zip(ours, theirs, strict=True):
        moved = (b.detach() - matrices((24, 40), (40, 8))[0 if b.shape[0] == 24 else 1]).abs().mean()
        torch.testing.assert_close(a, b, rtol=0, atol=0.05 * moved.item() + 0.02)
        torch.testing.assert_close(muon.tensors()[a]["momentum"], other.state[b]["momentum_buffer"])


def test_the_rest_is_for_adamw_and_both_follow_the_schedule():
    (matrix,), (vector,) = matrices((4, 4)), matrices((3,))
    muon = Optimizer([matrix, vector], TrainingConfig(optimizer="muon", learning_rate=0.1, warmup_steps=2), None,
                     [matrix])
    before = vector.detach().clone()
    matrix.grad, vector.grad = torch.zeros(4, 4), torch.tensor([0.1, -0.2, 0.3])
    muon.step()
    torch.testing.assert_close(vector.detach(), before - 0.05 * torch.tensor([1.0, -1, 1]), rtol=0, atol=1e-5)
    assert {name for kept in muon.tensors().values() for name in kept} == {"momentum", "exp_avg", "exp_avg_sq"}
    assert [o.param_groups[0]["lr"] for o in muon.optimizers] == [0.05, 0.05]


def test_a_model_without_matrices_is_refused():
    vectors = matrices((3,))
    with pytest.raises(ConfigError, match="optimizer=muon needs a model with matrices"):
        Optimizer(vectors, TrainingConfig(optimizer="muon"), None)
