"""The teacher on one rank, and an update that learns from it: against the plain way in float64."""

import math

import pytest
import torch

from hybridrl.algorithms.combined_loss import Loss
from hybridrl.algorithms.distillation import DistillationLoss
from hybridrl.algorithms.losses import POLICY_LOSSES
from hybridrl.batch import from_lengths, lengths, make_batch, rows_of
from hybridrl.config import DistillOptionsConfig, ModelConfig, TeacherConfig, TrainingConfig
from hybridrl.errors import ConfigError, ModelError
from hybridrl.models import check_same_vocabulary, load_tokenizer
from hybridrl.workers.base import WorkerContext
from hybridrl.workers.teacher import TeacherWorker
from hybridrl.workers.training.engine import TrainingEngine
from tests.models import tiny_model
from tests.unit.training.reference import plain_model, random_batch

pytestmark = pytest.mark.usefixtures("one_rank")
CPU = torch.device("cpu")


def teacher(path, policy, **options):
    return TeacherWorker(WorkerContext(0, 1, CPU, "teacher"), TeacherConfig(
        model=ModelConfig(path=str(path)), micro_batch_tokens=40, logits_chunk_tokens=8),
        DistillOptionsConfig(**options), ModelConfig(path=str(policy)))


def every_log_prob(model, batch, temperature=1.0):
    """[R, V] of each row."""
    for prompt, response in zip(rows_of(batch["prompt_ids"]), rows_of(batch["response_ids"]), strict=True):
        logits = model(torch.cat([prompt, response])[None]).logits[0] / temperature
        yield torch.log_softmax(logits, dim=-1)[len(prompt) - 1:len(prompt) + len(response) - 1]


def test_what_a_teacher_writes(folder):
    ours, batch = teacher(folder("llama_tied"), folder("llama")), random_batch()
    written = ours.log_probs(batch.copy())
    assert set(written.keys()) - set(batch.keys()) == {"teacher_log_probs"}
    rows = list(every_log_prob(plain_model(folder("llama_tied")), batch))
    for found, every, response in zip(rows_of(written["teacher_log_probs"]), rows, rows_of(batch["response_ids"]),
                                      strict=True):
        torch.testing.assert_close(found.double(), every.detach().gather(1, response[:, None])[:, 0], rtol=0, atol=1e-4)


def test_a_teacher_with_a_temperature_and_likeliest_tokens(folder):
    ours, batch = teacher(folder("llama_tied"), folder("llama"), loss="top_k", top_k=4, teacher_temperature=0.5), (
        random_batch())
    written = ours.log_probs(batch.copy())
    columns = [rows_of(written[name]) for name in ("teacher_log_probs", "teacher_top_ids", "teacher_top_log_probs")]
    rows = every_log_prob(plain_model(folder("llama_tied")), batch, 0.5)
    for sampled, ids, log_probs, every, response in zip(*columns, rows, rows_of(batch["response_ids"]), strict=True):
        assert ids.shape == log_probs.shape == (len(response), 4)
        expected = every.detach().gather(1, response[:, None])[:, 0]
        torch.testing.assert_close(sampled.double(), expected, rtol=0, atol=1e-4)
        assert torch.equal(ids, every.topk(4).indices)
        torch.testing.assert_close(log_probs.double(), every.detach().topk(4).values, rtol=0, atol=1e-4)


def test_heads_of_different_sizes(folder, tmp_path):
    """What only the teacher has is no target; what only the policy has, it gives probability 0."""
    larger = tiny_model(tmp_path / "larger", vocab_size=80, seed=1)
    with torch.no_grad():
        ours = teacher(larger, folder("llama"), loss="top_k", top_k=64)
        assert int(ours.log_probs(random_batch())["teacher_top_ids"].values().max()) == 63
        ours = teacher(folder("llama"), larger, loss="top_k", top_k=4)
    batch = make_batch(prompt_ids=[[5, 6]], response_ids=[[7, 70, 8]])
    found = ours.log_probs(batch)["teacher_log_probs"].values()
    assert found[1] == -math.inf and found[[0, 2]].isfinite().all() and batch["response_ids"].values()[1] == 70


def test_teachers_that_do_not_fit(folder, tmp_path):
    with pytest.raises(ConfigError, match="distill.top_k must be at most the 64 tokens of the vocabulary, got 65"):
        teacher(folder("llama_tied"), folder("llama"), loss="top_k", top_k=65)
    other = tiny_model(tmp_path / "other")
    tokenizer = load_tokenizer(ModelConfig(path=str(other)))
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ModelError, match=r"different vocabularies \(52 and 53 tokens\): '<think>' has id none in one"):
        teacher(other, folder("llama"))
    mine = load_tokenizer(ModelConfig(path=str(folder("llama"))))
    check_same_vocabulary(mine, load_tokenizer(ModelConfig(path=str(folder("llama_tied")))))


@pytest.mark.parametrize("k", [3, 64])
def test_an_update_follows_the_gradient_of_the_divergence(folder, k):
    """Two steps of AdamW on the mean over tokens of KL(policy || teacher), all of it plain autograd in float64."""
    batch, sizes = random_batch(), lengths(random_batch()["response_ids"])
    total = int(sizes.sum())
    rows = [every.detach() for every in every_log_prob(plain_model(folder("llama_tied")), batch)]
    everywhere = torch.cat(rows)
    top = everywhere.topk(k, dim=-1)
    batch["teacher_top_ids"] = from_lengths(top.indices, sizes)
    batch["teacher_top_log_probs"] = from_lengths(top.values, sizes)
    batch["response_mask"] = from_lengths(torch.ones(total, dtype=torch.bool), sizes)
    batch["advantages"] = from_lengths(torch.zeros(total), sizes)  # no rewards
    batch["loss_weights"] = from_lengths(torch.full((total,), 1 / total, dtype=torch.float64), sizes)
    loss = DistillationLoss(Loss(POLICY_LOSSES["ppo_clip"], {}))
    ours = TrainingEngine(ModelConfig(path=str(folder("llama"))), TrainingConfig(
        learning_rate=1e-2, max_grad_norm=1e9, micro_batch_tokens=30, logits_chunk_tokens=5), CPU, dtype=torch.float64)
    model = plain_model(folder("llama"))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(2):
        metrics = ours.update(batch, loss, candidates=loss.candidates)
        p = torch.cat([every.exp() for every in every_log_prob(model, batch)])
        p_k, q_k = p.gather(1, top.indices), top.values.exp()
        kl = (p_k * (p_k / q_k).log()).sum(-1)
        if k < 64:
            p_0, q_0 = p.scatter(1, top.indices, 0.0).sum(-1), 1 - q_k.sum(-1)
            kl = kl + p_0 * (p_0 / q_0).log()
        adamw.zero_grad()
        kl.mean().backward()
        adamw.step()
        assert [metrics["loss"], metrics["distill/top_k_kl"]] == pytest.approx([kl.mean().item()] * 2, rel=1e-6)
    for name, weight in ours.weights():
        torch.testing.assert_close(weight.full_tensor(), model.get_parameter(name).detach(), rtol=0, atol=1e-6)
