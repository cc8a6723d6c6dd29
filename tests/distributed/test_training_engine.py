"""The training engine on two gloo processes gives what it gives on one: values, gradients, checkpoints, errors."""

import shutil
import time
import traceback
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.batch import narrow, rows_of, select
from hybridrl.config import ModelConfig, TrainingConfig
from hybridrl.errors import BatchError, CheckpointError, ModelError
from tests.models import KINDS, tiny_model
from tests.unit.training.reference import policy_gradient, random_batch

pytestmark = pytest.mark.slow
TIMEOUT_S = 240
CPU = torch.device("cpu")
OPTIONS = dict(learning_rate=1e-2, max_grad_norm=50.0, warmup_steps=2, micro_batch_tokens=60, logits_chunk_tokens=7)
LAYOUT = {"micro_batches", "balance_ranks", "balance_micro_batches"}
"""Metrics that say how the work was cut."""
SHARES = {"halves": (4, 3), "one rank has no rows": (7, 0), "one rank has more": (1, 6)}


def engine(path, dtype=torch.float64, **options):
    from hybridrl.workers.training.engine import TrainingEngine
    return TrainingEngine(ModelConfig(path=str(path)), TrainingConfig(**(OPTIONS | options)), CPU, dtype=dtype)


class Reductions(TorchDispatchMode):
    """Counts what adds gradients up over ranks."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += "reduce_scatter" in str(function)
        return function(*args, **(kwargs or {}))


def share(batch, sizes=None):
    """This rank's rows: all on one rank, else `sizes` (by default halves)."""
    if dist.get_world_size() == 1:
        return batch
    sizes = sizes or SHARES["halves"]
    start = sum(sizes[:dist.get_rank()])
    return narrow(batch, start, sizes[dist.get_rank()])


def weights_of(ours):
    return {name: weight.full_tensor().clone() for name, weight in ours.weights()}


def train(ours, steps, sizes=None, first=0):
    return [ours.update(share(random_batch(seed=seed), sizes), policy_gradient, 0.7, entropies=True)
            for seed in range(first, first + steps)]


def error_of(call, *kinds):
    """Kind and message of the error that `call` raises on this rank."""
    try:
        call()
    except kinds as error:
        return type(error).__name__, str(error)
    return "none", ""


def scenario(folders: dict[str, Path], scratch: Path) -> dict:
    """Everything that the tests compare; runs on each rank."""
    ranks, result = dist.get_world_size(), {}
    for kind in KINDS:
        ours = engine(folders[kind])
        result["loaded", kind] = weights_of(ours)
        scored = ours.log_probs(share(random_batch(seed=9)), 0.7, entropies=True)
        result["log_probs", kind] = [row.tolist() for row in rows_of(scored["log_probs"])]
        result["entropies", kind] = [row.tolist() for row in rows_of(scored["entropies"])]
        result["metrics", kind] = train(ours, 3)
        result["weights", kind] = weights_of(ours)
        result["names", kind] = list(result["weights", kind])
        result["num_parameters", kind] = ours.num_parameters
        result["memory", kind] = ours.memory()
    for name, sizes in SHARES.items():
        for budget in (15, 1000):
            ours = engine(folders["llama_tied"], micro_batch_tokens=budget)
            result["cut", name, budget] = train(ours, 2, sizes)
            result["cut weights", name, budget] = weights_of(ours)
    for mode in ("layers", "selective"):
        result["recomputed", mode] = train(engine(folders["llama"], gradient_checkpointing=mode), 3)
    with patch("hybridrl.workers.training.sharded_model.check_offload"):  # it works without a GPU, to no avail
        ours = engine(folders["llama"], offload="always")
        result["offloaded"], result["offloaded weights"] = train(ours, 3), weights_of(ours)
    for gib in (0.0, 4.0):
        ours = engine(folders["llama_tied"], micro_batch_tokens=30, whole_gradient_gib=gib)
        with Reductions() as reductions:
            result["accumulated", gib] = train(ours, 3, SHARES["one rank has more"])
        result["accumulated weights", gib] = weights_of(ours)
        result["reductions", gib] = reductions.number
    saving(folders, scratch, ranks, result)
    failing(folders, scratch, result)
    return result


def saving(folders, scratch, ranks, result):
    """Save here for both rank counts to load, and go on, in float32 as users run."""
    from transformers import AutoTokenizer
    for kind in ("llama_tied", "qwen3_moe"):
        ours = engine(folders[kind], torch.float32)
        train(ours, 2)
        ours.save(scratch / f"{kind}-{ranks}")
        result["continued", kind] = train(ours, 2, first=2)
        result["continued weights", kind] = weights_of(ours)
        resumed = engine(folders[kind], torch.float32)
        resumed.load(scratch / f"{kind}-{ranks}")
        result["resumed", kind] = train(resumed, 2, first=2)
        result["resumed weights", kind] = weights_of(resumed)
        ours.export(scratch / f"export-{kind}-{ranks}", AutoTokenizer.from_pretrained(folders[kind]))


