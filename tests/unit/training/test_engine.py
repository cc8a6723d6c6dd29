"""The engine on one rank against the plain way: values, gradients, invariance to how the work is cut."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hybridrl.algorithms.partials import Max, Mean
from hybridrl.batch import lengths, make_batch, rows_of, select
from hybridrl.config import ModelConfig, TrainingConfig
from hybridrl.errors import BatchError, ConfigError, PhaseError, TrainingError
from hybridrl.workers.training.engine import TrainingEngine
from tests.models import KINDS
from tests.unit.training.reference import (
    plain_log_probs,
    plain_model,
    plain_update,
    policy_gradient,
    random_batch,
)

pytestmark = pytest.mark.usefixtures("one_rank")
CPU = torch.device("cpu")


def engine(path, dtype=torch.float64, trainable=True, **options):
    options = {"learning_rate": 1e-2, "max_grad_norm": 1e9} | options
    return TrainingEngine(ModelConfig(path=str(path)), TrainingConfig(**options), CPU, trainable, dtype)


def close(got, expected, atol=1e-10):
    for a, b in zip(rows_of(got), expected, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=0, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_and_entropies_equal_those_of_separate_rows(folder, kind):
    batch = random_batch()
    got = engine(folder(kind), micro_batch_tokens=40, logits_chunk_tokens=5).log_probs(batch, 0.7, entropies=True)
    log_probs, entropies = plain_log_probs(plain_model(folder(kind)), batch, 0.7)
    close(got["log_probs"], log_probs)
    close(got["entropies"], entropies)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_prompt", [2, 7])
def test_rows_of_the_same_prompt_equal_separate_ones(folder, kind, per_prompt):
    """Values, and gradients with and without recomputation; a micro-batch has all rows, or some."""
    batch = random_batch(per_prompt=per_prompt)
    expected, _ = plain_log_probs(plain_model(folder(kind)), batch, 0.7)
    for options in ({}, dict(micro_batch_tokens=40), dict(gradient_checkpointing="layers")):
        ours, model = engine(folder(kind), **options), plain_model(folder(kind))
        ours.shares = True
        close(ours.log_probs(batch, 0.7)["log_probs"], expected)
        metrics = ours.update(batch, policy_gradient, 0.7, entropies=True)
        loss, norm = plain_update(model, torch.optim.AdamW(model.parameters(), lr=1e-2), batch, 0.7, entropies=True)
        assert metrics["loss"] == pytest.approx(loss, rel=1e-10)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-7)  # the models' norms round gradients to float32


@pytest.mark.parametrize(("kind", "fed"), [("llama", 8 + 3 * 4), ("qwen3_moe", 3 * (8 + 4))])
def test_prompts_in_common_are_computed_once_but_in_mixtures(folder, kind, fed):
    batch = make_batch(prompt_ids=[list(range(8))] * 3, response_ids=[list(range(5))] * 3)
    ours, seen = engine(folder(kind), torch.float32), []
    ours.model.layers()[0].register_forward_hook(lambda layer, args, out: seen.append(out.shape[1]))
    ours.log_probs(batch)
    assert seen == [fed]


@pytest.mark.parametrize("kind", KINDS)
def test_float32_log_probs(folder, kind):
    batch = random_batch()
    got = engine(folder(kind), torch.float32).log_probs(batch)
    assert set(got) == {"log_probs"}
    assert got["log_probs"].dtype == torch.float32
    assert torch.equal(lengths(got["log_probs"]), lengths(batch["response_ids"]))
    close(got["log_probs"], [row.float() for row in plain_log_probs(plain_model(folder(kind)), batch)[0]], atol=5e-5)


def test_a_sliding_window_is_kept(folder):
    path = folder("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    batch = random_batch(longest_response=20)
    close(engine(path).log_probs(batch)["log_probs"], plain_log_probs(plain_model(path), batch)[0])
    batch, ours = random_batch(longest_response=20, per_prompt=3), engine(path)
    ours.shares = True
    close(ours.log_probs(batch)["log_probs"], plain_log_probs(plain_model(path), batch)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_updates_equal_a_plain_loop(folder, kind):
    batch, options = random_batch(), dict(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=50.0)
    ours = engine(folder(kind), micro_batch_tokens=25, logits_chunk_tokens=4, **options)
    model = plain_model(folder(kind))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        metrics = ours.update(batch, policy_gradient, 0.7, entropies=True)
        loss, norm = plain_update(model, adamw, batch, 0.7, max_grad_norm=50.0, entropies=True)
        assert norm > 50  # clipping matters
        assert metrics["loss"] == pytest.approx(loss, abs=1e-8)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-9)
    for name, weight in ours.weights():
        torch.testing.assert_close(weight.full_tensor(), model.get_parameter(name).detach(), rtol=0, atol=1e-7)


def trained(path, batch, steps=3, **options):
    ours = engine(path, **options)
    metrics = [ours.update(batch, policy_gradient, 0.7) for _ in range(steps)]
    return metrics, {name: weight.full_tensor() for name, weight in ours.weights()}


@pytest.mark.parametrize("options", [
    dict(micro_batch_tokens=1), dict(micro_batch_tokens=17), dict(logits_chunk_tokens=1),
    dict(logits_chunk_tokens=3, micro_batch_tokens=30), dict(gradient_checkpointing="layers"),
    dict(gradient_checkpointing="layers", micro_batch_tokens=17, logits_chunk_tokens=2),
    dict(gradient_checkpointing="selective")])
@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_moe"])
def test_how_the_work_is_cut_does_not_matter(folder, kind, options):
    batch = random_batch()
    metrics, weights = trained(folder(kind), batch)
    other_metrics, other_weights = trained(folder(kind), batch, **options)
    for a, b in zip(metrics, other_metrics, strict=True):
        assert set(a) == set(b)
        assert b["micro_batches"] >= a["micro_batches"]
        for name in ("loss", "grad_norm", "rewards", "tokens", "lr", "skipped"):
            assert a[name] == pytest.approx(b[name], rel=1e-10, abs=1e-10), name
    for name, weight in weights.items():
        torch.testing.assert_close(weight, other_weights[name], rtol=0, atol=1e-9)


def test_the_order_of_rows_does_not_matter(folder):
    batch, order = random_batch(), [4, 0, 6, 2, 5, 1, 3]
    ours = engine(folder(), micro_batch_tokens=20)
    straight = rows_of(ours.log_probs(batch)["log_probs"])
    close(ours.log_probs(select(batch, order))["log_probs"], [straight[i] for i in order])


def test_gradient_checkpointing_keeps_fewer_activations(folder):
    def saved(**options):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            engine(folder(), **options).update(random_batch(), policy_gradient)
        return sum(sizes)
    assert saved(gradient_checkpointing="layers") < 0.5 * saved()


def test_selective_recomputation_repeats_no_product(folder):
    def products(mode):
        ours = engine(folder(), gradient_checkpointing=mode)
        with FlopCounterMode(display=False) as counter:
            ours.update(random_batch(), policy_gradient)
        return counter.get_total_flops()
    assert products("selective") == products("none") < products("layers")


def test_dropout_of_the_config_is_off(folder):
    path, batch = folder(attention_dropout=0.5), random_batch()
    ours = engine(path, learning_rate=0.0)
    seen = {}

    def loss(log_probs, columns, entropies):
        seen["log_probs"] = log_probs.detach()
        return policy_gradient(log_probs, columns, entropies)

    ours.update(batch, loss)
    expected = plain_log_probs(plain_model(path), batch)[0]
    longest_first = sorted(range(7), key=lambda i: -(len(rows_of(batch["prompt_ids"])[i]) + len(expected[i])
                                                     if len(expected[i]) else 0))
    for got, row in zip(seen["log_probs"], longest_first, strict=True):
        torch.testing.assert_close(got[:len(expected[row])], expected[row].detach(), rtol=0, atol=1e-10)
        assert not got[len(expected[row]):].any()


def test_metrics_of_an_update(folder):
    batch = random_batch()

    def loss(log_probs, columns, entropies):
        rows = columns["rewards"].double()
        return log_probs.sum(), {"mean_reward": Mean(rows.sum(), len(rows)), "best_reward": Max(rows.amax())}

    metrics = engine(folder(), micro_batch_tokens=17, learning_rate=0.5, warmup_steps=10).update(batch, loss)
    assert metrics["mean_reward"] == pytest.approx(batch["rewards"].double().mean().item())
    assert metrics["best_reward"] == batch["rewards"].max().item()
    assert metrics["lr"] == pytest.approx(0.05)
    assert metrics["skipped"] == 0
    assert metrics["micro_batches"] > 1
    prompts, responses = lengths(batch["prompt_ids"]), lengths(batch["response_ids"])
    assert metrics["tokens"] == (prompts + responses - 1)[responses > 0].sum()
    assert all(isinstance(value, float) for value in metrics.values())


def test_entropies_reach_the_loss_only_when_asked_for(folder):
    given = []

    def loss(log_probs, columns, entropies):
        given.append(entropies)
        return log_probs.sum(), {}

    ours, batch = engine(folder()), random_batch()
    ours.update(batch, loss)
    ours.update(batch, loss, entropies=True)
    assert given[0] is None
    assert given[1].shape == (7, int(lengths(batch["response_ids"]).max()))
    assert given[1].requires_grad


def test_non_finite_losses_are_skipped_and_counted_and_end_the_run(folder):
    ours, batch = engine(folder(), max_skipped_steps=1), random_batch()
    before = {name: weight.full_tensor().clone() for name, weight in ours.weights()}

    def loss(log_probs, columns, entropies):
        return (log_probs * math.nan).sum(), {}

    assert ours.update(batch, loss)["skipped"] == 1
    for name, weight in ours.weights():
        assert torch.equal(weight.full_tensor(), before[name])
    with pytest.raises(TrainingError, match="2 optimizer steps in a row"):
        ours.update(batch, loss)


def test_a_constant_loss_is_a_step_with_zero_gradient(folder):
    metrics = engine(folder()).update(random_batch(), lambda lp, columns, entropies: (torch.tensor(3.0), {}))
    assert (metrics["loss"], metrics["grad_norm"]) == (3.0, 0.0)


def test_rows_without_a_response_get_empty_log_probs(folder):
    batch = make_batch(prompt_ids=[[5], [6, 7]], response_ids=[[], []])
    assert [len(row) for row in rows_of(engine(folder()).log_probs(batch)["log_probs"])] == [0, 0]


def test_no_rows(folder):
    ours, batch = engine(folder()), select(random_batch(), [])
    assert rows_of(ours.log_probs(batch, entropies=True)["entropies"]) == []
    with pytest.raises(BatchError, match="needs at least one row"):
        ours.update(batch, policy_gradient)


def test_a_row_over_the_token_budget_is_trained(folder):
    batch = random_batch()
    metrics = engine(folder(), micro_batch_tokens=1).update(batch, policy_gradient)
    assert metrics["micro_batches"] == (lengths(batch["response_ids"]) > 0).sum() + 1  # and those that cost nothing


def test_weights_share_memory_and_come_once(folder):
    ours = engine(folder("llama_tied"))
    weights = dict(ours.weights())
    model = plain_model(folder("llama_tied"))
    assert list(weights) == [name for name, _ in model.named_parameters()]
    assert "lm_head.weight" not in weights
    assert ours.num_parameters == sum(p.numel() for p in model.parameters())
    before = weights["model.norm.weight"].full_tensor().clone()
    ours.update(random_batch(), policy_gradient)
    assert not torch.equal(weights["model.norm.weight"].full_tensor(), before)
    assert not weights["model.norm.weight"].requires_grad


def test_a_frozen_model_scores_and_does_not_train(folder):
    batch, frozen = random_batch(), engine(folder(), trainable=False)
    close(frozen.log_probs(batch)["log_probs"], plain_log_probs(plain_model(folder()), batch)[0])
    with pytest.raises(TrainingError, match="trainable=False"):
        frozen.update(batch, policy_gradient)
    assert frozen.memory()["optimizer"] == 0


def test_memory_counts_what_is_held(folder):
    ours = engine(folder(), torch.float32)
    assert ours.memory() == {"parameters": 4 * ours.num_parameters, "gradients": 0, "optimizer": 0}
    ours.update(random_batch(), policy_gradient)
    tensors = sum(1 for _ in ours.weights())
    assert ours.memory() == {"parameters": 4 * ours.num_parameters, "gradients": 0,
                             "optimizer": 8 * ours.num_parameters + 4 * tensors}


@pytest.mark.parametrize("offload", ["rollout", "always"])
def test_an_offload_that_a_cpu_can_not_do_is_refused(folder, offload):
    with pytest.raises(ConfigError, match=f"training.offload must be auto or never on a cpu device.*got '{offload}'"):
        engine(folder(), offload=offload)


def test_offload_does_nothing_on_cpu(folder):
    ours, batch = engine(folder()), random_batch()
    before = ours.log_probs(batch)["log_probs"].values()
    ours.offload()
    assert torch.equal(ours.log_probs(batch)["log_probs"].values(), before)
    ours.onload()


def test_what_is_offloaded_can_not_be_used(folder, tmp_path):
    ours, batch = engine(folder()), random_batch()
    ours.offloaded = {"optimizer"}  # as on CUDA
    ours.log_probs(batch)  # the fingerprint of a weight sync needs the parameters alone
    for use in (lambda: ours.update(batch, policy_gradient), lambda: ours.save(tmp_path / "a"),
                lambda: ours.load(tmp_path / "a")):
        with pytest.raises(PhaseError, match="^optimizer of training are offloaded; onload"):
            use()
    ours.offloaded = {"optimizer", "parameters"}
    for use in (lambda: ours.log_probs(batch), lambda: ours.export(tmp_path / "a", None)):
        with pytest.raises(PhaseError, match="^optimizer and parameters of training"):
            use()
