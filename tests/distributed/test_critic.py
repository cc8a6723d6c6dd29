"""The critic on one and two gloo ranks: values, updates and checkpoints are the same."""

from pathlib import Path

import pytest
import torch

from hybridrl.algorithms.partials import finalize
from hybridrl.algorithms.values import ValueLoss
from hybridrl.batch import narrow, rows_of
from hybridrl.config import ModelConfig, TrainingConfig
from hybridrl.workers.base import WorkerContext
from hybridrl.workers.critic import CriticWorker
from tests.distributed.test_training_engine import LAYOUT, SHARES, assert_same_metrics, run
from tests.models import tiny_model
from tests.unit.training.reference import random_batch
from tests.unit.training.test_critic import random_head, set_head, with_targets

pytestmark = pytest.mark.slow
KINDS = ("llama_tied", "qwen3_moe")
SPREADS = ("halves", "one rank has no rows")


def critic(folder):
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    worker = CriticWorker(WorkerContext(rank, ranks, torch.device("cpu"), "critic"), ModelConfig(path=str(folder)),
                          TrainingConfig(learning_rate=1e-3, max_grad_norm=0.5, micro_batch_tokens=40))
    head = worker.training.model.causal_lm.get_output_embeddings().weight
    if ranks == 1:
        set_head(worker.training, random_head())
    else:
        head.to_local().data.copy_(random_head().chunk(ranks)[rank])
    return worker


def rows(batch, sizes):
    """This rank's rows."""
    if torch.distributed.get_world_size() == 1:
        return batch
    start = sum(sizes[:torch.distributed.get_rank()])
    return narrow(batch, start, sizes[torch.distributed.get_rank()])


def compared(metrics):
    """Without what depends on how rows lie."""
    return {name: value for name, value in finalize(metrics).items() if name.removeprefix("critic/") not in LAYOUT}


def scenario(folders: dict[str, Path], scratch: Path) -> dict:
    ranks, result = torch.distributed.get_world_size(), {}
    for kind in KINDS:
        for name in SPREADS:
            sizes = SHARES[name]
            worker, batch = critic(folders[kind]), rows(with_targets(random_batch()), sizes)
            result["first values", kind, name] = [r.tolist() for r in rows_of(worker.values(batch.clone())["values"])]
            result["metrics", kind, name] = [compared(worker.update(batch, ValueLoss())) for _ in range(2)]
            result["values", kind, name] = [r.tolist() for r in rows_of(worker.values(batch.clone())["values"])]
        worker.save(str(scratch / f"{kind}-{ranks}"))
        result["next", kind] = compared(worker.update(batch, ValueLoss()))
    return result


def crossing(folders, scratch):
    """What the other number of ranks saved."""
    result = {}
    for kind in KINDS:
        worker, batch = critic(folders[kind]), rows(with_targets(random_batch()), SHARES["halves"])
        worker.load(str(scratch / f"{kind}-{3 - torch.distributed.get_world_size()}"))
        result["next", kind] = compared(worker.update(batch, ValueLoss()))
    return result


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Results of (function, ranks), by rank."""
    scratch = tmp_path_factory.mktemp("critics")
    folders = {kind: tiny_model(scratch / kind, kind) for kind in KINDS}
    return {(work.__name__, ranks): run(ranks, work, folders, scratch)
            for work in (scenario, crossing) for ranks in (1, 2)}


@pytest.mark.parametrize("name", SPREADS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_updates_do_not_depend_on_ranks(outcome, kind, name):
    (one,), two = outcome["scenario", 1], outcome["scenario", 2]
    for column, near in (("first values", 1e-4), ("values", 1e-3)):  # AdamW's first steps amplify rounding
        joined = two[0][column, kind, name] + two[1][column, kind, name]
        for ours, theirs in zip(joined, one[column, kind, name], strict=True):
            assert ours == pytest.approx(theirs, abs=near)
    assert two[0]["metrics", kind, name] == two[1]["metrics", kind, name]
    assert_same_metrics(two[0]["metrics", kind, name], one["metrics", kind, name], rel=1e-3)
    assert one["metrics", kind, name][0]["critic/grad_norm"] > 0.5, "clipping took part"
    assert one["first values", kind, name] != one["values", kind, name]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_goes_on_with_another_number_of_ranks(outcome, kind, ranks):
    following, crossed = outcome["scenario", 3 - ranks][0]["next", kind], outcome["crossing", ranks][0]["next", kind]
    assert_same_metrics([crossed], [following], rel=1e-3)
