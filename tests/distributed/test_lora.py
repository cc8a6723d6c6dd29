"""Adapters on two gloo processes give what they give on one: frozen and trained parameters in one FSDP unit."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridrl.batch import rows_of
from hybridrl.config import LoRAConfig
from hybridrl.errors import ConfigError
from hybridrl.workers.training import models
from tests.distributed.test_training_engine import (
    assert_same_metrics,
    assert_same_weights,
    engine,
    error_of,
    run,
    share,
    train,
    weights_of,
)
from tests.models import tiny_model
from tests.unit.training.reference import policy_gradient, random_batch

pytestmark = pytest.mark.slow
KINDS = ("llama_tied", "qwen3_moe")
LORA = LoRAConfig(rank=3, alpha=6)  # a rank that two processes share unevenly


def adapters_of(ours):
    return {name: value.full_tensor().clone() for name, value in ours.adapters()}


def scenario(folders: dict[str, Path], scratch: Path) -> dict:
    """Runs on each rank; the other number of ranks has saved its half before the second one begins."""
    ranks, result = dist.get_world_size(), {}
    for kind in KINDS:
        ours = engine(folders[kind], lora=LORA)
        result["loaded", kind], result["start", kind] = weights_of(ours), adapters_of(ours)
        result["metrics", kind] = train(ours, 3)
        result["weights", kind], result["adapters", kind] = weights_of(ours), adapters_of(ours)
        scored = ours.base_log_probs(share(random_batch(seed=9)))
        result["reference", kind] = [row.tolist() for row in rows_of(scored)]
        result["one rank has no rows", kind] = train(ours, 1, (7, 0), first=5)
        result["memory", kind] = ours.memory()
    ours = engine(folders["llama_tied"], torch.float32, lora=LORA)
    train(ours, 2)
    ours.save(scratch / str(ranks))
    result["continued"] = train(ours, 2, first=2)
    bad = LoRAConfig(rank=3, targets=["q"])
    result["bad target"] = error_of(lambda: engine(folders["llama"], lora=bad), ConfigError)
    return result


def crossing(folders, scratch):
    """What the other number of ranks saved, loaded here and trained on."""
    ours = engine(folders["llama_tied"], torch.float32, lora=LORA)
    ours.load(scratch / str(3 - dist.get_world_size()))
    return {"crossed": train(ours, 2, first=2)}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Results by (number of ranks, rank). One rank is this process."""
    scratch = tmp_path_factory.mktemp("ranks")
    folders = {kind: tiny_model(scratch / kind, kind) for kind in (*KINDS, "llama")}
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
    try:
        results = {(1, 0): scenario(folders, scratch)}
        for rank, result in enumerate(run(2, both, folders, scratch)):
            results[2, rank] = result
        results[1, 0].update(crossing(folders, scratch))
    finally:
        dist.destroy_process_group()
    return results


def both(folders, scratch):
    result = scenario(folders, scratch) | crossing(folders, scratch)
    replicas = engine(folders["llama_tied"], lora=LORA, shard_ranks=1)
    result["replicas"], result["replicas weights"] = train(replicas, 3), weights_of(replicas)
    context = engine(folders["llama_tied"], lora=LORA, context_parallel=2)
    result["context"] = [context.update(random_batch(seed=seed), policy_gradient, 0.7, entropies=True)
                         for seed in range(3)]
    return result | {"bfloat16": in_bfloat16(folders)}


def in_bfloat16(folders):
    models.compute_dtype = lambda device: torch.bfloat16
    ours = engine(folders["llama_tied"], torch.float32, lora=LORA)
    dtypes = {trained: {str(p.dtype) for p in ours.model.parameters() if p.requires_grad == trained}
              for trained in (True, False)}
    return {"metrics": train(ours, 3), "trained": dtypes[True], "base": dtypes[False]}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_start_alike(outcome, kind):
    for name in ("loaded", "start"):
        assert_same_weights(outcome[2, 0][name, kind], outcome[1, 0][name, kind], atol=0)
    assert any(value.any() for value in outcome[2, 0]["start", kind].values())


@pytest.mark.parametrize("kind", KINDS)
def test_updates_do_not_depend_on_ranks(outcome, kind):
    one = outcome[1, 0]
    for rank in (0, 1):
        two = outcome[2, rank]
        assert_same_metrics(two["metrics", kind], one["metrics", kind], rel=1e-10)
        assert_same_metrics(two["one rank has no rows", kind], one["one rank has no rows", kind], rel=1e-10)
        assert_same_weights(two["weights", kind], one["weights", kind], atol=1e-9)
        assert_same_weights(two["adapters", kind], one["adapters", kind], atol=1e-9)
    moved = [name for name, old in one["loaded", kind].items() if not torch.equal(one["weights", kind][name], old)]
    assert len(moved) == len(one["adapters", kind]) / 2


def test_updates_do_not_depend_on_replicas_and_shared_rows(outcome):
    one, two = outcome[1, 0], outcome[2, 1]
    for name in ("replicas", "context"):
        assert_same_metrics(two[name], one["metrics", "llama_tied"], rel=1e-10)
    assert_same_weights(two["replicas weights"], one["weights", "llama_tied"], atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_does_not_depend_on_ranks(outcome, kind):
    two = outcome[2, 0]["reference", kind] + outcome[2, 1]["reference", kind]
    for ours, theirs in zip(two, outcome[1, 0]["reference", kind], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rank_holds_the_whole(outcome, kind):
    for rank in (0, 1):
        for name, frac in (("parameters", 0.51), ("optimizer", 0.7)):  # of 3 rows one rank has 2
            assert outcome[2, rank]["memory", kind][name] < frac * outcome[1, 0]["memory", kind][name]


@pytest.mark.parametrize("ranks", [1, 2])
def test_resume_on_another_number_of_ranks(outcome, ranks):
    assert_same_metrics(outcome[ranks, 0]["crossed"], outcome[3 - ranks, 0]["continued"], rel=2e-4)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_target_that_matches_nothing_is_everybodys_error(outcome, rank):
    kind, message = outcome[2, rank]["bad target"]
    assert kind == "ConfigError" and "'q' names no linear layer" in message


def test_a_frozen_base_in_bfloat16_beneath_float32_adapters(outcome):
    """As on CUDA, on gloo: one FSDP unit with two dtypes."""
    for rank in (0, 1):
        result = outcome[2, rank]["bfloat16"]
        assert result["base"] == {"torch.bfloat16"} and result["trained"] == {"torch.float32"}
        assert result["metrics"] == outcome[2, 0]["bfloat16"]["metrics"]
        for ours, theirs in zip(result["metrics"], outcome[1, 0]["metrics", "llama_tied"], strict=True):
            # Of tokens that add up to about 150 without their signs, two decimal digits.
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=5)
