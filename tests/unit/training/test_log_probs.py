"""Chunked log-probs against log_softmax of all logits."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.workers.training.log_probs import token_log_probs, top_log_probs

N, H, V = 13, 6, 29


def inputs(n=N, bias=False, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (2 * torch.randn(V, H, generator=g, dtype=torch.float64)).to(dtype).requires_grad_()
    offset = torch.randn(V, generator=g, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    return hidden, weight, offset, torch.randint(0, V, (n,), generator=g)


def plain(hidden, weight, bias, targets, temperature):
    logits = hidden @ weight.T / temperature
    if bias is not None:
        logits = logits + bias / temperature
    log_probs = torch.log_softmax(logits, dim=-1)
    return log_probs[torch.arange(len(targets)), targets], -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropies", [False, True])
def test_values_and_gradients(chunk, temperature, bias, entropies):
    ours, theirs = inputs(bias=bias), inputs(bias=bias)
    log_probs, entropy = token_log_probs(*ours, temperature, chunk, entropies)
    expected, expected_entropy = plain(*theirs, temperature)
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-13)
    weights = torch.linspace(-1, 2, N, dtype=torch.float64)
    loss, expected_loss = (log_probs * weights).sum(), (expected * weights).sum()
    if entropies:
        torch.testing.assert_close(entropy, expected_entropy, rtol=0, atol=1e-13)
        loss, expected_loss = loss + entropy.square().sum(), expected_loss + expected_entropy.square().sum()
    else:
        assert entropy is None
    loss.backward()
    expected_loss.backward()
    for got, want in zip(ours[:3], theirs[:3], strict=True):
        if want is not None:
            torch.testing.assert_close(got.grad, want.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("entropies", [False, True])
def test_several_tokens_at_each_place(chunk, entropies):
    """Values and gradients at [N, K] targets; a token may be asked for twice."""
    ours, theirs = inputs(bias=True), inputs(bias=True)
    targets = torch.randint(0, V, (N, 4), generator=torch.Generator().manual_seed(3))
    targets[:, 1] = targets[:, 0]
    log_probs, entropy = token_log_probs(*ours[:3], targets, 0.7, chunk, entropies)
    every = torch.log_softmax((theirs[0] @ theirs[1].T + theirs[2]) / 0.7, dim=-1)
    torch.testing.assert_close(log_probs, every.gather(1, targets), rtol=0, atol=1e-13)
    weights = torch.linspace(-1, 2, 4 * N, dtype=torch.float64).view(N, 4)
    loss = (log_probs * weights).sum() + (entropy.square().sum() if entropies else 0)
    expected = (every.gather(1, targets) * weights).sum()
    if entropies:
        expected = expected + (every.exp() * every).sum(-1).square().sum()
    loss.backward()
    expected.backward()
    for got, want in zip(ours[:3], theirs[:3], strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_the_likeliest_tokens(chunk):
    hidden, weight, bias, targets = inputs(bias=True)
    log_probs, best, ids = top_log_probs(hidden, weight, bias, targets, 0.7, chunk, 3, 11)
    every = torch.log_softmax((hidden @ weight.T + bias) / 0.7, dim=-1)
    torch.testing.assert_close(log_probs, every.gather(1, targets[:, None])[:, 0], rtol=0, atol=1e-13)
    assert torch.equal(ids, every[:, :11].argsort(descending=True)[:, :3])
    torch.testing.assert_close(best, every.gather(1, ids), rtol=0, atol=1e-13)
    assert not best.requires_grad and best.sum() > every.sort(descending=True)[0][:, 3:6].sum()


def test_by_hand():
    # logits 0 and ln 3: probabilities 1/4 and 3/4
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [torch.tensor(3.0).log()]])
    log_probs, entropy = token_log_probs(hidden, weight, None, torch.tensor([1]), 1.0, 8, True)
    assert log_probs.item() == pytest.approx(-0.2876821, abs=1e-6)  # ln 3/4
    assert entropy.item() == pytest.approx(0.5623351, abs=1e-6)  # -(1/4 ln 1/4 + 3/4 ln 3/4)


def test_no_tokens():
    hidden, weight, _, targets = inputs(n=0)
    log_probs, entropy = token_log_probs(hidden, weight, None, targets, 1.0, 4, True)
    assert log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_a_second_backward_pass_gives_the_same_gradient():
    hidden, weight, _, targets = inputs()
    log_probs, _ = token_log_probs(hidden, weight, None, targets, 1.0, 4)
    first = torch.autograd.grad(log_probs.sum(), (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(log_probs.sum(), (hidden, weight))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_large_logits_do_not_overflow():
    hidden, weight = torch.tensor([[1000.0]]), torch.tensor([[1.0], [-1.0]])
    log_probs, entropy = token_log_probs(hidden.requires_grad_(), weight, None, torch.tensor([0]), 1.0, 8, True)
    assert log_probs.item() == 0
    assert entropy.item() == 0
    (log_probs + entropy).sum().backward()
    assert hidden.grad.isfinite().all()


def test_bfloat16_sums_in_float32():
    ours, theirs = inputs(dtype=torch.bfloat16), inputs(dtype=torch.bfloat16)
    log_probs, _ = token_log_probs(*ours, 1.0, 4)
    assert log_probs.dtype == torch.float32
    exact = [x.double().detach().requires_grad_() if x is not None and x.is_floating_point() else x for x in theirs]
    expected, _ = plain(*exact, 1.0)
    # logits up to about 15 carry 8 bits: off by up to 2**-5 each
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=0.1)
    log_probs.sum().backward()
    expected.sum().backward()
    for got, want in zip(ours[:2], exact[:2], strict=True):
        assert got.grad.dtype == torch.bfloat16
        assert (got.grad.double() - want.grad).norm() < 0.02 * want.grad.norm()


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned, among those with a vocabulary dimension last."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[-1] == V:
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("entropies", [False, True])
def test_no_pass_holds_logits_of_more_than_a_chunk(entropies):
    hidden, weight, _, targets = inputs(n=40)
    with LargestTensor() as seen:
        log_probs, entropy = token_log_probs(hidden, weight, None, targets, 0.9, 8, entropies)
        (log_probs.sum() + (entropy.sum() if entropies else 0)).backward()
    assert 0 < seen.largest <= 8 * V


def test_neither_do_the_likeliest_tokens():
    hidden, weight, _, targets = inputs(n=40)
    with LargestTensor() as seen:
        top_log_probs(hidden, weight, None, targets, 0.9, 8, 3)
        token_log_probs(hidden, weight, None, targets[:, None].expand(-1, 3), 0.9, 8)[0].sum().backward()
    assert 0 < seen.largest <= 8 * V