def failing(folders, scratch, result):
    """Errors that start on one rank must reach both."""
    result["missing weight"] = error_of(lambda: engine(folders["broken"]), ModelError)
    occupied = scratch / f"llama_tied-{dist.get_world_size()}"
    ours = engine(folders["llama_tied"], torch.float32)
    result["occupied"] = error_of(lambda: ours.save(occupied), CheckpointError)
    empty = select(random_batch(), [])
    result["no rows"] = error_of(lambda: ours.update(empty, policy_gradient), BatchError)
    result["no rows scored"] = len(rows_of(ours.log_probs(empty)["log_probs"]))


def crossing(folders, scratch):
    """What the other number of ranks saved, loaded here and trained on."""
    ranks, result = dist.get_world_size(), {}
    for kind in ("llama_tied", "qwen3_moe"):
        ours = engine(folders[kind], torch.float32)
        ours.load(scratch / f"{kind}-{3 - ranks}")
        result["crossed start", kind] = weights_of(ours)
        result["crossed", kind] = train(ours, 2, first=2)
    return result


def run_rank(rank, ranks, work, folders, scratch):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store-{work.__name__}-{ranks}", rank=rank,
                            world_size=ranks, timeout=timedelta(seconds=TIMEOUT_S))
    try:
        torch.save(work(folders, scratch), scratch / f"{work.__name__}-{ranks}-{rank}.pt")
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        dist.destroy_process_group()


