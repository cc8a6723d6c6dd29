"""Experts that are kept and replayed: every family of mixtures by one mechanism, and the engine around it."""

import pytest
import torch
import transformers

from hybridrl.algorithms.partials import finalize
from hybridrl.batch import from_lengths, lengths, make_batch, narrow, put, select
from hybridrl.config import ModelConfig, TrainingConfig
from hybridrl.errors import BatchError, ModelError
from hybridrl.workers.rollout.engine import Request
from hybridrl.workers.rollout.transformers_engine import TransformersEngine
from hybridrl.workers.routing import Mixture, Routing, experts_column, route
from hybridrl.workers.training.engine import TrainingEngine
from tests.models import tiny_model

CPU = torch.device("cpu")
SHAPE = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
             num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
             pad_token_id=0, eos_token_id=1, bos_token_id=None)
LATENT = dict(kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16)
SHARED = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1,
              first_k_dense_replace=1)
EIGHT = dict(num_experts=8, num_experts_per_tok=2)
LOCAL = dict(num_local_experts=8, num_experts_per_tok=2)
FAMILIES = {
    "qwen3_moe": ("Qwen3Moe", EIGHT | dict(moe_intermediate_size=24, norm_topk_prob=True, mlp_only_layers=[1]), 2),
    "qwen3_moe, gates not renormalised": ("Qwen3Moe", EIGHT | dict(moe_intermediate_size=24, norm_topk_prob=False), 3),
    "qwen2_moe": ("Qwen2Moe", EIGHT | dict(moe_intermediate_size=24, shared_expert_intermediate_size=24), 3),
    "mixtral": ("Mixtral", LOCAL, 3),
    "olmoe": ("Olmoe", EIGHT, 3),
    "flex_olmo": ("FlexOlmo", EIGHT, 3),
    "granitemoe": ("GraniteMoe", LOCAL, 3),
    "gpt_oss": ("GptOss", LOCAL | dict(head_dim=16), 3),
    "deepseek_v2, groups": ("DeepseekV2", SHARED | LATENT | dict(n_group=4, topk_group=2,
                                                                 topk_method="group_limited_greedy"), 2),
    "deepseek_v3, groups": ("DeepseekV3", SHARED | LATENT | dict(n_group=4, topk_group=2), 2),
    "glm4_moe": ("Glm4Moe", SHARED | dict(n_group=1, topk_group=1, head_dim=16), 2),
    "dots1": ("Dots1", SHARED | dict(n_group=1, topk_group=1, head_dim=16), 2),
    "ernie4_5_moe": ("Ernie4_5_Moe", dict(moe_num_experts=8, moe_k=2, moe_intermediate_size=24,
                                          moe_layer_start_index=1), 2),
}
IDS = torch.arange(11)[None] * 5 % 64


