"""From a training model to what an engine loads: buckets of full weights, under the names of a checkpoint."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hybridrl.config import SyncConfig
from hybridrl.errors import SyncError
from hybridrl.workers.weights.buckets import full_buckets
from hybridrl.workers.weights.names import checkpoint_buckets, tied_names
from hybridrl.workers.weights.sync import check_gap
from tests.models import KINDS, tiny_model


def tensors(**sizes):
    return [(name, torch.arange(size, dtype=torch.float32)) for name, size in sizes.items()]


def grouped(weights, bucket_bytes, dtype=torch.float32):
    return [[name for name, _ in bucket] for bucket in full_buckets(weights, dtype, bucket_bytes)]


# Buckets of plain tensors; a float32 element has 4 bytes


@pytest.mark.parametrize("bucket_bytes, expected", [
    (16, [["a", "b"], ["c"], ["d", "e"]]),  # a and b fill one exactly
    (15, [["a"], ["b"], ["c"], ["d", "e"]]),
    (17, [["a", "b"], ["c"], ["d", "e"]]),
    (1, [["a"], ["b"], ["c"], ["d"], ["e"]]),
    (1000, [["a", "b", "c", "d", "e"]]),
])
def test_buckets_are_filled_up_to_their_size(bucket_bytes, expected):
    assert grouped(tensors(a=2, b=2, c=4, d=1, e=1), bucket_bytes) == expected


def test_a_tensor_larger_than_a_bucket_has_its_own():
    assert grouped(tensors(a=1, b=100, c=1, d=1), 16) == [["a"], ["b"], ["c", "d"]]
    assert grouped(tensors(b=100, c=1), 16) == [["b"], ["c"]]
    assert grouped([], 16) == []


def test_size_counts_in_the_engines_dtype_and_values_are_cast():
    weights = [("a", torch.tensor([1 + 2**-12, 3.0])), ("b", torch.tensor([0.1]))]
    assert grouped(weights, 6, torch.bfloat16) == [["a", "b"]]
    assert grouped(weights, 6, torch.float32) == [["a"], ["b"]]
    (bucket,) = full_buckets(weights, torch.bfloat16, 6)
    assert {name: (value.dtype, value.tolist()) for name, value in bucket} == {
        "a": (torch.bfloat16, [1.0, 3.0]), "b": (torch.bfloat16, [0.10009765625])}


def test_buckets_are_made_when_they_are_asked_for():
    drawn = []

    def weights():
        for name, value in tensors(a=4, b=4, c=4):
            drawn.append(name)
            yield name, value

    buckets = full_buckets(weights(), torch.float32, 16)
    assert drawn == []
    assert [name for name, _ in next(buckets)] == ["a"]
    assert drawn == ["a", "b"]


# Names


@pytest.fixture(scope="module", params=KINDS)
def saved(request, tmp_path_factory):
    """A model as training holds it, and the tensors of its file."""
    from transformers import AutoModelForCausalLM

    folder = tiny_model(tmp_path_factory.mktemp(request.param), request.param)
    return request.param, AutoModelForCausalLM.from_pretrained(folder), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("bucket_bytes", [1, 20_000, 1 << 30])
def test_names_and_values_are_those_of_the_saved_file(saved, bucket_bytes):
    kind, model, file = saved
    buckets = checkpoint_buckets(model, full_buckets(model.named_parameters(), torch.float32, bucket_bytes))
    sent = [pair for bucket in buckets for pair in bucket]
    weights = dict(sent)
    assert len(weights) == len(sent), "each name once"
    if kind == "llama_tied":  # written once by save_pretrained; an engine packs the head apart
        torch.testing.assert_close(weights.pop("lm_head.weight"), file["model.embed_tokens.weight"], atol=0, rtol=0)
    assert weights.keys() == file.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, file[name], atol=0, rtol=0)


def test_experts_go_one_by_one(saved):
    kind, model, file = saved
    experts = [name for name in file if ".experts." in name]
    assert len(experts) == (2 * 4 * 3 if kind == "qwen3_moe" else 0)  # layers, experts, projections
    assert any("experts.gate_up_proj" in name for name, _ in model.named_parameters()) == (kind == "qwen3_moe")


def test_tied_names(saved):
    kind, model, _ = saved
    expected = {"model.embed_tokens.weight": ["lm_head.weight"]} if kind == "llama_tied" else {}
    assert tied_names(model) == expected


# Shards on two ranks

SHAPES = {"even": (4, 3), "uneven": (5, 2), "one_row": (1, 7), "vector": (3,), "cube": (3, 2, 2), "empty": (0, 4)}


def whole_weights():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gather_on_two_ranks(rank, file, failures):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2,
                            timeout=timedelta(seconds=60))
    try:
        mesh, whole = init_device_mesh("cpu", (2,)), whole_weights()
        sharded = [(name, distribute_tensor(value, mesh, [Shard(0)])) for name, value in whole.items()]
        mixed = [*sharded[:2], ("plain", whole["cube"]), *sharded[2:]]
        columns = [("columns", distribute_tensor(whole["even"], mesh, [Shard(1)])),
                   ("copies", distribute_tensor(whole["uneven"], mesh, [Replicate()]))]
        expected = {**whole, "plain": whole["cube"], "columns": whole["even"], "copies": whole["uneven"]}
        held = {name: tuple(weight.to_local().shape) for name, weight in sharded}
        assert (held["uneven"], held["one_row"]) == [((3, 2), (1, 7)), ((2, 2), (0, 7))][rank]
        for weights in (sharded, mixed, columns):
            for dtype in (torch.float32, torch.bfloat16):
                for bucket_bytes in (1, 50, 1 << 20):
                    sent = [pair for bucket in full_buckets(weights, dtype, bucket_bytes) for pair in bucket]
                    assert [name for name, _ in sent] == [name for name, _ in weights]
                    for name, value in sent:
                        torch.testing.assert_close(value, expected[name].to(dtype), atol=0, rtol=0)
    except BaseException as error:
        failures.put(f"rank {rank}: {error!r}")
        raise
    finally:
        dist.destroy_process_group()


def test_shards_of_two_ranks_become_whole(tmp_path):
    context = multiprocessing.get_context("spawn")
    failures = context.SimpleQueue()
    processes = multiprocessing.start_processes(
        gather_on_two_ranks, args=(tmp_path / "meeting", failures), nprocs=2, join=False, start_method="spawn")
    try:
        ended = any(processes.join(timeout=5) for _ in range(24))
    except Exception:
        ended = True
    for process in processes.processes:
        process.kill()
    assert ended, "the ranks wait for each other"
    assert failures.empty(), failures.get()
    assert [process.exitcode for process in processes.processes] == [0, 0]


# The gap between the engines


@pytest.mark.parametrize("gap, max_gap, message", [
    (0.9e-3, 0.0, None), (1.1e-3, 0.0, "differ by 0.0011, more than the accepted 0.001"),
    (1.1e-3, 1.0, None), (torch.inf, 1.0, "log-probs are not finite: training has diverged"),
])
def test_a_gap_is_accepted_or_refused_with_its_reason(gap, max_gap, message):
    if message is None:
        return check_gap(gap, SyncConfig(max_gap=max_gap), torch.float32, version=7)
    with pytest.raises(SyncError, match=message) as caught:
        check_gap(gap, SyncConfig(max_gap=max_gap), torch.float32, version=7)
    assert "weight sync 7" in str(caught.value)