def run(ranks, work, folders, scratch):
    """Results of `work` on each rank; fails when a rank fails or the time is up."""
    processes = mp.spawn(run_rank, (ranks, work, folders, scratch), nprocs=ranks, join=False)
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while not processes.join(timeout=5):  # returns when any of them ends
            if time.monotonic() > deadline:
                pytest.fail(f"{work.__name__} on {ranks} ranks did not end within {TIMEOUT_S} s")
    finally:
        for process in processes.processes:
            process.kill()
    return [torch.load(scratch / f"{work.__name__}-{ranks}-{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Results by (number of ranks, rank)."""
    scratch = tmp_path_factory.mktemp("ranks")
    folders = {kind: tiny_model(scratch / kind, kind) for kind in KINDS}
    folders["broken"] = scratch / "broken"
    shutil.copytree(folders["llama"], folders["broken"])
    weights = load_file(folders["broken"] / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folders["broken"] / "model.safetensors", metadata={"format": "pt"})
    results = {}
    for ranks in (1, 2):
        for rank, result in enumerate(run(ranks, scenario, folders, scratch)):
            results[ranks, rank] = result
    for ranks in (1, 2):
        for rank, result in enumerate(run(ranks, crossing, folders, scratch)):
            results[ranks, rank].update(result)
    results["scratch"], results["folders"] = scratch, folders
    return results


def assert_same_metrics(ours, theirs, rel):
    for a, b in zip(ours, theirs, strict=True):
        assert set(a) == set(b)
        for name in (name for name in a if name.removeprefix("train/") not in LAYOUT):
            assert a[name] == pytest.approx(b[name], rel=rel, abs=rel), name


def assert_same_weights(ours, theirs, atol):
    assert list(ours) == list(theirs)
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kind", KINDS)
def test_shards_hold_the_folder(outcome, kind):
    one, two = outcome[1, 0], outcome[2, 0]
    assert_same_weights(two["loaded", kind], one["loaded", kind], atol=0)
    assert two["names", kind] == one["names", kind]
    assert two["num_parameters", kind] == one["num_parameters", kind]
    for name in ("parameters", "optimizer"):  # no rank holds the whole
        assert outcome[2, 0]["memory", kind][name] < 0.51 * one["memory", kind][name]
        assert outcome[2, 1]["memory", kind][name] < 0.51 * one["memory", kind][name]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["log_probs", "entropies"])
def test_scores_do_not_depend_on_ranks(outcome, kind, name):
    two = outcome[2, 0][name, kind] + outcome[2, 1][name, kind]
    for ours, theirs in zip(two, outcome[1, 0][name, kind], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_updates_do_not_depend_on_ranks(outcome, kind):
    assert_same_metrics(outcome[2, 0]["metrics", kind], outcome[1, 0]["metrics", kind], rel=1e-10)
    assert_same_weights(outcome[2, 0]["weights", kind], outcome[1, 0]["weights", kind], atol=1e-9)
    assert outcome[1, 0]["metrics", kind][0]["grad_norm"] > OPTIONS["max_grad_norm"]  # clipping took part
    moved = (outcome[1, 0]["weights", kind][name] - weight for name, weight in outcome[1, 0]["loaded", kind].items())
    assert all(difference.abs().max() > 1e-3 for difference in moved)


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_report_the_same(outcome, kind):
    assert outcome[2, 0]["metrics", kind] == outcome[2, 1]["metrics", kind]
    assert_same_weights(outcome[2, 0]["weights", kind], outcome[2, 1]["weights", kind], atol=0)


@pytest.mark.parametrize("name", SHARES)
@pytest.mark.parametrize("budget", [15, 1000])
def test_how_rows_are_spread_does_not_matter(outcome, name, budget):
    expected = outcome[1, 0]["cut", "halves", 1000]
    assert_same_metrics(outcome[2, 0]["cut", name, budget], expected, rel=1e-10)
    assert_same_weights(outcome[2, 0]["cut weights", name, budget],
                        outcome[1, 0]["cut weights", "halves", 1000], atol=1e-9)
    assert outcome[2, 0]["cut", name, budget] == outcome[2, 1]["cut", name, budget]


@pytest.mark.parametrize("mode", ["layers", "selective"])
def test_recomputed_layers_on_shards(outcome, mode):
    assert_same_metrics(outcome[2, 0]["recomputed", mode], outcome[1, 0]["metrics", "llama"], rel=1e-10)


def test_parameters_that_live_in_cpu_memory(outcome):
    assert_same_metrics(outcome[2, 0]["offloaded"], outcome[1, 0]["metrics", "llama"], rel=1e-10)
    assert_same_weights(outcome[2, 0]["offloaded weights"], outcome[2, 0]["weights", "llama"], atol=0)


def test_gradients_are_added_up_over_ranks_once_an_update(outcome):
    """Held whole in between or sharded after each micro-batch: the same numbers, several times the traffic."""
    once, each = (outcome[2, 0]["accumulated", gib] for gib in (4.0, 0.0))
    assert_same_metrics(once, each, rel=1e-12)
    weights = (outcome[2, 0]["accumulated weights", gib] for gib in (4.0, 0.0))
    assert_same_weights(*weights, atol=1e-10)
    units = 3  # two layers, and the rest of the model
    assert outcome[2, 0]["reductions", 4.0] == 3 * units
    assert outcome[2, 0]["reductions", 0.0] == units * sum(row["micro_batches"] for row in each) > 6 * units


def test_balance_of_two_ranks(outcome):
    """The rank with 6 of 7 rows has most of the work, and both make as many micro-batches."""
    row = outcome[2, 0]["cut", "one rank has more", 15][0]
    assert 1.5 < row["balance_ranks"] <= 2 < row["balance_micro_batches"]
    assert outcome[1, 0]["cut", "halves", 1000][0]["balance_ranks"] == 1


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_moe"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_resume_on_as_many_ranks_is_exact(outcome, kind, ranks):
    result = outcome[ranks, 0]
    assert result["resumed", kind] == result["continued", kind]
    assert_same_weights(result["resumed weights", kind], result["continued weights", kind], atol=0)


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_moe"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_resume_on_another_number_of_ranks(outcome, kind, ranks):
    """Here `ranks` load what 3 - ranks saved."""
    assert_same_metrics(outcome[ranks, 0]["crossed", kind], outcome[3 - ranks, 0]["continued", kind], rel=2e-4)


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_moe"])
def test_exports_of_one_and_two_ranks_agree(outcome, kind):
    one, two = (load_file(outcome["scratch"] / f"export-{kind}-{ranks}" / "model.safetensors") for ranks in (1, 2))
    assert set(one) == set(two) == set(load_file(outcome["folders"][kind] / "model.safetensors"))
    if kind == "llama_tied":
        assert_same_weights({name: two[name] for name in one if name in outcome[2, 0]["continued weights", kind]},
                            {name: outcome[2, 0]["continued weights", kind][name] for name in one}, atol=0)
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=2e-2)  # Adam's sign steps amplify rounding


@pytest.mark.parametrize("rank", [0, 1])
def test_errors_reach_every_rank(outcome, rank):
    result = outcome[2, rank]
    kind, message = result["missing weight"]
    assert kind == "ModelError"
    assert "lacks weights that its config asks for: model.norm.weight" in message
    kind, message = result["occupied"]
    assert kind == "CheckpointError"
    assert "already holds a checkpoint" in message
    assert result["no rows"][0] == "BatchError"
    assert result["no rows scored"] == 0
