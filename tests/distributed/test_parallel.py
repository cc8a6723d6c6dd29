"""Replicas, and sequences split over ranks, give what one rank gives: log-probs, losses, gradients, checkpoints."""

import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from hybridrl.algorithms.algorithm import Algorithm
from hybridrl.algorithms.values import ValueLoss
from hybridrl.batch import make_batch, narrow, rows_of, split_sizes
from hybridrl.config import AlgorithmConfig, Choice, EntropyConfig, ModelConfig, TrainingConfig
from hybridrl.controller.cluster import cpu_cores
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.errors import ConfigError, ModelError
from hybridrl.workers.trainer import TrainerWorker
from hybridrl.workers.weights.exchange import Traffic, exchange, sharding
from hybridrl.workers.weights.plan import make_plan
from hybridrl.workers.weights.regions import Copy, whole
from tests.distributed.test_training_engine import (
    assert_same_metrics,
    assert_same_weights,
    error_of,
    run,
    weights_of,
)
from tests.models import tiny_model
from tests.unit.training.reference import policy_gradient, random_batch
from tests.unit.training.test_critic import random_head, with_targets

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
OPTIONS = dict(learning_rate=1e-2, max_grad_norm=50.0, micro_batch_tokens=30, logits_chunk_tokens=7)
LAYOUTS = {
    1: {"one rank": {}},
    2: {"replicas": dict(shard_ranks=1), "context": dict(context_parallel=2),
        "context of replicas": dict(context_parallel=2, shard_ranks=1, whole_gradient_gib=0),
        "context, recomputed": dict(context_parallel=2, gradient_checkpointing="layers")},
    4: {"replicas": dict(shard_ranks=2), "sharded gradients": dict(shard_ranks=2, whole_gradient_gib=0),
        "context": dict(context_parallel=2),
        "context in replicas": dict(context_parallel=4, shard_ranks=2)},
}
SCORED = {"llama": {}, "qwen2": dict(use_sliding_window=True, sliding_window=4, max_window_layers=1), "qwen3_moe": {}}
"""Kinds of model, with heads for four ranks; key heads are fewer."""


OPTIMIZERS = ["muon", *(["adamw_8bit"] if find_spec("torchao") else [])]


def resharded(ours):
    """The weights as they come to a rollout engine that takes all of them whole."""
    weights, group = sharding(ours.weights())
    copies = [Copy(w.name, whole(w.shape), w.name, whole(w.shape)) for w in weights]
    members = dist.get_process_group_ranks(group) if group else [dist.get_rank()]
    plan = make_plan(weights, [copies] * len(members), members.index(dist.get_rank()), 10_000)
    result = {w.name: torch.empty(w.shape) for w in weights}
    for name, target, values in (write for some in exchange(ours.weights(), plan, torch.float32, group, Traffic())
                                 for write in some):
        target.of(result[name]).copy_(values)
    return result


def engine(path, dtype=torch.float64, module=None, **options):
    from hybridrl.workers.training.engine import TrainingEngine
    from hybridrl.workers.training.models import PolicyModel
    return TrainingEngine(ModelConfig(path=str(path)), TrainingConfig(**(OPTIONS | options)), CPU, dtype=dtype,
                          module=module or PolicyModel)


