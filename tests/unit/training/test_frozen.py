"""Frozen models on the training engine: likeliest tokens of a teacher, scores of a classifier; losses of candidates."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hybridrl.algorithms.partials import Mean
from hybridrl.batch import from_lengths, lengths, make_batch, rows_of, select
from hybridrl.config import ModelConfig, TrainingConfig
from hybridrl.errors import ModelError
from hybridrl.workers.training.engine import TrainingEngine
from hybridrl.workers.training.frozen import ClassifierModel, TeacherModel
from tests.models import KINDS
from tests.unit.training.reference import plain_model, random_batch

pytestmark = pytest.mark.usefixtures("one_rank")
CPU = torch.device("cpu")


def frozen(path, module, **options):
    return TrainingEngine(ModelConfig(path=str(path)), TrainingConfig(**options), CPU, trainable=False,
                          dtype=torch.float64, module=module)


def plain_rows(model, batch, temperature):
    """Log-probs [R, V] of every token in each row's places."""
    for prompt, response in zip(rows_of(batch["prompt_ids"]), rows_of(batch["response_ids"]), strict=True):
        logits = model(torch.cat([prompt, response])[None]).logits[0] / temperature
        yield torch.log_softmax(logits, dim=-1)[len(prompt) - 1:len(prompt) + len(response) - 1]


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_moe"])
def test_a_teacher_gives_its_likeliest_tokens(folder, kind):
    batch, teacher = random_batch(), frozen(folder(kind), TeacherModel, micro_batch_tokens=30, logits_chunk_tokens=4)
    teacher.model.top_k, teacher.model.vocabulary = 5, 40
    found = {name: rows_of(column) for name, column in teacher.top_log_probs(batch, 0.8).items()}
    rows = zip(plain_rows(plain_model(folder(kind)), batch, 0.8), rows_of(batch["response_ids"]), strict=True)
    for i, (every, response) in enumerate(rows):
        torch.testing.assert_close(found["log_probs"][i], every.gather(1, response[:, None])[:, 0].detach())
        assert torch.equal(found["top_ids"][i], every[:, :40].argsort(descending=True)[:, :5])
        torch.testing.assert_close(found["top_log_probs"][i], every.detach().gather(1, found["top_ids"][i]))
    assert found["top_ids"][0].shape == (0, 5), "a row without a response"
    nothing = teacher.top_log_probs(select(batch, [0]), 0.8)
    assert nothing["top_ids"].values().shape == (0, 5) and nothing["top_ids"].dtype == torch.int64


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama_tied"])
def test_scores_are_those_of_transformers_on_padded_texts(folder, tmp_path, kind):
    path = folder(kind, classifier=True)
    sizes = [3, 11, 1, 7, 20]
    texts = [torch.randint(2, 60, (n,), generator=torch.Generator().manual_seed(n)) for n in sizes]
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=0)
    plain = AutoModelForSequenceClassification.from_pretrained(
        path, dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager").eval()
    expected = plain(padded, attention_mask=padded != 0).logits[:, 0].detach()
    ours = frozen(path, ClassifierModel, micro_batch_tokens=25)
    scores = ours.values(make_batch(prompt_ids=texts, response_ids=[[0]] * len(texts)))
    torch.testing.assert_close(scores.values(), expected, rtol=0, atol=1e-10)
    assert expected.std() > 1e-2


def test_what_is_no_classifier_of_one_label_is_refused(folder):
    with pytest.raises(ModelError, match="lacks weights that its config asks for: score.weight"):
        frozen(folder("llama"), ClassifierModel)
    with pytest.raises(ModelError, match="no linear layer `score` with one output"):
        frozen(folder("llama", classifier=True, num_labels=3), ClassifierModel)


class OfCandidates:
    """Sum over the candidates of weight * log-prob, minus the sampled token's log-prob."""

    candidates = "others"

    def __call__(self, log_probs, columns, entropies):
        loss = (columns["candidate_log_probs"] * columns["weights"]).sum() - log_probs.sum()
        seen = columns["candidate_log_probs"].detach()
        return loss, {"candidates": Mean(seen.sum(), (seen != 0).sum())}


@pytest.mark.parametrize("budget", [20, 1000])
def test_a_loss_of_candidates_trains_as_a_plain_one(folder, budget):
    batch = random_batch()
    sizes, g = lengths(batch["response_ids"]), torch.Generator().manual_seed(9)
    total = int(sizes.sum())
    batch["others"] = from_lengths(torch.randint(0, 64, (total, 3), generator=g), sizes)
    batch["weights"] = from_lengths(torch.randn(total, 3, generator=g, dtype=torch.float64), sizes)
    ours = TrainingEngine(ModelConfig(path=str(folder())), TrainingConfig(
        learning_rate=1e-2, max_grad_norm=1e9, micro_batch_tokens=budget, logits_chunk_tokens=4), CPU,
        dtype=torch.float64)
    model = plain_model(folder())
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(2):
        metrics = ours.update(batch, OfCandidates(), 0.7, candidates="others")
        loss, seen = 0, 0
        columns = [rows_of(batch[name]) for name in ("response_ids", "others", "weights")]
        for every, response, others, weights in zip(plain_rows(model, batch, 0.7), *columns, strict=True):
            loss = loss + (every.gather(1, others) * weights).sum() - every.gather(1, response[:, None]).sum()
            seen += float(every.detach().gather(1, others).sum())
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-9)
        assert metrics["candidates"] == pytest.approx(seen / (3 * total), rel=1e-9)
    for name, weight in ours.weights():
        torch.testing.assert_close(weight.full_tensor(), model.get_parameter(name).detach(), rtol=0, atol=1e-7)
