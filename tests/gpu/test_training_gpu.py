"""The training engine on one CUDA device: bfloat16 compute on float32 masters, offload, checkpoints."""

import pytest
import torch
import torch.distributed as dist

from hybridrl.batch import from_lengths, lengths, rows_of
from hybridrl.config import LoRAConfig, ModelConfig, TrainingConfig
from hybridrl.errors import ConfigError, PhaseError
from hybridrl.workers.training.attention import Pack, choose_kernel, packed_attention
from hybridrl.workers.training.dry_run import dry_run
from hybridrl.workers.training.engine import TrainingEngine
from tests.models import KINDS, tiny_model
from tests.unit.training.reference import plain_log_probs, plain_model, policy_gradient, random_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    torch.cuda.set_device(0)
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1,
                            device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: tiny_model(tmp_path_factory.mktemp(kind), kind, initializer_range=0.05) for kind in KINDS}


def engine(path, trainable=True, **options):
    options = {"learning_rate": 1e-2, "micro_batch_tokens": 40} | options
    return TrainingEngine(ModelConfig(path=str(path)), TrainingConfig(**options), torch.device("cuda", 0), trainable)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_near_those_of_float64(folders, kind):
    batch = random_batch()
    got = engine(folders[kind]).log_probs(batch, 0.7, entropies=True)
    log_probs, entropies = plain_log_probs(plain_model(folders[kind]), batch, 0.7)
    for name, expected in (("log_probs", log_probs), ("entropies", entropies)):
        assert got[name].device.type == "cpu"
        for a, b in zip(rows_of(got[name]), expected, strict=True):
            torch.testing.assert_close(a.double(), b.detach(), rtol=0, atol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_updates_move_float32_masters(folders, kind):
    ours, batch = engine(folders[kind]), random_batch()
    before = {name: weight.full_tensor().clone() for name, weight in ours.weights()}
    metrics = [ours.update(batch, policy_gradient, 0.7) for _ in range(3)]
    assert metrics[2]["loss"] < metrics[0]["loss"]
    for name, weight in ours.weights():
        assert weight.dtype == torch.float32
        assert weight.device.type == "cuda"
        assert not torch.equal(weight.full_tensor(), before[name]), name


def test_the_old_log_probs_are_those_of_the_update(folders):
    """A first step has ratio 1 exactly only if scoring and training compute the same function."""
    ours, batch = engine(folders["llama"], learning_rate=0.0, micro_batch_tokens=1000), random_batch()
    scored, seen = ours.log_probs(batch)["log_probs"].values(), []

    def loss(log_probs, columns, entropies):
        seen.append(log_probs.detach()[log_probs != 0].sum())
        return policy_gradient(log_probs, columns, entropies)

    ours.update(batch, loss)
    assert seen[0].item() == pytest.approx(scored.sum().item(), abs=1e-3)


@pytest.mark.parametrize("parameters", [True, False])
def test_offload_frees_device_memory_and_changes_nothing(folders, parameters):
    ours, twin, batch = engine(folders["llama"]), engine(folders["llama"]), random_batch()
    for each in (ours, twin):
        each.update(batch, policy_gradient)
    held = ours.memory()["allocated"]
    ours.offload(parameters)
    freed = held - ours.memory()["allocated"]
    assert freed >= (12 if parameters else 8) * ours.num_parameters
    assert {weight.device.type for _, weight in ours.weights()} == {"cpu" if parameters else "cuda"}
    if not parameters:
        ours.log_probs(batch)
    with pytest.raises(PhaseError, match="onload"):
        ours.update(batch, policy_gradient)
    ours.onload()
    for _ in range(2):
        assert ours.update(batch, policy_gradient) == pytest.approx(twin.update(batch, policy_gradient), rel=1e-3)


def test_offload_never_keeps_all(folders):
    ours, batch = engine(folders["llama"], offload="never"), random_batch()
    ours.update(batch, policy_gradient)
    held = ours.memory()
    ours.offload()
    assert ours.memory() == held
    ours.log_probs(batch)


def test_a_checkpoint_from_offloaded_state_resumes(folders, tmp_path):
    ours, batch = engine(folders["qwen3_moe"]), random_batch()
    ours.update(batch, policy_gradient)
    ours.offload()
    ours.onload()
    ours.save(tmp_path / "step")
    resumed = engine(folders["qwen3_moe"])
    resumed.load(tmp_path / "step")
    for (name, a), (_, b) in zip(resumed.weights(), ours.weights(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor()), name
    assert resumed.update(batch, policy_gradient) == pytest.approx(ours.update(batch, policy_gradient), rel=1e-3)


def test_a_reference_is_kept_in_bfloat16(folders):
    frozen, batch = engine(folders["llama"], trainable=False), random_batch()
    assert frozen.memory()["parameters"] == 2 * frozen.num_parameters
    scored = engine(folders["llama"]).log_probs(batch)["log_probs"].values()
    torch.testing.assert_close(frozen.log_probs(batch)["log_probs"].values(), scored, rtol=0, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_adapters_on_a_frozen_bfloat16_model(folders, kind):
    ours, frozen, batch = engine(folders[kind], lora=LoRAConfig(rank=4)), engine(folders[kind], False), random_batch()
    kept = {name: p.detach().full_tensor().clone() for name, p in ours.model.named_parameters()}
    metrics = [ours.update(batch, policy_gradient, 0.7) for _ in range(3)]
    assert metrics[2]["loss"] < metrics[0]["loss"]
    for name, parameter in ours.model.named_parameters():
        assert parameter.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16)
        assert torch.equal(parameter.detach().full_tensor(), kept[name]) != parameter.requires_grad, name
    torch.testing.assert_close(ours.base_log_probs(batch).values(), frozen.log_probs(batch)["log_probs"].values(),
                               rtol=0, atol=1e-2)
    assert all(weight.dtype == torch.float32 for name, weight in ours.weights() if name.endswith("q_proj.weight"))
    ours.offload()
    ours.onload()
    ours.update(batch, policy_gradient)


def test_recomputed_layers(folders):
    plain, recomputed = (engine(folders["llama"], gradient_checkpointing=mode) for mode in ("none", "layers"))
    for seed in range(2):
        a, b = (each.update(random_batch(seed=seed), policy_gradient) for each in (plain, recomputed))
        assert a == pytest.approx(b, rel=1e-3)


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("kernel", ["flash", "flex"])
def test_kernels_of_attention_agree_with_sdpa(kernel, window):
    lengths, device = [700, 650, 300, 33, 1], torch.device("cuda", 0)
    if choose_kernel("auto", device, torch.bfloat16, 64) == "sdpa":
        pytest.skip("this GPU has neither flash nor flex")
    g = torch.Generator(device).manual_seed(0)
    shapes = [(1, sum(lengths), heads, 64) for heads in (8, 2, 2)]
    given = [torch.randn(shape, generator=g, device=device, dtype=torch.bfloat16) for shape in shapes]
    results = []
    for name in ("sdpa", kernel):
        q, k, v = tensors = [x.clone().transpose(1, 2).requires_grad_() for x in given]
        out, _ = packed_attention(torch.nn.Module(), q, k, v, None, scaling=0.1, sliding_window=window,
                                  pack=Pack(lengths, device, choose_kernel(name, device, torch.bfloat16, 64)))
        out.float().square().sum().backward()
        results.append([out, *(x.grad for x in tensors)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("attention", ["auto", "flash", "flex"])
def test_updates_with_each_kernel(folders, attention):
    plain, other = (engine(folders["llama"], attention=name) for name in ("sdpa", attention))
    for seed in range(2):
        a, b = (each.update(random_batch(seed=seed), policy_gradient) for each in (plain, other))
        for name in ("loss", "grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=0.05)


def test_selective_recomputation_and_parameters_in_cpu_memory(folders):
    plain = engine(folders["llama"])
    others = [engine(folders["llama"], gradient_checkpointing="selective"), engine(folders["llama"], offload="always")]
    for seed in range(2):
        expected = plain.update(random_batch(seed=seed), policy_gradient)
        for other in others:
            assert other.update(random_batch(seed=seed), policy_gradient) == pytest.approx(expected, rel=1e-2)
    assert {p.device.type for p in others[1].model.parameters()} == {"cpu"}
    assert {weight.device.type for _, weight in others[1].weights()} == {"cuda"}


def test_a_dry_run_says_what_is_left_and_what_fits(folders):
    ours = engine(folders["llama"], micro_batch_tokens=4096)
    assert "a micro-batch of 4096 tokens takes" in dry_run(ours, 64, 100, 200)
    assert ours.memory()["gradients"] == 0
    wide = engine(folders["llama"], micro_batch_tokens=10**9)
    with pytest.raises(ConfigError, match="training.micro_batch_tokens must be at most [0-9]+ here"):
        dry_run(wide, 10**7, 100, 200)


@pytest.mark.parametrize("mode", ["none", "layers", "selective"])
def test_replayed_experts_in_every_pass(folders, mode):
    """Forced experts change log-probs, and the update's first pass, recomputed layers included, follows them."""
    training = engine(folders["qwen3_moe"], gradient_checkpointing=mode)
    training.replay = "old"
    batch = random_batch()
    first = training.log_probs(batch)
    experts = first["routed_experts"]
    batch["routed_experts"] = from_lengths(((experts.values().int() + 1) % 4).to(torch.uint8), lengths(experts))
    forced = training.log_probs(batch)["log_probs"].values()
    assert (forced - first["log_probs"].values()).abs().max() > 1e-3
    metrics = training.update(batch, policy_gradient)
    assert metrics["routing/fallback_rows"] == 0 and metrics["routing/layers_differ_frac"] > 0.2
    assert metrics["grad_norm"] > 0


@pytest.mark.parametrize("optimizer", ["muon", "adamw_8bit"])
def test_other_optimizers_learn_and_resume_from_offloaded_state(folders, tmp_path, optimizer):
    if optimizer == "adamw_8bit":
        pytest.importorskip("torchao")
    ours, batch = engine(folders["llama"], optimizer=optimizer, learning_rate=1e-3), random_batch()
    first = ours.update(batch, policy_gradient)
    ours.offload()
    ours.onload()
    assert ours.update(batch, policy_gradient)["loss"] < first["loss"]
    ours.save(tmp_path / "step")
    resumed = engine(folders["llama"], optimizer=optimizer, learning_rate=1e-3)
    resumed.load(tmp_path / "step")
    assert resumed.update(batch, policy_gradient) == pytest.approx(ours.update(batch, policy_gradient), rel=1e-3)


def test_compiled_layers_are_near_eager_ones(folders):
    eager, compiled = (engine(folders["llama"], compile=on) for on in (False, True))
    for seed in range(2):
        a, b = (each.update(random_batch(seed=seed), policy_gradient) for each in (eager, compiled))
        assert a == pytest.approx(b, rel=3e-2, abs=3e-2)