def share(batch, options):
    """This rank's rows: those of the ranks it shares them with."""
    size = options.get("context_parallel", 1)
    sizes = split_sizes(len(rows_of(batch["prompt_ids"])), dist.get_world_size() // size)
    shard = dist.get_rank() // size
    return narrow(batch, sum(sizes[:shard]), sizes[shard])


def long_batch(seed=0):
    """Rows of up to 50 tokens, several to a pack, and an empty response."""
    return random_batch(seed=seed, longest_prompt=12, longest_response=40)


def gspo_batch():
    """The whole mini-batch as the loop hands it over, and its loss: ratios of rows, row means, entropy bonus."""
    batch, g = long_batch(3), torch.Generator().manual_seed(1)
    sizes = [len(row) for row in rows_of(batch["response_ids"])]
    batch = make_batch(prompt_ids=rows_of(batch["prompt_ids"]), response_ids=rows_of(batch["response_ids"]),
                       response_mask=[torch.rand(n, generator=g) < 0.8 for n in sizes], group_ids=[0, 0, 0, 1, 1, 2, 2],
                       advantages=[torch.randn(n, generator=g) for n in sizes],
                       old_log_probs=[-4 * torch.rand(n, generator=g) for n in sizes])
    algorithm = Algorithm(AlgorithmConfig(
        loss=Choice(name="gspo", options=dict(clip_low=2.0, clip_high=2.0)), corrections=[],
        aggregation="seq-mean-token-mean", entropy=EntropyConfig(coefficient=0.1)), max_response_tokens=40)
    (mini_batch,) = algorithm.mini_batches(batch)
    return mini_batch, algorithm.loss


def train(ours, options, steps=2):
    return [ours.update(share(long_batch(seed), options), policy_gradient, 0.7, entropies=True)
            for seed in range(steps)]


def scenario(folders: dict[str, Path], scratch: Path) -> dict:
    ranks, result = dist.get_world_size(), {}
    for name, options in LAYOUTS[ranks].items():
        for kind in SCORED if name in ("one rank", "replicas", "context") and ranks < 4 else ["llama"]:
            ours = engine(folders[kind], **options)
            scored = ours.log_probs(share(long_batch(9), options), 0.7, entropies=True)
            for column in ("log_probs", "entropies"):
                result[column, kind, name] = [row.tolist() for row in rows_of(scored[column])]
            result["metrics", kind, name] = train(ours, options)
            result["weights", kind, name] = weights_of(ours)
        batch, loss = gspo_batch()
        ours = engine(folders["llama"], **options)
        result["gspo", name] = [ours.update(share(batch, options), loss, entropies=True)]
        result["gspo weights", name] = weights_of(ours)
        result["critic", name] = [critic(folders["llama"], options).update(
            share(with_targets(random_batch()), options), ValueLoss())]
        result["teacher", name] = teacher(folders["llama"], options)
        result["bad loss", name] = bad_loss(folders["llama"], options)
        ours = engine(folders["llama"], torch.float32, **options)
        train(ours, options)
        ours.save(scratch / f"{ranks} {name}")
        ours.update(share(long_batch(7), options), policy_gradient)
        result["continued", name] = weights_of(ours)
        if name == "replicas":
            result["layout"] = [(w.device_mesh.mesh.tolist(), w.placements) for _, w in ours.weights()]
            result["memory"], result["num_parameters"] = ours.memory()["parameters"], ours.num_parameters
            result["resharded"] = resharded(ours)
    for optimizer in OPTIMIZERS:
        for name, options in {"shards": {}, "replicas": dict(shard_ranks=1)}.items():
            saved = scratch / f"{optimizer}-{ranks}-{name}"
            result[optimizer, name] = optimized(folders["llama"], options, optimizer, saved)
        saved = scratch / f"{optimizer}-1-shards"
        result[optimizer, "crossed"] = optimized(folders["llama"], {}, optimizer, saved, load=True)
    result["heads"] = error_of(lambda: engine(folders["llama_3"], context_parallel=ranks), ModelError)
    result["ranks"] = [error_of(lambda name=name: engine(folders["llama"], **{name: 3}), ConfigError)
                       for name in ("shard_ranks", "context_parallel")]
    return result | loading(folders, scratch)


def loading(folders, scratch):
    """Every checkpoint there is, loaded in every layout of this many ranks, and one more step."""
    ranks, result = dist.get_world_size(), {}
    for name, options in LAYOUTS[ranks].items():
        for saved in sorted(filter(Path.is_dir, scratch.glob("* *"))):  # on every rank in the same order
            ours = engine(folders["llama"], torch.float32, **options)
            ours.load(saved)
            ours.update(share(long_batch(7), options), policy_gradient)
            result["loaded", saved.name, name] = weights_of(ours)
    return result


def optimized(folder, options, optimizer, saved, load=False):
    """Weights after two steps, a checkpoint and one more step; the last alone with `load`."""
    dtype = torch.float64 if optimizer == "muon" else torch.float32
    options = options | dict(optimizer=optimizer, learning_rate=1e-3)
    weights = []
    for restart in (load, True):
        ours = engine(folder, dtype, **options)
        if restart:
            ours.load(saved)
        else:
            train(ours, options)
            ours.save(saved)
        ours.update(share(long_batch(7), options), policy_gradient)
        weights.append(weights_of(ours))
    return weights


def critic(folder, options):
    """A value model with the head of the other tests."""
    from hybridrl.workers.training.models import ValueModel
    ours = engine(folder, module=ValueModel, **options)
    head = ours.model.causal_lm.get_output_embeddings().weight
    with torch.no_grad():
        if dist.get_world_size() == 1:
            head.copy_(random_head())
        else:
            from torch.distributed.tensor import distribute_tensor
            head.copy_(distribute_tensor(random_head().double(), head.device_mesh, head.placements))
    return ours


def teacher(folder, options):
    """Likeliest tokens and their log-probs."""
    from hybridrl.workers.training.frozen import TeacherModel
    ours = engine(folder, module=TeacherModel, **options)
    ours.model.top_k = 3
    found = ours.top_log_probs(share(long_batch(), options))
    return [[row.flatten().tolist() for row in rows_of(found[name])] for name in ("top_ids", "log_probs")]


def bad_loss(folder, options):
    """A gradient that is not finite on the ranks of one row alone: who skipped the step, and who moved."""
    ours = engine(folder, max_skipped_steps=1, **options)
    before = weights_of(ours)

    def loss(log_probs, columns, entropies):
        return log_probs.sum() * (math.nan if (columns["rewards"] == 7).any() else 1), {}

    batch = random_batch()
    batch["rewards"] = torch.tensor([0.0, 0, 0, 0, 0, 0, 7])
    metrics = ours.update(share(batch, options), loss)
    moved = any(not torch.equal(w, before[name]) for name, w in weights_of(ours).items())
    from hybridrl.errors import TrainingError
    return metrics["skipped"], moved, error_of(lambda: ours.update(share(batch, options), loss), TrainingError)


def one_rank(work, folders, scratch):
    """Results of `work` in this process."""
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store-{work.__name__}", rank=0, world_size=1)
    try:
        return work(folders, scratch)
    finally:
        dist.destroy_process_group()


def run_all(ranks, scratch):
    """Results by number of ranks, one a rank."""
    shape = dict(num_attention_heads=4, num_key_value_heads=1, head_dim=16, initializer_range=0.1)
    folders = {kind: tiny_model(scratch / kind, kind, **shape, **changes) for kind, changes in SCORED.items()}
    folders["llama_3"] = tiny_model(scratch / "llama_3", hidden_size=96, num_attention_heads=3, num_key_value_heads=3)
    saved = scratch / "saved"
    saved.mkdir()
    one = one_rank(scenario, folders, saved)
    many = run(ranks, scenario, folders, saved)
    return {1: [one | one_rank(loading, folders, saved)], ranks: many}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    return run_all(2, tmp_path_factory.mktemp("parallel"))


def check(outcome, ranks):
    """All layouts of this many ranks against one rank."""
    (one,), many = outcome[1], outcome[ranks]
    for name, options in LAYOUTS[ranks].items():
        firsts = many[::options.get("context_parallel", 1)]
        for kind in (kind for kind in SCORED if ("metrics", kind, name) in many[0]):
            for column in ("log_probs", "entropies"):
                rows = [row for result in firsts for row in result[column, kind, name]]
                for ours, theirs in zip(rows, one[column, kind, "one rank"], strict=True):
                    assert ours == pytest.approx(theirs, abs=1e-10), (kind, name)
            assert_same_metrics(many[0]["metrics", kind, name], one["metrics", kind, "one rank"], rel=1e-9)
            assert_same_weights(many[0]["weights", kind, name], one["weights", kind, "one rank"], atol=1e-8)
        assert_same_metrics(many[0]["gspo", name], one["gspo", "one rank"], rel=1e-10)
        assert_same_weights(many[0]["gspo weights", name], one["gspo weights", "one rank"], atol=1e-8)
        assert_same_metrics(many[0]["critic", name], one["critic", "one rank"], rel=1e-9)
        for part in (0, 1):
            rows = [row for result in firsts for row in result["teacher", name][part]]
            assert all(ours == pytest.approx(theirs, abs=1e-10)
                       for ours, theirs in zip(rows, one["teacher", "one rank"][part], strict=True))
        for result in many:
            assert result["metrics", "llama", name] == many[0]["metrics", "llama", name]
            skipped, moved, (kind, message) = result["bad loss", name]
            assert (skipped, moved, kind) == (1, False, "TrainingError")
            assert "2 optimizer steps in a row" in message
    assert one["gspo", "one rank"][0]["grad_norm"] > 0.1
    expected, loaded = one["continued", "one rank"], {k: v for k, v in (one | many[0]).items() if k[0] == "loaded"}
    assert len(loaded) == (1 + len(LAYOUTS[ranks])) ** 2
    for weights in loaded.values():
        assert_same_weights(weights, expected, atol=2e-3)  # float32, and AdamW's first steps amplify rounding
    for name in LAYOUTS[ranks]:  # where it was saved it goes on exactly
        assert_same_weights(many[0]["loaded", f"{ranks} {name}", name], many[0]["continued", name], atol=0)


def test_two_ranks_give_what_one_gives(outcome):
    check(outcome, 2)


@pytest.mark.skipif(cpu_cores() < 4, reason="needs 4 cores")
def test_four_ranks_give_what_one_gives(tmp_path):
    check(run_all(4, tmp_path), 4)


def test_replicas_hold_whole_copies(outcome):
    for result in outcome[2]:
        assert result["layout"] == [([[0], [1]], (Replicate(), Shard(0)))] * len(result["layout"])
        assert result["memory"] == 4 * result["num_parameters"]
        assert_same_weights(result["resharded"], result["continued", "replicas"], atol=0)


def test_worker_groups_hand_the_same_rows_to_ranks_that_share_them(shared_pool, tmp_path):
    batch, model = long_batch(), ModelConfig(path=str(tiny_model(tmp_path, initializer_range=0.1)))
    results = []
    for ranks, options in ((1, {}), (2, dict(context_parallel=2))):
        group = WorkerGroup(TrainerWorker, shared_pool(ranks), model, TrainingConfig(**OPTIONS, **options), 0.7,
                            role=f"shared rows {ranks}")
        result = group.log_probs(batch)
        results.append((result["old_log_probs"].values(), group.update(result, policy_gradient)))
        group.close()
    (one, metrics), (two, other_metrics) = results
    torch.testing.assert_close(two, one, rtol=0, atol=1e-5)
    assert_same_metrics([other_metrics], [metrics], rel=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_gives_the_same_on_shards_and_after_a_restart(outcome, optimizer):
    (one,), (two, _) = outcome[1], outcome[2]
    expected = one[optimizer, "shards"][0]
    for name in ("shards", "replicas", "crossed"):
        followed, restarted = two[optimizer, name]
        assert_same_weights(restarted, followed, atol=0)
        # Rounding decides between two neighbouring codes of 8 bits once in a while.
        assert_same_weights(followed, expected, atol=1e-9 if optimizer == "muon" else 5e-4)
    assert any((weight - one["continued", "one rank"][name]).abs().max() > 1e-3 for name, weight in expected.items())


def test_layouts_that_do_not_fit_are_refused_by_every_rank(outcome):
    for result in outcome[2]:
        assert result["heads"] == ("ModelError", "policy.training.context_parallel must divide the model's 3 attention "
                                                 "heads, got 2; accepted: 1, 3.")
        assert result["ranks"] == [("ConfigError", f"policy.training.{name} must divide the 2 ranks of its devices, "
                                                   "got 3; accepted: 1, 2.")
                                   for name in ("shard_ranks", "context_parallel")]