def built(name, changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SHAPE | changes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_in_every_family(family):
    name, changes, layers = FAMILIES[family]
    model = built(name, changes)
    plain = model(IDS, use_cache=False).logits
    mixture = route(model)
    assert mixture == Mixture(8, 2, changes.get("n_group", 1), layers)
    kept = Routing(mixture, 11, CPU)
    assert torch.equal(model(IDS, use_cache=False, routing=kept).logits, plain), "keeping changes nothing"
    kept.check()
    assert kept.own.min() >= 0 and (kept.own[..., 0] != kept.own[..., 1]).all()

    own = Routing(mixture, 11, CPU, mixture.unpacked(mixture.packed(kept.own)))
    assert torch.equal(model(IDS, use_cache=False, routing=own).logits, plain), "its own experts are its normal pass"
    assert finalize(own.metrics()) == {"routing/layers_differ_frac": 0, "routing/tokens_differ_frac": 0,
                                       "routing/fallback_rows": 0}
    reordered = Routing(mixture, 11, CPU, kept.own.flip(-1))
    assert (model(IDS, use_cache=False, routing=reordered).logits - plain).abs().max() < 1e-4
    assert finalize(reordered.metrics())["routing/layers_differ_frac"] == 0

    forced = Routing(mixture, 11, CPU, (kept.own + 3) % 8)
    other = model(IDS, use_cache=False, routing=forced).logits
    assert other.isfinite().all() and (other - plain).abs().max() > 1e-2
    assert finalize(forced.metrics())["routing/tokens_differ_frac"] > 0.8
    other.square().mean().backward()
    routers = [p for n, p in model.named_parameters() if n.endswith("weight") and p.dim() == 2 and p.shape[0] == 8]
    assert len(routers) == layers
    assert all(p.grad.abs().sum() > 0 for p in routers), "gradients reach the router through the gates"


def test_gates_of_replayed_experts_are_the_trainers():
    """By hand: g_e = exp(s_e) / sum over the replayed set, and y = sum g_e expert_e(x)."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    model = built("Qwen3Moe", EIGHT | dict(moe_intermediate_size=24, norm_topk_prob=True))
    mixture, seen = route(model), {}
    router = next(module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter))
    router.register_forward_hook(lambda module, args, out: seen.update(x=args[0], out=out))
    given = mixture.unknown(11)
    given[4, 0] = torch.tensor([6, 1])
    model(IDS, use_cache=False, routing=Routing(mixture, 11, CPU, given))
    scores = seen["x"] @ router.weight.T
    _, gates, chosen = seen["out"]
    assert chosen[4].tolist() == [6, 1]
    torch.testing.assert_close(gates[4], scores[4, [6, 1]].softmax(0))
    best = scores.topk(2).indices
    assert torch.equal(chosen[torch.arange(11) != 4], best[torch.arange(11) != 4]), "unknown: the router's own"


def test_a_model_that_picks_experts_another_way_is_refused():
    model = built("Phimoe", LOCAL)
    routing = Routing(route(model), 11, CPU)
    model(IDS, use_cache=False, routing=routing)
    with pytest.raises(ModelError, match="only 0 of 3 mixtures .* policy.routing_replay must be off"):
        routing.check()


def test_dense_models_have_no_mixture():
    assert route(built("Llama", {})) is None


@pytest.mark.parametrize("experts, chosen, dtype", [
    (8, 2, torch.uint8), (256, 8, torch.uint8), (257, 2, torch.uint16), (255, 1, torch.uint8), (256, 1, torch.uint16)])
def test_experts_travel_in_the_narrowest_type(experts, chosen, dtype):
    mixture = Mixture(experts, chosen, layers=2)
    given = torch.arange(experts - 2 * chosen, experts, dtype=torch.int32).view(1, 2, chosen)
    column = torch.cat([given, mixture.unknown(1)])
    packed = mixture.packed(column)
    assert packed.dtype == dtype
    assert torch.equal(mixture.unpacked(packed), column), "the last expert of all is told from an unknown one"


def test_experts_of_another_model_are_refused():
    mixture = Mixture(8, 2, layers=3)
    with pytest.raises(BatchError, match=r"must be torch.uint8 \[tokens, 3, 2\] .* got torch.uint8 \[5, 2, 2\]"):
        mixture.unpacked(torch.zeros(5, 2, 2, dtype=torch.uint8))
    with pytest.raises(BatchError, match="names expert 8; the model has 8"):
        mixture.unpacked(torch.full((5, 3, 2), 8, dtype=torch.uint8))


def test_rows_of_which_less_is_known_are_filled_up():
    mixture = Mixture(8, 1, layers=1)
    batch = make_batch(prompt_ids=[[1, 1], [1], [1, 1]], response_ids=[[2, 2], [2, 2, 2], []])
    known = torch.arange(4, dtype=torch.uint8).view(4, 1, 1)
    column = experts_column(mixture, batch, [known, known[:1], None])
    assert lengths(column).tolist() == [3, 3, 0]
    assert column.values().flatten().tolist() == [0, 1, 2, 0, 255, 255]
    put(batch, "routed_experts", column)
    assert select(batch, [1, 0])["routed_experts"].values().flatten().tolist() == [0, 255, 255, 0, 1, 2]
    wide = from_lengths(column.values().to(torch.uint16), lengths(column))
    put(batch, "routed_experts", wide)
    assert narrow(select(batch, [1, 0]), 1, 1)["routed_experts"].values().flatten().tolist() == [0, 1, 2]
    with pytest.raises(BatchError, match="'routed_experts' is declared torch.uint8 or torch.uint16, got torch.int32"):
        put(batch, "routed_experts", from_lengths(column.values().int(), lengths(column)))


# ---- the engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", num_experts=8)


def engine(folder, replay, **changes):
    made = TrainingEngine(ModelConfig(path=str(folder)), TrainingConfig(learning_rate=1e-3, **changes), CPU)
    made.replay = replay
    return made


def rows():
    generator = torch.Generator().manual_seed(3)
    def ids(n):
        return torch.randint(5, 60, (n,), generator=generator)
    return make_batch(prompt_ids=[ids(4), ids(2), ids(5), ids(3)], response_ids=[ids(3), ids(6), ids(0), ids(1)])


def summed(log_probs, columns, entropies):
    return log_probs.sum() / 10, {}


def shifted(column, experts=8):
    """Other experts than those of a column; the last token of each row unknown."""
    values = ((column.values().int() + 3) % experts).to(column.dtype)
    values[(column.offsets()[1:] - 1)[lengths(column) > 0]] = 255
    return from_lengths(values, lengths(column))


def test_the_first_pass_is_kept_and_replayed_when_it_is_asked_for(one_rank, folder):
    batch, training = rows(), engine(folder, "old")
    first = training.log_probs(batch)
    assert lengths(first["routed_experts"]).tolist() == [6, 7, 0, 3]
    assert (first["routed_experts"].values() < 8).all()
    put(batch, "routed_experts", first["routed_experts"])
    again = training.log_probs(batch)
    assert "routed_experts" not in again
    assert torch.equal(again["log_probs"].values(), first["log_probs"].values())
    assert "routed_experts" not in engine(folder, "off").log_probs(rows())
    put(batch, "routed_experts", shifted(first["routed_experts"]))
    forced = training.log_probs(batch)["log_probs"].values()
    assert (forced - first["log_probs"].values()).abs().max() > 1e-2
    training.replay = "off"
    assert torch.equal(training.log_probs(batch)["log_probs"].values(), first["log_probs"].values())


@pytest.mark.parametrize("changes", [{"micro_batch_tokens": 8}, {"gradient_checkpointing": "layers"},
                                     {"gradient_checkpointing": "selective", "micro_batch_tokens": 8}])
def test_an_update_replays_in_every_forward_pass(one_rank, folder, changes):
    """Gradients under forced experts don't depend on how the batch is cut, nor on what is computed twice."""
    batch = rows()
    batch["routed_experts"] = shifted(engine(folder, "old").log_probs(batch)["routed_experts"])
    whole, cut = engine(folder, "rollout"), engine(folder, "rollout", **changes)
    wanted, found = (finalize(e.backward(batch, summed)) for e in (whole, cut))
    for p, q in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)
    for metrics in (wanted, found):
        assert metrics["routing/fallback_rows"] == 3 * 2, "three rows end in a token of unknown experts, in two layers"
        assert 0.5 < metrics["routing/layers_differ_frac"] <= metrics["routing/tokens_differ_frac"] == 1


