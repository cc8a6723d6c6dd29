"""The policy on one CUDA device: both engines share it, in bfloat16, with vLLM's sleep levels and tags."""

import dataclasses
import os

import pytest
import torch
import torch.distributed as dist

from hybridrl.batch import lengths, make_batch
from hybridrl.config import LoRAConfig, ModelConfig, PolicyConfig, RolloutConfig, SyncConfig, TrainingConfig
from hybridrl.workers.base import WorkerContext
from tests.distributed.probe import ProbeWorker, plain_loss
from tests.models import tiny_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def one_rank():
    pytest.importorskip("vllm")
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29611")
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def built(role, folder, **changes):
    cfg = PolicyConfig(
        model=ModelConfig(path=str(folder)), training=TrainingConfig(learning_rate=1e-3),
        rollout=RolloutConfig(max_prompt_tokens=32, max_response_tokens=16, gpu_memory_frac=0.2, enforce_eager=True),
        **changes)
    return ProbeWorker(WorkerContext(rank=0, world_size=1, device=torch.device("cuda", 0), role=role), cfg)


@pytest.fixture(scope="module")
def sleeping_mixture(one_rank, tmp_path_factory):
    """A policy with experts; the first of the process, because a dense model's groups don't do for a mixture."""
    folder = tiny_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", hidden_size=256, head_dim=64, num_experts=8,
                        moe_intermediate_size=128)
    worker = built("mixture", folder, routing_replay="rollout")
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def policy(sleeping_mixture, tmp_path_factory):
    folder = tiny_model(tmp_path_factory.mktemp("model"), "llama", hidden_size=256, head_dim=64, num_hidden_layers=4)
    worker = built("policy", folder)
    yield worker
    worker.close()


@pytest.fixture
def mixture(policy, sleeping_mixture):
    policy.enter_training()  # its rollout engine sleeps
    yield sleeping_mixture
    sleeping_mixture.enter_training()


@pytest.fixture(scope="module", params=["merged", "adapter"])
def adapted(policy, request):
    """A policy with adapters in the same process."""
    policy.enter_training()  # its rollout engine sleeps
    cfg = dataclasses.replace(policy.cfg, sync=SyncConfig(lora=request.param),
                              training=TrainingConfig(learning_rate=1e-2, lora=LoRAConfig(rank=8)))
    worker = ProbeWorker(WorkerContext(rank=0, world_size=1, device=torch.device("cuda", 0), role=request.param), cfg)
    yield worker
    worker.enter_training()


def batch_of(rows: int):
    return make_batch(prompt_ids=[list(range(5, 8 + i)) for i in range(rows)], seeds=torch.arange(rows))


def with_loss_columns(batch):
    size = int(lengths(batch["response_ids"]).sum())
    for name, values in (("advantages", torch.ones(size)), ("loss_weights", torch.full((size,), 1 / size))):
        batch[name] = torch.nested.nested_tensor_from_jagged(values, batch["response_ids"].offsets())
    return batch


def test_engines_agree_in_bfloat16_before_and_after_an_update(policy):
    batch = policy.log_probs(policy.generate(batch_of(4)))
    gap = (batch["rollout_log_probs"].values() - batch["old_log_probs"].values()).abs()
    assert gap.mean() < 0.05 and gap.max() < 0.5
    policy.update(with_loss_columns(batch), plain_loss)
    policy.sync_weights()
    again = policy.log_probs(policy.generate(batch_of(4)))
    assert (again["rollout_log_probs"].values() - again["old_log_probs"].values()).abs().mean() < 0.05


def test_vllm_returns_the_experts_of_every_token_and_the_gap_shrinks(mixture):
    batch = mixture.log_probs(mixture.generate(batch_of(16)))
    experts = batch["routed_experts"]
    assert experts.values().dtype == torch.uint8 and experts.values().shape[1:] == (2, 2)
    assert (experts.values() < 8).all() and (experts.values()[..., 0] != experts.values()[..., 1]).all()
    replayed = (batch["rollout_log_probs"].values() - batch["old_log_probs"].values()).abs().mean()
    mixture.set_replay("old")
    del batch["routed_experts"]
    live = mixture.log_probs(batch)
    mixture.set_replay("rollout")
    own = live["routed_experts"].values().sort(-1).values
    assert (own == experts.values().sort(-1).values).float().mean() > 0.9, "most choices are clear in bfloat16, too"
    assert replayed <= (live["rollout_log_probs"].values() - live["old_log_probs"].values()).abs().mean() + 1e-3


def test_each_phase_gives_memory_to_the_other(policy):
    policy.generate(batch_of(2))
    assert policy.training.offloaded
    assert all(p.device.type == "cpu" for p in policy.training.model.parameters())
    sampling = torch.cuda.mem_get_info()[0]
    policy.log_probs(policy.generate(batch_of(2)))
    assert not policy.training.offloaded
    assert torch.cuda.mem_get_info()[0] > sampling, "the sleeping engine must have freed its KV cache"


def test_adapters_reach_the_rollout_engine_and_survive_its_sleep(adapted):
    batch = adapted.log_probs(adapted.generate(batch_of(4)))
    for _ in range(2):
        adapted.update(with_loss_columns(batch), plain_loss)
        batch = adapted.ref_log_probs(adapted.log_probs(adapted.generate(batch_of(4))))
        assert (batch["rollout_log_probs"].values() - batch["old_log_probs"].values()).abs().mean() < 0.05
    assert (batch["ref_log_probs"].values() - batch["old_log_probs"].values()).abs().max() > 0.1
