"""The policy with both real engines: every layout that two ranks allow, dense and mixture-of-experts."""

import re
from math import prod

import pytest
import torch

from hybridrl.algorithms.partials import finalize
from hybridrl.batch import from_lengths, lengths, make_batch, num_rows, padded, repeat, rows_of, select, split
from hybridrl.config import (
    EnvironmentConfig,
    LoRAConfig,
    ModelConfig,
    PolicyConfig,
    RolloutConfig,
    SyncConfig,
    TrainingConfig,
)
from hybridrl.controller import WorkerGroup
from hybridrl.controller.player import Player
from hybridrl.errors import WorkerError
from hybridrl.workers.weights.plan import Sharded
from tests.distributed.probe import CrampedWorker, ProbeWorker, plain_loss
from tests.models import MIXTURES, THROUGH_TRANSFORMERS, tiny_model
from tests.unit.weights.test_plan import check_plan

LAYOUTS = {"1": (1, 1), "2x1": (2, 1), "1x2": (2, 2)}
"""Name -> (ranks, tensor_parallel)."""
FAMILIES = (*MIXTURES, "llama", "qwen2", "qwen3", THROUGH_TRANSFORMERS)
"""Further models that one layout runs. vLLM makes its groups once a process, and those of a dense model don't do for a
mixture: mixtures come first."""
GAP = 5e-5
"""Agreement of the engines in float32: ten times the rounding that was seen. A missing weight shows above 1e-2."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {kind: tiny_model(root / kind, kind, initializer_range=0.1) for kind in {*FAMILIES, "llama_tied"}}


@pytest.fixture(scope="module")
def policies(ray_cluster, folders):
    """`policies(layout, kind, lora)`: a policy of that layout, built once; processes are shared by kind.

    `lora` is how its adapters are synced; without it there are none.
    """
    pools, groups = {}, {}

    def build(layout: str, kind: str, lora: str) -> None:
        cfg = PolicyConfig(
            model=ModelConfig(path=str(folders[kind])), routing_replay="rollout" if kind in MIXTURES else "off",
            sync=SyncConfig(bucket_mib=1, verify="full", lora=lora or "merged"),
            training=TrainingConfig(learning_rate=1e-2, micro_batch_tokens=64, lora=LoRAConfig(rank=3 if lora else 0)),
            rollout=RolloutConfig(tensor_parallel=LAYOUTS[layout][1], max_prompt_tokens=32, max_response_tokens=16))
        groups[layout, kind, lora] = WorkerGroup(ProbeWorker, pools[layout], cfg, role=f"{kind}{lora}")

    def get(layout: str, kind: str = "llama_tied", lora: str = "") -> WorkerGroup:
        if layout not in pools:
            pools[layout] = ray_cluster.pool(LAYOUTS[layout][0])
            # vLLM makes its groups once a process, and those of a dense model don't do for a mixture.
            for role in (*FAMILIES, "llama_tied") if layout == "1x2" else ("qwen3_moe", "llama_tied"):
                build(layout, role, "")
        if (layout, kind, lora) not in groups:
            build(layout, kind, lora)
        return groups[layout, kind, lora]

    get.pools = pools
    yield get
    for pool in pools.values():
        pool.close()


def prompts(rows: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(5, 60, (3 + i % 5,), generator=generator) for i in range(rows)]
    return make_batch(prompt_ids=ids, seeds=torch.arange(rows) + 1000 * seed, group_ids=torch.arange(rows))


def largest_gap(batch) -> float:
    return float((batch["rollout_log_probs"].values() - batch["old_log_probs"].values()).abs().max())


def with_loss_columns(batch):
    sizes = lengths(batch["response_ids"])
    batch["advantages"] = torch.nested.nested_tensor_from_jagged(
        torch.linspace(-1, 1, int(sizes.sum())), batch["response_ids"].offsets())
    batch["loss_weights"] = torch.nested.nested_tensor_from_jagged(
        torch.full((int(sizes.sum()),), 1 / int(sizes.sum())), batch["response_ids"].offsets())
    return batch


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_moe"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_agree_after_a_sync_and_not_before(policies, layout, kind):
    policy = policies(layout, kind)
    first = policy.sync_weights()[0]
    assert max(policy.gap()) < GAP
    policy.scale_weights(1.2)
    assert min(policy.gap()) > 1e-2
    batch = policy.log_probs(policy.generate(prompts(5)))
    assert largest_gap(batch) < GAP
    assert set(batch["weight_versions"].values().tolist()) == {first + 1}
    policy.update(with_loss_columns(batch), plain_loss)
    assert min(policy.gap()) > 1e-4
    policy.sync_weights()
    assert max(policy.gap()) < GAP
    metrics = policy.take_metrics()[0]
    assert metrics["sync/max_log_prob_gap"] < GAP
    assert metrics["memory/enter_rollout_after_bytes"] > 0
    assert {"time/enter_train", "time/enter_rollout", "time/sync_load"} <= metrics.keys()


def own_experts(policy, batch, folder):
    """For each row, the experts [fed, layers, k] of a plain transformers model with the policy's weights, sorted."""
    from transformers import AutoModelForCausalLM

    policy.export(str(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chosen, found = [], []
    for module in model.modules():
        if type(module).__name__.endswith(("TopKRouter", "TopkRouter")):
            module.register_forward_hook(lambda module, inputs, output: chosen.append(output[2].sort(-1).values))
    for prompt, response in zip(rows_of(batch["prompt_ids"]), rows_of(batch["response_ids"]), strict=True):
        chosen.clear()
        model(torch.cat([prompt, response[:-1]])[None])
        found.append(torch.stack(chosen, dim=1))
    return found


def check_experts(policy, batch, folder):
    for row, own in zip(rows_of(batch["routed_experts"]), own_experts(policy, batch, folder), strict=True):
        assert row.dtype == torch.uint8
        assert torch.equal(row.long().sort(-1).values, own)


@pytest.mark.parametrize("layout, kind", [("1", "qwen3_moe"), ("2x1", "qwen3_moe"), *(("1x2", k) for k in MIXTURES)])
def test_a_rollout_carries_the_experts_of_every_token(policies, layout, kind, tmp_path):
    policy = policies(layout, kind)
    batch = policy.generate(prompts(5, seed=2))
    check_experts(policy, batch, tmp_path / "model")
    batch = policy.log_probs(batch)
    assert largest_gap(batch) < GAP
    metrics = finalize(policy.update(with_loss_columns(batch), plain_loss))
    assert metrics["routing/fallback_rows"] == metrics["routing/layers_differ_frac"] == 0
    # Under other experts the trainer finds other log-probs, and its gradient goes there.
    experts = batch["routed_experts"]
    batch["routed_experts"] = from_lengths(((experts.values().int() + 1) % 4).to(torch.uint8), lengths(experts))
    assert largest_gap(policy.log_probs(batch)) > 1e-2
    policy.set_replay("off")
    live = policy.log_probs(batch)["old_log_probs"].values()
    policy.set_replay("old")
    del batch["routed_experts"]
    first = policy.log_probs(batch)
    assert torch.equal(first["old_log_probs"].values(), live)
    check_experts(policy, first, tmp_path / "updated")
    policy.set_replay("rollout")


def test_experts_through_chunks_cached_prefixes_and_preemptions(policies, folders, tmp_path):
    """Seven blocks of cache, of which four requests want nine: some are thrown out and begin again."""
    policies("1")
    cfg = PolicyConfig(
        model=ModelConfig(path=str(folders["qwen3_moe"])), routing_replay="rollout",
        rollout=RolloutConfig(max_prompt_tokens=48, max_response_tokens=32, max_running=4))
    policy = WorkerGroup(CrampedWorker, policies.pools["1"], cfg, role="cramped")
    generator = torch.Generator().manual_seed(4)
    prefix = torch.randint(5, 60, (35,), generator=generator)
    ids = [torch.cat([prefix, torch.randint(5, 60, (i,), generator=generator)]) for i in range(6)]
    batch = make_batch(prompt_ids=ids)  # no seeds: vLLM can't take chunks with a CPU generator of their own
    sampled = policy.generate(batch)
    assert min(policy.events()[0].values()) > 0, policy.events()
    check_experts(policy, sampled, tmp_path / "model")
    assert largest_gap(policy.log_probs(sampled)) < GAP


@pytest.mark.parametrize("layout, kind, lora", [
    ("1", "qwen3_moe", "merged"), ("2x1", "llama_tied", "merged"), ("1x2", "llama_tied", "merged"),
    ("1", "llama_tied", "adapter"), ("1x2", "llama_tied", "adapter")])
def test_adapters_reach_the_rollout_engine(policies, layout, kind, lora):
    policy = policies(layout, kind, lora)
    policy.sync_weights()
    whole = policy.take_metrics()[0]["sync/bytes"]
    batch = policy.ref_log_probs(policy.log_probs(policy.generate(prompts(5))))
    assert torch.equal(batch["ref_log_probs"].values(), batch["old_log_probs"].values()), "adapters start at nothing"
    for _ in range(2):
        policy.update(with_loss_columns(batch), plain_loss)
        assert min(policy.gap()) > 1e-3
        policy.sync_weights()
        assert max(policy.gap()) < GAP
    metrics = policy.take_metrics()[0]
    assert metrics["sync/bytes"] == whole and (whole < 40_000) == (lora == "adapter")
    sampled = policy.ref_log_probs(policy.log_probs(policy.generate(batch)))
    assert largest_gap(sampled) < GAP
    assert (sampled["ref_log_probs"].values() - sampled["old_log_probs"].values()).abs().max() > 1e-2
    policies(layout, kind).sync_weights()
    assert max(policies(layout, kind).gap()) < GAP, "an engine of whole models in the same process"


def test_adapters_for_a_mixture_on_cpu_are_merged(policies):
    with pytest.raises(WorkerError, match="policy.sync.lora must be merged for a mixture of experts on CPU"):
        policies("1", "qwen3_moe", "adapter")


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_any_number_of_rows(policies, rows):
    for layout in ("2x1", "1x2"):
        batch = policies(layout).log_probs(policies(layout).generate(select(prompts(3), range(rows))))
        assert num_rows(batch) == rows
        assert len(batch["response"]) == rows
        assert len(batch["old_log_probs"].values()) == int(lengths(batch["response_ids"]).sum())


@pytest.fixture(scope="module")
def fresh(policies):
    """All layouts brought to the same weights: those of the model folder. Returns one sampled batch."""
    import tempfile

    source = policies("1")
    with tempfile.TemporaryDirectory() as folder:
        source.save(folder)
        for layout in ("2x1", "1x2"):
            policies(layout).load(folder)  # saved on one rank, loaded on two
    return source.log_probs(source.generate(prompts(7, seed=3)))


def test_samples_do_not_depend_on_the_layout(policies, fresh):
    for layout in ("2x1", "1x2"):
        batch = policies(layout).generate(prompts(7, seed=3))
        assert batch["response_ids"].values().tolist() == fresh["response_ids"].values().tolist()
        assert batch["finish_reason"] == fresh["finish_reason"]
        torch.testing.assert_close(batch["rollout_log_probs"].values(), fresh["rollout_log_probs"].values(),
                                   atol=GAP, rtol=0)


def test_an_update_does_not_depend_on_the_layout(policies, fresh):
    batch = with_loss_columns(select(fresh, slice(None)))
    results, after = [], []
    for layout in LAYOUTS:
        policy = policies(layout)
        results.append(finalize(policy.update(batch, plain_loss)))
        after.append(policy.log_probs(batch)["old_log_probs"].values())
    for metrics, log_probs in zip(results[1:], after[1:], strict=True):
        assert metrics["train/loss"] == pytest.approx(results[0]["train/loss"], rel=1e-5)
        assert metrics["train/grad_norm"] == pytest.approx(results[0]["train/grad_norm"], rel=1e-5)
        torch.testing.assert_close(log_probs, after[0], atol=2e-4, rtol=0)
    assert (after[0] - fresh["old_log_probs"].values()).abs().max() > 1e-2


def test_rows_sampled_together_or_apart_are_the_same(policies):
    policy = policies("1")
    together = policy.generate(prompts(4, seed=5))
    apart = [policy.generate(part) for part in split(prompts(4, seed=5), 4)]
    assert [row["response_ids"].values().tolist() for row in apart] == [
        ids.tolist() for ids in together["response_ids"].unbind()]


def test_responses_to_one_prompt_differ_by_seed_and_greedy_ones_do_not(policies):
    policy = policies("1")
    batch = repeat(select(prompts(1), [0]), 4)
    batch["seeds"] = torch.arange(4)
    assert len(set(policy.generate(batch)["response"])) > 1
    assert len(set(policy.generate(batch, temperature=0.0)["response"])) == 1


@pytest.mark.parametrize("layout", ["1", "1x2"])
def test_weights_may_change_while_sampling(policies, layout):
    """Tokens before the boundary have the old weights' log-probs, tokens after it the new ones'."""
    policy = policies(layout)
    policy.sync_weights()
    batch = prompts(3, seed=7)
    sampled, told = policy.generate_across_a_sync(batch, tokens=12, before=5)[0]
    whole = sampled[0]
    assert told == [tuple(column[:n] for column in whole) for n in range(1, len(whole[0]))]
    ids, log_probs, versions = zip(*sampled, strict=True)
    assert all(sorted(row) == list(row) and len(set(row)) == 2 for row in versions if len(row) > 5)
    assert any(len(row) > 5 for row in versions)
    rows = make_batch(prompt_ids=[row for row in batch["prompt_ids"].unbind()], response_ids=list(ids))
    new = padded(policy.log_probs(rows)["old_log_probs"])
    policy.scale_weights(1 / 1.1)
    old = padded(policy.log_probs(rows)["old_log_probs"])
    for i, row in enumerate(versions):
        for j, version in enumerate(row):
            under = old if version == min(row) and len(set(row)) == 2 else new
            assert abs(float(under[i, j]) - log_probs[i][j]) < 5e-5, (i, j)
    policy.sync_weights()


@pytest.mark.parametrize("layout", ["1", "1x2"])
def test_a_request_may_arrive_while_others_run(policies, layout):
    policy = policies(layout)
    responses, steps = policy.offered_later(list(range(10, 15)), list(range(20, 24)))[0]
    assert [len(response) for response in responses] == [12, 6] or 1 in [r[-1] for r in responses]
    assert steps < 12 + 6, "the second request must share the first one's steps"


@pytest.mark.parametrize("kind, part, named", [
    ("llama_tied", "lm_head", "lm_head"), ("llama_tied", "layers.1.self_attn.k_proj", "layers.1.self_attn.qkv_proj"),
    ("qwen3_moe", "experts.down_proj", "experts.routed_experts.w2_weight"),
    ("qwen3_moe", "layers.0.mlp.gate.weight", "layers.0.mlp.gate")])
def test_a_weight_that_does_not_arrive_is_named_and_nothing_is_sampled(policies, kind, part, named):
    policy = policies("1", kind)
    policy.sync_weights()
    error = policy.load_without(part)[0]
    assert error.startswith("SyncError") and named in error
    policy.scale_weights(1.0)  # the next call syncs again, whole
    policy.sync_weights()
    assert max(policy.gap()) < GAP


def test_a_failure_names_role_rank_and_step(ray_cluster, folders):
    pool = ray_cluster.pool(1)
    cfg = PolicyConfig(model=ModelConfig(path=str(folders["llama_tied"])),
                       rollout=RolloutConfig(engine="transformers", max_prompt_tokens=8, max_response_tokens=4))
    policy = WorkerGroup(ProbeWorker, pool, cfg, role="policy")
    policy.step = 3
    with pytest.raises(WorkerError, match=r"policy rank 0 at step 3: .*prompt_ids"):
        policy.generate(make_batch(group_ids=torch.arange(1)))
    pool.close()


# ---- episodes

GUESSING = EnvironmentConfig(name="guess", options={"rules": "{low}-{high}?", "guesses": 2}, max_turn_tokens=3)
VERIFYING = EnvironmentConfig(name="verifier", options={"function": "numeric"})
CALLING = EnvironmentConfig(name="agent", max_turn_tokens=5,
                            options={"function": "tests.unit.environments.agents:digits"})


def guesses(rows: int):
    return make_batch(group_ids=torch.arange(rows) // 2, seeds=torch.arange(rows) + 500)


def test_episodes_are_exact_whatever_the_layout(policies, fresh):
    """Every sampled token is the one that training sees, in the place where it was sampled: the log-probs agree."""
    batches = [policies(layout).log_probs(Player(GUESSING)(policies(layout), guesses(7))) for layout in LAYOUTS]
    for batch in batches:
        mask = batch["response_mask"].values()
        gap = (batch["rollout_log_probs"].values() - batch["old_log_probs"].values()).abs()
        assert float(gap[mask].max()) < GAP
        assert set(batch["weight_versions"].values()[~mask].tolist()) == {-1}
        assert set(batch["reward_error"]) == {None} and set(batch["finish_reason"]) <= {"done", "length"}
        assert any(len(turns) == 2 for turns in batch["turns"])
        for name in ("prompt_ids", "response_ids"):
            assert batch[name].values().tolist() == batches[0][name].values().tolist()
        assert batch["rewards"].tolist() == batches[0]["rewards"].tolist()
    observed = batches[0]["response_ids"].values()[~batches[0]["response_mask"].values()]
    assert 1 in observed.tolist()  # the end of a turn that was cut is the template's, not the policy's


def test_agents_are_exact_whatever_the_layout(policies, fresh):
    """An unmodified client, two calls an episode: the same rows on one rank, on two, and over two."""
    batches = [policies(layout).log_probs(Player(CALLING)(policies(layout), guesses(6))) for layout in LAYOUTS]
    for batch in batches:
        mask = batch["response_mask"].values()
        gap = (batch["rollout_log_probs"].values() - batch["old_log_probs"].values()).abs()
        assert float(gap[mask].max()) < GAP and set(batch["weight_versions"].values()[~mask].tolist()) == {-1}
        assert set(batch["reward_error"]) == {None} and [len(turns) for turns in batch["turns"]] == [2] * 6
        for name in ("prompt_ids", "response_ids", "token_rewards"):
            assert batch[name].values().tolist() == batches[0][name].values().tolist()


@pytest.mark.parametrize("environment", [GUESSING, CALLING])
def test_episodes_carry_the_experts_of_every_token(policies, environment, tmp_path):
    """Of observations, too: the trainer then finds the log-probs that were sampled."""
    policy = policies("1", "qwen3_moe")
    batch = Player(environment)(policy, guesses(4))
    assert any(len(turns) == 2 for turns in batch["turns"])
    check_experts(policy, batch, tmp_path / "model")
    batch = policy.log_probs(batch)
    mask = batch["response_mask"].values()
    assert float((batch["rollout_log_probs"].values() - batch["old_log_probs"].values()).abs()[mask].max()) < GAP


def test_a_single_turn_is_what_generate_gives(policies, fresh):
    policy, drawn = policies("1"), prompts(5, seed=9)
    text = make_batch(prompt=["2+2=", "1*7=", "9-3=", "5=", "6/2="], answer=["4"] * 5, group_ids=torch.arange(5),
                      seeds=drawn["seeds"])
    play = Player(VERIFYING)
    played = play(policy, text)
    generated = policy.generate(make_batch(prompt_ids=list(played["prompt_ids"].unbind()), seeds=drawn["seeds"]))
    assert generated["response_ids"].values().tolist() == played["response_ids"].values().tolist()
    # Not to the last bit: prompts of episodes come to the engine as they are rendered, in batches of any size.
    torch.testing.assert_close(generated["rollout_log_probs"].values(), played["rollout_log_probs"].values(),
                               atol=GAP, rtol=0)
    greedy, again = (list(play(policy, text, temperature=0.0)["response"]) for _ in range(2))
    assert greedy == again != list(played["response"])


def test_episodes_of_any_number_train(policies):
    from hybridrl.algorithms.algorithm import Algorithm
    from hybridrl.config import AlgorithmConfig

    algorithm = Algorithm(AlgorithmConfig(responses_per_prompt=2), 16)
    for layout, rows in (("2x1", 1), ("2x1", 5), ("1x2", 4)):
        policy = policies(layout)
        batch = algorithm.shape(policy.log_probs(Player(GUESSING)(policy, guesses(rows))))
        assert num_rows(batch) == rows
        batch["advantages"] = algorithm.advantages(batch)
        batch = algorithm.correct(batch)
        (mini_batch,) = algorithm.mini_batches(batch)
        assert policy.update(mini_batch, algorithm.loss)
    empty = Player(GUESSING)(policies("2x1"), select(guesses(1), []))
    assert num_rows(empty) == 0


# ---- resharding; from here on layouts have different weights

def test_an_unmodified_client_trains_for_five_steps(policies, tmp_path):
    """A mixture under the experts of its rollout; the reward is the share of digits, which rises."""
    from hybridrl.algorithms.algorithm import Algorithm
    from hybridrl.config import AlgorithmConfig

    policy, play = policies("1", "qwen3_moe"), Player(CALLING)
    algorithm, rewards = Algorithm(AlgorithmConfig(responses_per_prompt=16), 16), []
    version = policy.sync_weights()[0]
    for step in range(5):
        batch = make_batch(group_ids=torch.arange(32) // 16, seeds=torch.arange(32) + 1000 * step)
        batch = play(policy, batch)
        if step == 0:
            check_experts(policy, batch, tmp_path / "model")
        mask = batch["response_mask"].values()
        assert set(batch["weight_versions"].values()[mask].tolist()) == {version} and num_rows(batch) == 32
        batch = algorithm.shape(policy.log_probs(batch))
        assert (batch["rollout_log_probs"].values() - batch["old_log_probs"].values())[mask].abs().max() < GAP
        rewards.append(float(batch["rewards"].mean()))
        batch["advantages"] = algorithm.advantages(batch)
        for mini_batch in algorithm.mini_batches(algorithm.correct(batch)):
            assert finalize(policy.update(mini_batch, algorithm.loss))["routing/fallback_rows"] == 0
        version = policy.sync_weights()[0]
    assert rewards[-1] > rewards[0] + 0.1, rewards


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_is_resharded(policies, kind):
    """Tensor parallelism 2 on two shards: equal log-probs after each update, and no element more than needed."""
    policy = policies("1x2", kind)
    for seed in range(3):
        batch = policy.log_probs(policy.generate(prompts(3, seed)))
        assert largest_gap(batch) < GAP
        policy.update(with_loss_columns(batch), plain_loss)
        assert min(policy.gap()) > 1e-3
        policy.sync_weights()
        assert max(policy.gap()) < GAP
    for bytes_ in policy.reshard():
        assert 0 < bytes_["received"] == bytes_["needed"] < 0.3 * bytes_["model"]


@pytest.mark.parametrize("ranks, tensor_parallel", [(4, 4), (8, 4), (8, 8), (16, 2)])
@pytest.mark.parametrize("kind, experts", [("llama_tied", ""), ("qwen2", ""), ("qwen3_moe", "num_experts"),
                                           ("glm4_moe", "n_routed_experts")])
def test_layouts_of_more_ranks_than_there_are(policies, tmp_path_factory, kind, experts, ranks, tensor_parallel):
    """vLLM's own layouts at higher tensor parallelism: the plan fills them, and no rank receives more than needed."""
    folder = tiny_model(tmp_path_factory.mktemp(kind), kind, num_attention_heads=8, num_key_value_heads=2, head_dim=8,
                        **({experts: 8} if experts else {}))
    shapes, layouts = policies("1").layouts_at(str(folder), tensor_parallel)[0]
    weights = [Sharded(name, shape, 1 if "e_score" in name else ranks) for name, shape in shapes]
    received = check_plan(weights, [layouts[rank % tensor_parallel] for rank in range(ranks)], 5000)
    # 1 / t for the slice, of which a rank holds 1 / N; a little more where more ranks than key heads share them
    share = (1 - 1 / ranks) / tensor_parallel
    assert sum(received) / ranks < (share + 0.03) * sum(prod(shape) for _, shape in shapes)


@pytest.mark.parametrize("layout, kind", [("1", "qwen3_moe"), ("2x1", "qwen3_moe"), *(("1x2", k) for k in MIXTURES)])
def test_experts_are_those_of_training_one_by_one(policies, layout, kind):
    policy = policies(layout, kind)
    policy.scale_weights(1.01)
    policy.sync_weights()
    layers = 1 if kind == "glm4_moe" else 2  # the first is dense
    assert policy.wrong_experts() == [(layers * 4 * 3, [])] * LAYOUTS[layout][0]


@pytest.mark.parametrize("layout, frac", [("1", 0.0), ("2x1", 0.5), ("1x2", 0.25)])
@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_moe"])
def test_a_rank_receives_what_its_slice_lacks(policies, layout, kind, frac):
    policy = policies(layout, kind)
    policy.scale_weights(1.0)
    policy.sync_weights()
    for bytes_ in policy.reshard():
        assert bytes_["received"] == bytes_["needed"] <= (frac + 0.001) * bytes_["model"]


@pytest.mark.parametrize("layout", ["1", "1x2"])
@pytest.mark.parametrize("how, message", [
    ("stops", "SyncError: broken off"), ("changes", "SyncError: after weight sync .* slices that differ")])
def test_a_sync_that_fails_ends_sampling_until_one_succeeds(policies, layout, how, message):
    policy = policies(layout)
    for errors in policy.break_a_sync(how):
        assert re.match(message, errors[0])
        assert [error.partition(":")[0] for error in errors[1:]] == ["PhaseError", "PhaseError"]
    batch = policy.log_probs(policy.generate(prompts(2)))  # syncs again, whole
    assert largest_gap(batch) < GAP


@pytest.mark.parametrize("kind, part, named", [
    ("llama_tied", "lm_head", "lm_head.weight (0 of"),
    ("llama_tied", "layers.1.self_attn.k_proj", "layers.1.self_attn.qkv_proj.weight (6144 of 8192 elements)"),
    ("qwen3_moe", "experts.2.down_proj", "layers.0.mlp.experts.routed_experts.w2_weight (9216 of 12288 elements)")])
def test_a_weight_that_training_lacks_is_named_when_the_layout_is_found(policies, kind, part, named):
    policy = policies("1", kind)
    error = policy.layout_without(part)[0]
    assert error.startswith("SyncError: weight sync left") and named in error
    policy.scale_weights(1.0)
    policy.sync_weights()  # the engine is as it was
    assert max(policy.gap()) < GAP


@pytest.mark.parametrize("layout, kind, rounds", [
    ("1", "llama_tied", 3), ("2x1", "llama_tied", 20), ("1", "qwen3_moe", 3), ("2x1", "qwen3_moe", 2),
    *(("1x2", kind, 2) for kind in ("llama_tied", *FAMILIES))])
def test_deltas(policies, layout, kind, rounds):
    """Every slice of both engines is compared by digest, since `verify=full`."""
    policy = policies(layout, kind)
    policy.sync_by("delta")
    try:
        policy.sync_weights()
        full = policy.take_metrics()[0]
        assert full["sync/changed_frac"] == 1
        for seed in range(rounds):
            policy.nudge(0.03, seed)
            assert min(policy.gap()) > 1e-4
            policy.sync_weights()
            assert max(policy.gap()) < GAP
            metrics = policy.take_metrics()[0]
            assert metrics["sync/changed_frac"] == pytest.approx(0.03, rel=0.3)
            assert metrics["sync/received_bytes"] <= 0.1 * full["sync/received_bytes"] * (2 if layout == "1x2" else 1)
            assert metrics["sync/bytes"] == pytest.approx(0.03 * full["sync/bytes"], rel=0.3)
        policy.scale_weights(0.9)  # everything changes
        policy.sync_weights()
        assert max(policy.gap()) < GAP
        metrics = policy.take_metrics()[0]
        assert metrics["sync/changed_frac"] > 0.9 and metrics["sync/bytes"] == full["sync/bytes"]
        policy.nudge(0, 0)  # nothing changes
        policy.sync_weights()
        metrics = policy.take_metrics()[0]
        assert metrics["sync/changed_frac"] == metrics["sync/bytes"] == 0
        assert max(policy.gap()) < GAP
    finally:
        policy.sync_by("full")


def test_deltas_after_a_sync_that_failed(policies):
    policy = policies("1x2")
    policy.sync_by("delta")
    policy.sync_weights()
    assert all("SyncError" in errors[0] and "PhaseError" in errors[1] for errors in policy.break_a_sync("changes"))
    policy.nudge(0.01, 5)
    policy.sync_weights()
    assert policy.take_metrics()[0]["sync/changed_frac"] == 1
    assert max(policy.gap()) < GAP
    policy.sync_by("full")


@pytest.mark.parametrize("layout", ["1", "1x2"])
def test_a_policy_that_is_closed_leaves_its_pool_to_others(ray_cluster, folders, layout):
    """Two engines in each process: the second outlives the first, and a mixture's comes after both."""
    ranks, shared = LAYOUTS[layout]
    pool = ray_cluster.pool(ranks)

    def build(kind: str, role: str) -> WorkerGroup:
        cfg = PolicyConfig(model=ModelConfig(path=str(folders[kind])), training=TrainingConfig(learning_rate=1e-2),
                           rollout=RolloutConfig(tensor_parallel=shared, max_prompt_tokens=32, max_response_tokens=16))
        return WorkerGroup(ProbeWorker, pool, cfg, role=role)

    def check(policy: WorkerGroup) -> None:
        batch = policy.log_probs(policy.generate(prompts(3)))
        assert largest_gap(batch) < GAP
        policy.update(with_loss_columns(batch), plain_loss)

    first, second = build("llama_tied", "first"), build("llama_tied", "second")
    check(first)
    first.close()
    check(second)
    second.close()
    check(build("qwen3_moe", "third"))
    pool.close()


def test_deltas_of_training_in_float32_for_an_engine_in_bfloat16(shared_pool, folders):
    """Written in place; the bits are those of a full sync after each of 20 updates."""
    cfg = PolicyConfig(model=ModelConfig(path=str(folders["llama_tied"])), sync=SyncConfig(mode="delta", verify="full"),
                       training=TrainingConfig(learning_rate=1e-5, micro_batch_tokens=64),
                       rollout=RolloutConfig(engine="transformers", dtype="bfloat16", max_prompt_tokens=32,
                                             max_response_tokens=8))
    policy = WorkerGroup(ProbeWorker, shared_pool(2), cfg, role="transformers")
    batch = with_loss_columns(policy.log_probs(policy.generate(prompts(5))))
    policy.take_metrics()
    fractions = []
    for _ in range(20):
        policy.update(batch, plain_loss)
        policy.sync_weights()
        fractions.append(policy.take_metrics()[0]["sync/changed_frac"])
        assert policy.different_bits() == [[], []]
    assert 0 < min(fractions) <= max(fractions) < 0.2
    policy.generate(prompts(5))
    policy.close()
