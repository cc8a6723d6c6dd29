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
def policy(tmp_path_factory):
    pytest.importorskip("vllm")
    folder = tiny_model(tmp_path_factory.mktemp("model"), "llama", hidden_size=256, head_dim=64, num_hidden_layers=4)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29611")
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    cfg = PolicyConfig(
        model=ModelConfig(path=str(folder)), training=TrainingConfig(learning_rate=1e-3),
        rollout=RolloutConfig(max_prompt_tokens=32, max_response_tokens=16, gpu_memory_frac=0.2, enforce_eager=True))
    worker = ProbeWorker(WorkerContext(rank=0, world_size=1, device=torch.device("cuda", 0), role="policy"), cfg)
    yield worker
    worker.close()
    dist.destroy_process_group()


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
