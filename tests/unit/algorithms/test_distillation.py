"""The divergence from a teacher: by hand, against float64 autograd of the closed form, and against samples."""

import math

import pytest
import torch

from hybridrl.algorithms.algorithm import Algorithm
from hybridrl.algorithms.combined_loss import Loss
from hybridrl.algorithms.distillation import (
    DistillationLoss,
    check_distillation,
    distillation_metrics,
    rewards_alone,
    top_k_reverse_kl,
)
from hybridrl.algorithms.losses import POLICY_LOSSES
from hybridrl.algorithms.partials import finalize
from hybridrl.batch import make_batch
from hybridrl.config import AlgorithmConfig, Choice, DistillOptionsConfig, KLConfig
from hybridrl.errors import BatchError, ConfigError

V = 7


def logits(seed, *shape, scale=2.0):
    return scale * torch.randn(*shape, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def at_top(student, teacher, k):
    """Log-probs of both at the teacher's k likeliest tokens."""
    ids = teacher.topk(k, dim=-1).indices
    return [torch.log_softmax(x, dim=-1).gather(-1, ids) for x in (student, teacher)]


def test_one_token_by_hand():
    """p = 1/2, 1/4, 1/4 and q = 1/2, 3/8, 1/8; two tokens of three are likeliest."""
    policy, teacher = torch.tensor([[[0.5, 0.25]]]).log(), torch.tensor([[[0.5, 0.375]]]).log()
    result = top_k_reverse_kl(policy, teacher, torch.tensor([[True]]))
    expected = 0.25 * math.log(0.25 / 0.375) + 0.25 * math.log(0.25 / 0.125)
    assert result.loss.item() == pytest.approx(expected, rel=1e-6)
    metrics = finalize(result.metrics)
    assert metrics == pytest.approx({"top_k_kl": expected, "top_k_mass": 0.75, "nonfinite_frac": 0})


@pytest.mark.parametrize("k", [1, 3, V])
def test_value_and_gradient_are_those_of_the_closed_form(k):
    """KL between the distributions over k tokens and the rest; with all tokens the whole divergence."""
    student, teacher = logits(1, 3, 4).requires_grad_(), logits(2, 3, 4)
    mask = torch.rand(3, 4, generator=torch.Generator().manual_seed(3)) < 0.7
    loss = top_k_reverse_kl(*at_top(student, teacher, k), mask).loss
    p, q = student.softmax(-1), teacher.softmax(-1)
    ids = teacher.topk(k, dim=-1).indices
    p_k, q_k = (x.gather(-1, ids) for x in (p, q))
    expected = (p_k * (p_k / q_k).log()).sum(-1)
    if k < V:
        p_0, q_0 = (x.scatter(-1, ids, 0.0).sum(-1) for x in (p, q))
        expected = expected + p_0 * (p_0 / q_0).log()
    torch.testing.assert_close(loss, expected.where(mask, 0.0), rtol=1e-9, atol=1e-12)
    (mine,) = torch.autograd.grad(loss.sum(), student, retain_graph=True)
    (theirs,) = torch.autograd.grad(expected.where(mask, 0.0).sum(), student)
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


def test_more_tokens_see_more_of_the_divergence():
    student, teacher = logits(1, 50, 1), logits(2, 50, 1)
    mask = torch.ones(50, 1, dtype=torch.bool)
    values = [top_k_reverse_kl(*at_top(student, teacher, k), mask).loss for k in range(1, V + 1)]
    for less, more in zip(values, values[1:], strict=False):
        assert (less <= more + 1e-9).all() and (less >= 0).all()
    same = top_k_reverse_kl(*at_top(teacher, teacher, 3), mask).loss
    torch.testing.assert_close(same, torch.zeros_like(same), rtol=0, atol=1e-12)


def test_the_sampled_form_has_this_gradient_on_average():
    """E[(log p - log q) grad log p] over the policy's own samples, summed over the vocabulary."""
    student, teacher = logits(4).requires_grad_(), logits(5)
    log_p, log_q = (torch.log_softmax(x, dim=-1) for x in (student, teacher))
    advantages = (log_q - log_p).detach()  # what the advantage `distill` gives each token
    expected = torch.zeros(V, dtype=torch.float64)
    for token in range(V):
        (grad,) = torch.autograd.grad(-advantages[token] * log_p[token], student, retain_graph=True)
        expected += float(log_p[token].detach().exp()) * grad
    everything = top_k_reverse_kl(log_p[None, None], log_q[None, None], torch.tensor([[True]])).loss.sum()
    (mine,) = torch.autograd.grad(everything, student)
    torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_and_unusable_tokens(garbage):
    """Neither value nor gradient sees them; a token in the loss that is not finite has none and is counted."""
    student, teacher = logits(1, 1, 4), logits(2, 1, 4)
    policy, reference = (x.float() for x in at_top(student, teacher, 3))
    mask = torch.tensor([[True, True, False, True]])
    clean = top_k_reverse_kl(policy, reference, mask).loss
    policy[0, 2, 1] = reference[0, 2, 0] = garbage
    reference[0, 3, 2] = garbage
    policy.requires_grad_()
    result = top_k_reverse_kl(policy, reference, mask)
    result.loss.sum().backward()
    assert torch.equal(result.loss[0, :2], clean[0, :2]) and result.loss[0, 2:].tolist() == [0, 0]
    assert policy.grad.isfinite().all() and not policy.grad[0, 2:].any() and policy.grad[0, :2].all()
    assert finalize(result.metrics)["nonfinite_frac"] == pytest.approx(1 / 3)


def test_sharp_distributions_stay_finite_in_float32():
    policy, teacher = torch.tensor([[[0.0, -90.0]]], requires_grad=True), torch.tensor([[[-30.0, -1e-7]]])
    loss = top_k_reverse_kl(policy, teacher, torch.tensor([[True]])).loss
    loss.sum().backward()
    assert loss.item() == pytest.approx(30, rel=1e-4) and policy.grad.isfinite().all()


def test_shapes_are_checked():
    policy = torch.zeros(2, 3, 4)
    with pytest.raises(BatchError, match=r"must be \[B, R, K\] and mask \[B, R\] of bool"):
        top_k_reverse_kl(policy, policy[..., :3], torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(BatchError, match="of torch.float32"):
        top_k_reverse_kl(policy, policy, torch.ones(2, 3))


def columns_of(rows=2, width=3, k=2):
    student, teacher = logits(1, rows, width), logits(2, rows, width)
    policy, reference = (x.float() for x in at_top(student, teacher, k))
    mask = torch.tensor([[True, True, True], [True, False, False]])
    old = torch.full((rows, width), -1.0)
    return old.clone().requires_grad_(), {
        "response_mask": mask, "old_log_probs": old, "advantages": torch.tensor([[1.0, 1, 1], [-2, 0, 0]]),
        "loss_weights": mask / 4, "teacher_top_log_probs": reference,
        "candidate_log_probs": policy.requires_grad_()}


def test_the_loss_adds_the_divergence_to_that_of_the_rewards():
    log_probs, columns = columns_of()
    inner = Loss(POLICY_LOSSES["ppo_clip"], {})
    loss, metrics = DistillationLoss(inner, weight=0.5)(log_probs, columns, None)
    alone, _ = inner(log_probs, columns, None)
    kl = top_k_reverse_kl(columns["candidate_log_probs"], columns["teacher_top_log_probs"], columns["response_mask"])
    assert alone.item() == pytest.approx(-0.25), "ratios are 1: minus the mean advantage"
    assert loss.item() == pytest.approx(-0.25 + 0.5 * kl.loss.sum().item() / 4)
    assert finalize(metrics)["distill/top_k_kl"] == pytest.approx(kl.loss.sum().item() / 4)
    assert DistillationLoss(inner).candidates == "teacher_top_ids" and not DistillationLoss(inner).needs_entropies
    assert DistillationLoss(Loss(POLICY_LOSSES["ppo_clip"], {}, entropy_coefficient=0.1)).needs_entropies


def batch():
    return make_batch(
        prompt_ids=[[1], [1]], response_ids=[[2, 3], [4]], response_mask=[[True, True], [True]],
        rollout_log_probs=[[-1.0, -2.0], [-3.0]], old_log_probs=[[-1.0, -2.0], [-3.0]],
        teacher_log_probs=[[-0.5, -4.0], [-3.0]], rewards=[1.0, 0.5], group_ids=[0, 0], finish_reason=["stop"] * 2)


def algorithm(name="distill", **options):
    cfg = AlgorithmConfig(advantage=Choice(name=name, options=options), responses_per_prompt=2)
    return Algorithm(cfg, 8, columns=["teacher_log_probs"])


def test_advantages_with_and_without_the_teacher():
    ours = algorithm(reward_coef=2.0)
    assert ours.advantages(ours.shape(batch())).values().tolist() == [2.5, 0, 1]
    assert ours.advantages(rewards_alone(ours.shape(batch()))).values().tolist() == [2, 2, 1]
    assert distillation_metrics(batch()) == pytest.approx({"distill/kl": (-0.5 + 2 + 0) / 3})


def test_combinations_that_cannot_work():
    check_distillation(DistillOptionsConfig(), algorithm(), [])
    check_distillation(DistillOptionsConfig(loss="top_k"), algorithm("grpo"), ["exact"])
    with pytest.raises(ConfigError, match="must be distill with distill.loss=sampled, got 'grpo'"):
        check_distillation(DistillOptionsConfig(), algorithm("grpo"), ["exact"])
    with pytest.raises(ConfigError, match="distill reads rewards, which need an entry of reward.functions"):
        check_distillation(DistillOptionsConfig(), algorithm(reward_coef=1.0), [])
    with pytest.raises(ConfigError, match="grpo reads rewards"):
        check_distillation(DistillOptionsConfig(loss="top_k"), algorithm("grpo"), [])
    with pytest.raises(ConfigError, match="needs a reference or greedy responses"):
        cfg = AlgorithmConfig(advantage=Choice(name="distill"), kl=KLConfig(coefficient=0.1))
        check_distillation(DistillOptionsConfig(), Algorithm(cfg, 8, columns=["teacher_log_probs"]), [])
    with pytest.raises(ConfigError, match=r"distill\.weight must be 1 with loss=sampled"):
        DistillOptionsConfig(weight=0.5).validate()
