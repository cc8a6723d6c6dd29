"""Low-rank adapters on one rank: what they compute, what is trained, saved, exported, and what is refused."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.batch import rows_of
from hybridrl.config import LoRAConfig, ModelConfig, TrainingConfig
from hybridrl.errors import CheckpointError, ConfigError, TrainingError
from hybridrl.workers.training.engine import TrainingEngine
from hybridrl.workers.training.lora import is_adapter
from hybridrl.workers.training.models import ValueModel
from tests.unit.training.reference import plain_log_probs, plain_model, policy_gradient, random_batch

pytestmark = pytest.mark.usefixtures("one_rank")
CPU = torch.device("cpu")
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}


def engine(path, dtype=torch.float64, lora=None, **options):
    options = {"learning_rate": 1e-2, "max_grad_norm": 1e9} | options
    cfg = TrainingConfig(lora=LoRAConfig(**{"rank": 4, "alpha": 8.0} | (lora or {})), **options)
    return TrainingEngine(ModelConfig(path=str(path)), cfg, CPU, dtype=dtype)


def frozen(path, dtype=torch.float64):
    return TrainingEngine(ModelConfig(path=str(path)), TrainingConfig(), CPU, trainable=False, dtype=dtype)


def steps(ours, seeds):
    return [ours.update(random_batch(seed=seed), policy_gradient, 0.7) for seed in seeds]


def weights_of(ours):
    return {name: weight.full_tensor().clone() for name, weight in ours.weights()}


def factors_of(ours):
    """{layer: (A, B)}."""
    factors = {name: value.full_tensor().clone() for name, value in ours.adapters()}
    return {name: (factors[f"{name}.lora_A.weight"], factors[f"{name}.lora_B.weight"]) for name in ours.adapted}


# What they compute


@pytest.mark.parametrize("kind", ["llama_tied", "qwen2", "qwen3_moe"])
def test_fresh_adapters_change_nothing(folder, kind):
    ours, base, batch = engine(folder(kind)), frozen(folder(kind)), random_batch()
    assert torch.equal(ours.log_probs(batch)["log_probs"].values(), base.log_probs(batch)["log_probs"].values())
    expected = weights_of(base)
    assert list(weights_of(ours)) == list(expected)
    for name, weight in weights_of(ours).items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("rank_stabilized, scaling", [(False, 8 / 4), (True, 8 / math.sqrt(4))])
def test_a_weight_is_the_base_plus_the_scaled_product(folder, rank_stabilized, scaling):
    ours, base = engine(folder("qwen2"), lora={"rank_stabilized": rank_stabilized}), weights_of(frozen(folder("qwen2")))
    steps(ours, range(2))
    factors, batch = factors_of(ours), random_batch()
    assert len(factors) == 2 * 7
    for name, weight in weights_of(ours).items():
        a, b = factors.get(name.removesuffix(".weight"), (None, None))
        if a is None:
            assert torch.equal(weight, base[name]), name
        else:
            torch.testing.assert_close(weight - base[name], scaling * (b @ a), rtol=0, atol=1e-12)
            assert (weight - base[name]).abs().max() > 1e-3
    # A plain model with these weights computes what the adapters do.
    plain = plain_model(folder("qwen2"))
    plain.load_state_dict(weights_of(ours), strict=True)
    for got, row in zip(rows_of(ours.log_probs(batch)["log_probs"]), plain_log_probs(plain, batch)[0], strict=True):
        torch.testing.assert_close(got, row.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", [{}, dict(micro_batch_tokens=17, logits_chunk_tokens=3),
                                     dict(gradient_checkpointing="layers")])
def test_gradients_are_those_of_the_factors(folder, options):
    """With G the gradient of W + s B A in a plain model: dL/dA = s B' G and dL/dB = s G A'."""
    ours, batch = engine(folder("llama_tied"), **options), random_batch()
    for _ in range(3):
        plain = plain_model(folder("llama_tied"))
        plain.load_state_dict(weights_of(ours), strict=False)
        log_probs, _ = plain_log_probs(plain, batch, 0.7)
        loss = -sum((lp * a).sum() for lp, a in zip(log_probs, rows_of(batch["advantages"]), strict=True))
        loss.backward()
        square = 0.0
        for name, (a, b) in factors_of(ours).items():
            grad = plain.get_submodule(name).weight.grad
            square += float((2 * b.T @ grad).square().sum() + (2 * grad @ a.T).square().sum())
        metrics = ours.update(batch, policy_gradient, 0.7)
        assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-8)
        assert metrics["grad_norm"] == pytest.approx(math.sqrt(square), rel=1e-9)


def test_the_start_is_uniform_and_belongs_to_the_seed(folder):
    a, again, other = (factors_of(engine(folder(), lora={"seed": seed})) for seed in (1, 1, 2))
    for name, (down, up) in a.items():
        inputs = down.shape[1]
        assert down.abs().max() <= inputs ** -0.5 and down.abs().max() > 0.9 * inputs ** -0.5
        assert torch.equal(down, again[name][0]) and not torch.equal(down, other[name][0])
        assert not up.any()


# What is trained


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_moe"])
def test_an_update_moves_adapters_alone(folder, kind):
    ours = engine(folder(kind), torch.float32)
    before = {name: p.detach().clone() for name, p in ours.model.named_parameters()}
    memory = ours.memory()
    steps(ours, range(2))
    trained = sum(p.numel() for name, p in ours.model.named_parameters() if is_adapter(name))
    for name, parameter in ours.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (not is_adapter(name)), name
        assert parameter.requires_grad == is_adapter(name)
    assert 0 < trained < 0.15 * ours.num_parameters
    # Two averages of float32 and a step counter each.
    assert ours.memory()["optimizer"] == 8 * trained + 4 * len(ours.optimizer.parameters)
    assert ours.memory()["parameters"] == memory["parameters"]


def test_the_reference_is_the_model_with_adapters_off(folder):
    ours, base, batch = engine(folder()), frozen(folder()), random_batch()
    steps(ours, range(2))
    policy, reference = ours.log_probs(batch, 0.7)["log_probs"].values(), ours.base_log_probs(batch, 0.7).values()
    assert torch.equal(reference, base.log_probs(batch, 0.7)["log_probs"].values())
    assert (policy - reference).abs().max() > 1e-2
    assert torch.equal(ours.log_probs(batch, 0.7)["log_probs"].values(), policy), "adapters are on again"
    twin = engine(folder())
    twin.base_log_probs(batch)  # as the first forward of all
    assert steps(twin, range(2)) == steps(engine(folder()), range(2))


def test_without_adapters_there_is_no_reference(folder):
    with pytest.raises(TrainingError, match="training.lora.rank is 0"):
        engine(folder(), lora={"rank": 0}).base_log_probs(random_batch())


def test_a_critic_trains_adapters_and_its_head(folder):
    cfg = TrainingConfig(learning_rate=1e-2, lora=LoRAConfig(rank=4))
    critic = TrainingEngine(ModelConfig(path=str(folder("llama_tied"))), cfg, CPU, module=ValueModel)
    before, batch = {name: p.detach().clone() for name, p in critic.model.named_parameters()}, random_batch()
    assert not critic.values(batch).values().any()

    def loss(values, columns, entropies):
        return (values * columns["advantages"]).sum(), {}

    for _ in range(3):  # the head is first to move, then B: behind zeros nothing has a gradient
        critic.update(batch, loss)
    moved = {name for name, p in critic.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if is_adapter(name) or "lm_head" in name}


# Targets


@pytest.mark.parametrize("kind, targets, expected", [
    ("llama", ["all-linear"], [(layer, kind) for layer in (0, 1) for kind in ATTENTION | MLP]),
    ("qwen3_moe", ["all-linear"], [(layer, kind) for layer in (0, 1) for kind in ATTENTION]),
    ("llama", ["q_proj", "mlp.up_proj"], [(layer, kind) for layer in (0, 1) for kind in ("q_proj", "up_proj")]),
    ("llama", ["layers.1.self_attn.k_proj"], [(1, "k_proj")]),
    ("llama", ["v_proj", "model.layers.0.self_attn.v_proj"], [(0, "v_proj"), (1, "v_proj")]),
])
def test_targets_are_ends_of_names(folder, kind, targets, expected):
    names = engine(folder(kind), lora={"targets": targets}).adapted
    assert sorted((int(name.split(".")[2]), name.split(".")[-1]) for name in names) == sorted(expected)


@pytest.mark.parametrize("kind, target, message", [
    ("llama", "q_prj", "'q_prj' names no linear layer .* Did you mean q_proj.* Linear layers: down_proj, gate_"),
    ("llama", "proj", "'proj' names no linear layer"),
    ("llama", "lm_head", "'lm_head' names no linear layer of the model's decoder layers"),
    ("llama", "layers.7.self_attn.q_proj", ".* Did you mean model.layers.[01].self_attn.q_proj"),
    ("qwen3_moe", "gate_up_proj", "'gate_up_proj' is model.layers.0.mlp.experts.gate_up_proj, the weights of several "
                                  "experts .* Linear layers: k_proj, o_proj, q_proj, v_proj."),
    ("qwen3_moe", "experts", "'experts' is model.layers.0.mlp.experts"),
])
def test_a_target_that_matches_nothing(folder, kind, target, message):
    with pytest.raises(ConfigError, match=f"training.lora.targets: {message}"):
        engine(folder(kind), lora={"targets": ["q_proj", target]})


# Checkpoints and exports


def test_a_checkpoint_holds_adapters_alone_and_resumes_exactly(folder, tmp_path):
    unbroken = engine(folder("qwen3_moe"), torch.float32)
    steps(unbroken, range(3))
    unbroken.save(tmp_path / "step")
    files = [load_file(file) for file in (tmp_path / "step").glob("*.safetensors")]
    saved = {name: value for tensors in files for name, value in tensors.items()}
    assert all(is_adapter(name) for name in saved)
    assert sum(value.numel() for value in saved.values()) == 3 * sum(p.numel() for p in unbroken.optimizer.parameters)
    resumed = engine(folder("qwen3_moe"), torch.float32)
    resumed.load(tmp_path / "step")
    assert steps(resumed, range(3, 6)) == steps(unbroken, range(3, 6))
    for (name, a), (_, b) in zip(resumed.weights(), unbroken.weights(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor()), name


@pytest.mark.parametrize("lora", [{"rank": 8}, {"rank": 0}, {"targets": ["q_proj"]}])
def test_a_checkpoint_of_other_adapters(folder, tmp_path, lora):
    engine(folder(), torch.float32).save(tmp_path / "step")
    with pytest.raises(CheckpointError, match="Can't read checkpoint"):
        engine(folder(), torch.float32, lora).load(tmp_path / "step")


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_moe"])
def test_an_export_is_merged_and_loads_in_transformers(folder, tmp_path, kind):
    ours, tokenizer = engine(folder(kind), torch.float32), AutoTokenizer.from_pretrained(folder(kind))
    steps(ours, range(2))
    ours.export(tmp_path, tokenizer)
    original, exported = (load_file(path / "model.safetensors") for path in (folder(kind), tmp_path))
    assert {name: value.shape for name, value in exported.items()} == {
        name: value.shape for name, value in original.items()}
    assert not (tmp_path / "adapter").exists() and not (tmp_path / "adapter_config.json").exists()
    batch = random_batch()
    got = ours.log_probs(batch)["log_probs"].values()
    torch.testing.assert_close(got, frozen(tmp_path, torch.float32).log_probs(batch)["log_probs"].values(),
                               rtol=0, atol=1e-4)
    assert (got - frozen(folder(kind), torch.float32).log_probs(batch)["log_probs"].values()).abs().max() > 1e-2


def test_an_exported_adapter_loads_in_peft(folder, tmp_path):
    from peft import PeftModel

    ours = engine(folder(), torch.float32, {"export_adapter": True, "rank_stabilized": True, "targets": ["q_proj"]})
    steps(ours, range(2))
    ours.export(tmp_path, AutoTokenizer.from_pretrained(folder()))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 8.0, True)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder()), tmp_path / "adapter")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path)
        base = AutoModelForCausalLM.from_pretrained(folder())
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=0, atol=1e-4)
        assert (merged(ids).logits - base(ids).logits).abs().max() > 1e-2
