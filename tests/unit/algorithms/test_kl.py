"""KL estimators against exact enumeration over a small vocabulary, and the coefficient controllers."""

import pytest
import torch

from hybridrl.algorithms import KL_ESTIMATORS, AdaptiveKL, FixedKL, batch_kl, k3_capped, token_kl
from hybridrl.errors import BatchError, ConfigError

VOCABULARY = 6
ON = torch.ones(1, VOCABULARY, dtype=torch.bool)


def distributions(seed=0):
    """Logits that carry gradient, and log-probs of a reference and of an old policy."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCABULARY, generator=g, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(VOCABULARY, generator=g, dtype=torch.float64).log_softmax(0)
    old = (logits.detach() + 0.3 * torch.randn(VOCABULARY, generator=g, dtype=torch.float64)).log_softmax(0)
    return logits, ref, old


def expected_value_and_gradient(name, sampled_from, logits, ref, old):
    """Exact expectation over the vocabulary of the estimator and of its gradient; sampling is constant."""
    lp = logits.log_softmax(0)
    values = token_kl(name, lp[None], ref[None], ON, old_log_probs=old[None])[0]
    expectation = (sampled_from.exp().detach() * values).sum()
    return expectation.detach(), torch.autograd.grad(expectation, logits)[0]


def exact(logits, ref, forward=False):
    lp = logits.log_softmax(0)
    kl = (ref.exp() * (ref - lp)).sum() if forward else (lp.exp() * (lp - ref)).sum()
    return kl.detach(), torch.autograd.grad(kl, logits)[0]


@pytest.mark.parametrize("name", ["k1", "k3", "k1+", "k3+"])
def test_unbiased_values(name):
    logits, ref, old = distributions()
    value, _ = expected_value_and_gradient(name, logits.log_softmax(0), logits, ref, old)
    torch.testing.assert_close(value, exact(logits, ref)[0])


@pytest.mark.parametrize("name", ["k2", "k1+", "k2+", "k3+", "abs+"])
def test_exact_gradients_on_policy(name):
    logits, ref, old = distributions(1)
    _, gradient = expected_value_and_gradient(name, logits.log_softmax(0), logits, ref, old)
    torch.testing.assert_close(gradient, exact(logits, ref)[1])


def test_rho_k3_is_exact_off_policy():
    logits, ref, old = distributions(2)
    value, gradient = expected_value_and_gradient("rho_k3", old, logits, ref, old)
    kl, kl_gradient = exact(logits, ref)
    torch.testing.assert_close(value, kl)
    torch.testing.assert_close(gradient, kl_gradient)


def test_k1_has_no_expected_gradient():
    logits, ref, old = distributions(3)
    _, gradient = expected_value_and_gradient("k1", logits.log_softmax(0), logits, ref, old)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


def test_k3_follows_the_forward_divergence():
    logits, ref, old = distributions(4)
    _, gradient = expected_value_and_gradient("k3", logits.log_softmax(0), logits, ref, old)
    torch.testing.assert_close(gradient, exact(logits, ref, forward=True)[1])


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3", "rho_k3"])
def test_gradients_by_finite_differences(name):
    g = torch.Generator().manual_seed(5)
    lp, ref, old = (torch.randn(2, 3, generator=g, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([[True, True, False], [True, False, True]])
    assert torch.autograd.gradcheck(lambda x: token_kl(name, x, ref, mask, old), lp.requires_grad_())


def test_plus_variants_report_the_plain_value_and_the_gradient_of_k2():
    lp = torch.tensor([[-0.2, -3.0]], dtype=torch.float64, requires_grad=True)
    ref, mask = torch.tensor([[-1.0, -0.5]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    for name in ("k1", "abs", "k2", "k3"):
        got = token_kl(name + "+", lp, ref, mask)
        assert torch.equal(got.detach(), token_kl(name, lp, ref, mask).detach())
        torch.testing.assert_close(torch.autograd.grad(got.sum(), lp)[0], (lp - ref).detach())


def test_k3_is_capped_and_the_others_are_not():
    lp = torch.tensor([[-30.0, -1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    ref, mask = torch.tensor([[0.0, -1.0, -30.0]], dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool)
    got = token_kl("k3", lp, ref, mask)
    assert got.tolist() == [[10, 0, 10]]
    assert torch.autograd.grad(got.sum(), lp)[0].tolist() == [[0, 0, 0]]
    assert k3_capped(lp, ref, mask).tolist() == [[True, False, True]]
    assert token_kl("k1", lp, ref, mask).tolist() == [[-30, 0, 30]]
    assert token_kl("k2", lp, ref, mask).tolist() == [[450, 0, 450]]


def test_k3_of_tiny_differences_in_float32():
    ref = torch.tensor([[-1.0]])
    lp = ref + 1e-4
    d = (lp - ref).double()
    got = token_kl("k3", lp, ref, torch.ones(1, 1, dtype=torch.bool)).double()
    torch.testing.assert_close(got, torch.expm1(-d) + d, rtol=1e-5, atol=0)


def test_batch_kl_is_a_mean_of_row_means():
    old, ref = torch.tensor([[-1.0, -1.0], [-1.0, 0.0], [0.0, 0.0]]), torch.full((3, 2), -2.0)
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    ref[0, 1] = -4.0
    assert batch_kl(old, ref, mask) == pytest.approx((2.0 + 1.0) / 2)


def test_batch_kl_of_differences_that_cancel():
    """10.3 - 0.1 rounds in float32, and 10.2 is about as much below: what is left is another mean."""
    old, ref = torch.tensor([[-0.1, -10.2]]), torch.tensor([[-10.3, 0.0]])
    expected = float((old.double() - ref.double()).mean())
    assert float((old - ref).mean()) != pytest.approx(expected, rel=0.1)
    assert batch_kl(old, ref, torch.ones(1, 2, dtype=torch.bool)) == pytest.approx(expected, rel=1e-9)


def test_controllers():
    fixed = FixedKL(0.1)
    assert fixed.update(100.0, 64) == 0.1
    adaptive = AdaptiveKL(0.1, target=2.0, horizon=100.0)
    assert adaptive.update(20.0, 10) == pytest.approx(0.1 * 1.02)  # the error is clipped at 0.2
    assert adaptive.update(2.0, 10) == pytest.approx(0.102)
    copy = AdaptiveKL(9.0, target=2.0)
    copy.load_state_dict(adaptive.state_dict())
    assert copy.kl_coef == adaptive.kl_coef
    with pytest.raises(ConfigError, match="target"):
        AdaptiveKL(0.1, target=0.0)
    with pytest.raises(ConfigError, match="kl_coef"):
        FixedKL(-1.0)


def test_missing_old_log_probs():
    x, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(BatchError, match="old_log_probs"):
        token_kl("rho_k3", x, x, mask)
    assert "rho_k3" in KL_ESTIMATORS