def test_own_experts_give_the_gradient_of_no_replay(one_rank, folder):
    batch, live = rows(), engine(folder, "off")
    live.backward(batch, summed)
    replayed = engine(folder, "old")
    batch["routed_experts"] = replayed.log_probs(batch)["routed_experts"]
    metrics = finalize(replayed.backward(batch, summed))
    assert metrics["routing/layers_differ_frac"] == metrics["routing/fallback_rows"] == 0
    for p, q in zip(live.model.parameters(), replayed.model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_the_gap_without_replay_is_measured_on_demand(one_rank, folder):
    batch, training = rows(), engine(folder, "old")
    first = training.log_probs(batch)
    batch["routed_experts"] = shifted(first["routed_experts"])
    batch["rollout_log_probs"] = training.log_probs(batch)["log_probs"]
    batch["response_mask"] = from_lengths(torch.ones(10, dtype=torch.bool), lengths(batch["response_ids"]))
    training.compare_routing = True
    metrics = finalize(training.backward(batch, summed))
    gap = first["log_probs"].values() - batch["rollout_log_probs"].values()
    assert metrics["mismatch_live/kl_k1"] == pytest.approx(-gap.mean().item(), rel=1e-4)
    beyond = (gap.abs() > 0.6931471805599453).float().mean().item()
    assert metrics["mismatch_live/frac_beyond_2"] == pytest.approx(beyond) and beyond > 0


def test_columns_that_do_not_fit_are_refused(one_rank, folder):
    batch, training = rows(), engine(folder, "rollout")
    column = engine(folder, "old").log_probs(batch)["routed_experts"]
    batch["routed_experts"] = from_lengths(column.values(), lengths(column).flip(0))
    with pytest.raises(BatchError, match="routed_experts has rows of"):
        training.log_probs(batch)


# ---- the transformers engine


def test_the_transformers_engine_keeps_experts_of_rows_of_any_length(folder):
    """Rows of a cohort are padded on the left, end at different times, and may begin again under new weights."""
    engine = TransformersEngine(folder, CPU, torch.float32, [1], frozen=True, keep_experts=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mixture = route(model)
    assert engine.mixture == mixture
    requests = [Request(list(range(5, 7 + 4 * i)), 3 + 5 * i, seed=i) for i in range(3)]
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        fed = torch.tensor([[*request.prompt_ids, *completion.token_ids[:-1]]])
        own = Routing(mixture, fed.shape[1], CPU)
        model(fed, routing=own)
        assert torch.equal(mixture.unpacked(completion.experts).sort(-1).values, own.own.sort(-1).values)
    assert TransformersEngine(folder, CPU, torch.float32, [1], frozen=True).mixture is None
