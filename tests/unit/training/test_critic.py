"""The critic on one rank: values and updates against the plain way, the loss by hand, checkpoints."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl.algorithms.algorithm import padded_columns
from hybridrl.algorithms.partials import finalize
from hybridrl.algorithms.values import ValueLoss, explained_variance
from hybridrl.batch import from_lengths, lengths, make_batch, put, rows_of, select
from hybridrl.config import ModelConfig, TrainingConfig
from hybridrl.errors import BatchError, CheckpointError, ModelError
from hybridrl.workers.base import WorkerContext
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.training.engine import TrainingEngine
from hybridrl.workers.training.models import ValueModel
from tests.models import KINDS
from tests.unit.training.reference import plain_model, random_batch

pytestmark = pytest.mark.usefixtures("one_rank")
CPU = torch.device("cpu")


def engine(path, dtype=torch.float64, **options):
    options = {"learning_rate": 1e-2, "max_grad_norm": 1e9} | options
    return TrainingEngine(ModelConfig(path=str(path)), TrainingConfig(**options), CPU, dtype=dtype, module=ValueModel)


def critic(path, **options):
    options = {"learning_rate": 1e-2} | options
    return CriticWorker(WorkerContext(0, 1, CPU, "critic"), ModelConfig(path=str(path)), TrainingConfig(**options))


def random_head(size=64, seed=5):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def set_head(ours, weight):
    with torch.no_grad():
        ours.model.causal_lm.get_output_embeddings().weight.copy_(weight)


def plain_values(body, head, batch):
    """One row at a time: the state before response token t is everything up to token t - 1."""
    rows = []
    for prompt, response in zip(rows_of(batch["prompt_ids"]), rows_of(batch["response_ids"]), strict=True):
        hidden = body(torch.cat([prompt, response])[None]).last_hidden_state[0]
        rows.append(hidden[len(prompt) - 1:len(prompt) + len(response) - 1] @ head)
    return rows


def with_targets(batch, seed=1):
    """Old values, returns, a mask with holes, and coefficients for its tokens."""
    g, sizes = torch.Generator().manual_seed(seed), lengths(batch["response_ids"])
    total = int(sizes.sum())
    mask = torch.rand(total, generator=g) < 0.8
    columns = {"values": torch.randn(total, generator=g), "returns": torch.randn(total, generator=g),
               "response_mask": mask, "loss_weights": mask.double() / mask.sum()}
    columns["returns"][~mask] = torch.nan  # what is masked must not matter
    for name, column in columns.items():
        batch[name] = from_lengths(column, sizes)
    return batch


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_moe"])
def test_a_cut_response_can_end_with_the_value_of_what_was_written(folder, kind):
    """That value is the one before a next token, whatever it is."""
    worker, batch = critic(folder(kind)), random_batch()
    set_head(worker.training, random_head())
    sizes = lengths(batch["response_ids"]).tolist()
    put(batch, "finish_reason", ["length" if i % 2 else "stop" for i in range(len(sizes))])
    found, plain = worker.values(select(batch, slice(None)), bootstrap=True), worker.values(select(batch, slice(None)))
    torch.testing.assert_close(found["values"].values(), plain["values"].values(), rtol=0, atol=1e-5)
    assert "bootstrap_values" not in plain.keys()
    model = plain_model(folder(kind)).base_model
    texts = zip(rows_of(batch["prompt_ids"]), rows_of(batch["response_ids"]), strict=True)
    for i, (prompt, response) in enumerate(texts):
        after = model(torch.cat([prompt, response])[None]).last_hidden_state[0, -1] @ random_head()
        expected = float(after.detach()) if i % 2 and sizes[i] else 0.0
        assert float(found["bootstrap_values"][i]) == pytest.approx(expected, abs=1e-4)
    assert found["bootstrap_values"].abs().max() > 0.1
    assert worker.values(select(batch, []), bootstrap=True)["bootstrap_values"].shape == (0,)


def plain_loss(body, head, batch, clip):
    """Mean over trainable tokens of half the larger squared error, written out."""
    values, loss, tokens = plain_values(body, head, batch), 0, 0
    columns = [rows_of(batch[name]) for name in ("values", "returns", "response_mask")]
    for value, old, target, mask in zip(values, *columns, strict=True):
        for v, o, g in zip(value[mask], old[mask].double(), target[mask].double(), strict=True):
            near = torch.minimum(torch.maximum(v, o - clip), o + clip)
            loss, tokens = loss + 0.5 * torch.maximum((v - g) ** 2, (near - g) ** 2), tokens + 1
    return loss / tokens


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_body_and_head(folder, kind):
    ours, batch = engine(folder(kind), micro_batch_tokens=40), random_batch()
    assert float(ours.values(batch).values().abs().max()) == 0, "first values are 0"
    set_head(ours, random_head())
    values = ours.values(batch)
    assert torch.equal(lengths(values), lengths(batch["response_ids"]))
    expected = plain_values(plain_model(folder(kind)).base_model, random_head(), batch)
    assert max(float(row.detach().abs().max()) for row in expected if len(row)) > 1
    for row, other in zip(rows_of(values), expected, strict=True):
        torch.testing.assert_close(row, other.detach(), rtol=0, atol=1e-10)


def test_the_head_replaces_the_language_model_head(folder):
    for kind in ("llama", "llama_tied"):
        ours = engine(folder(kind))
        shapes = {name: weight.shape for name, weight in ours.weights()}
        assert shapes["lm_head.weight"] == (64,)
        source = AutoModelForCausalLM.from_pretrained(folder(kind), dtype=torch.float64)
        body = {name for name, _ in source.named_parameters() if name != "lm_head.weight"}
        assert set(shapes) == body | {"lm_head.weight"}
        for name in body:  # the embedding of a tied model included
            torch.testing.assert_close(dict(ours.weights())[name].full_tensor(), source.get_parameter(name).detach())


def test_a_value_does_not_see_its_token(folder):
    """Another last token changes no value; another one in the middle changes those after it."""
    ours = engine(folder())
    set_head(ours, random_head())
    prompt, response = torch.tensor([5, 6, 7]), torch.tensor([8, 9, 10, 11])
    other_last, other_second = response.clone(), response.clone()
    other_last[-1], other_second[1] = 20, 20
    base, last, second = rows_of(ours.values(make_batch(
        prompt_ids=[prompt] * 3, response_ids=[response, other_last, other_second])))
    torch.testing.assert_close(last, base, rtol=0, atol=1e-12)
    torch.testing.assert_close(second[:2], base[:2], rtol=0, atol=1e-12)
    assert (second[2:] - base[2:]).abs().min() > 1e-6


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_moe"])
@pytest.mark.parametrize("budget", [25, 1000])
def test_updates_equal_a_plain_loop(folder, kind, budget):
    batch = with_targets(random_batch())
    ours = engine(folder(kind), micro_batch_tokens=budget, weight_decay=0.1)
    set_head(ours, random_head())
    model = plain_model(folder(kind))
    body, head = model.base_model, torch.nn.Parameter(random_head())
    adamw = torch.optim.AdamW([*body.parameters(), head], lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        metrics = ours.update(batch, ValueLoss(0.2))
        loss = plain_loss(body, head, batch, 0.2)
        adamw.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum(p.grad.square().sum() for p in [*body.parameters(), head] if p.grad is not None))
        adamw.step()
        assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
    weights = {name: weight.full_tensor() for name, weight in ours.weights()}
    torch.testing.assert_close(weights.pop("lm_head.weight"), head.detach(), rtol=0, atol=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, model.get_parameter(name).detach(), rtol=0, atol=1e-6)


def test_loss_gradient_and_metrics_of_one_row_by_hand():
    values = torch.tensor([[0.5, 0.9, -0.5, 0.1, 9.0]], requires_grad=True)
    columns = {
        "values": torch.tensor([[0.4, 0.5, 0.0, 0.0, torch.nan]]),
        "returns": torch.tensor([[1.0, 1.0, 1.0, 0.0, torch.nan]]),
        "response_mask": torch.tensor([[True, True, True, True, False]]),
        "loss_weights": torch.tensor([[0.25, 0.25, 0.25, 0.25, 0.0]])}
    loss, metrics = ValueLoss(0.2)(values, columns, None)
    # near: .5 .25; moved up too far: clipped to .7, (.3)^2 > (.1)^2; moved away: (1.5)^2 > (1.2)^2; near: .1^2
    assert float(loss.detach()) == pytest.approx(0.25 * 0.5 * (0.25 + 0.09 + 2.25 + 0.01), abs=1e-6)
    loss.backward()
    # V - G times 1/4, and nothing for the second, whose clipped error is the larger
    torch.testing.assert_close(values.grad, torch.tensor([[-0.125, 0.0, -0.375, 0.025, 0.0]]))
    assert metrics["vf_clipfrac"].value() == 0.25
    assert (metrics["value_mean"].value(), metrics["return_mean"].value()) == (pytest.approx(0.25), 0.75)


def test_without_a_clip_it_is_half_the_squared_error():
    values = torch.tensor([[0.9]], requires_grad=True)
    columns = {"values": torch.tensor([[0.5]]), "returns": torch.tensor([[1.0]]),
               "response_mask": torch.tensor([[True]]), "loss_weights": torch.tensor([[1.0]])}
    loss, metrics = ValueLoss(None)(values, columns, None)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.005) and float(values.grad) == pytest.approx(-0.1)
    assert metrics["vf_clipfrac"].value() == 0


def test_a_worker_learns_returns(folder):
    """Full batch, the same 7 rows: values come near returns, and explain their variance."""
    worker, batch = critic(folder("llama_tied"), learning_rate=3e-3), with_targets(random_batch())
    history, explained = [], []
    for _ in range(60):
        batch = worker.values(batch)
        columns = padded_columns(batch)
        explained.append(explained_variance(columns["values"], columns["returns"], columns["mask"]).value())
        history.append(finalize(worker.update(batch, ValueLoss(0.2))))
    assert {"critic/vf_loss", "critic/vf_clipfrac", "critic/grad_norm", "critic/lr"} <= set(history[0])
    assert explained[0] == 0, "constant values explain nothing"
    assert history[0]["critic/value_mean"] == 0
    assert history[-1]["critic/vf_loss"] < 0.1 * history[0]["critic/vf_loss"]
    assert explained[-1] > 0.9


def test_a_checkpoint_brings_the_head_back(folder, tmp_path):
    batch = with_targets(random_batch())
    worker = critic(folder("llama_tied"))
    for _ in range(2):
        worker.update(batch, ValueLoss())
    worker.save(str(tmp_path / "saved"))
    values, following = worker.values(batch.clone())["values"].values(), worker.update(batch, ValueLoss())
    resumed = critic(folder("llama_tied"))
    resumed.load(str(tmp_path / "saved"))
    assert torch.equal(resumed.values(batch.clone())["values"].values(), values) and values.abs().max() > 0
    assert resumed.update(batch, ValueLoss()) == following


def test_what_a_critic_cannot_use(folder, tmp_path):
    policy = TrainingEngine(ModelConfig(path=str(folder())), TrainingConfig(), CPU)
    policy.save(tmp_path / "policy")
    with pytest.raises(CheckpointError):
        critic(folder()).load(str(tmp_path / "policy"))
    with pytest.raises(ModelError, match="is neither a folder nor a known name"):
        critic(tmp_path / "nowhere")
    batch = with_targets(random_batch())
    with pytest.raises(BatchError, match="at least one row"):
        critic(folder()).update(select(batch, []), ValueLoss())
    assert len(rows_of(critic(folder()).values(select(batch, []))["values"])) == 0
