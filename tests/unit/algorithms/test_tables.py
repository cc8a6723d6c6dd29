"""Tables, options, bad input, and combinations that can't work."""

import re
from dataclasses import dataclass

import pytest
import torch

import hybridrl.algorithms as algorithms
from hybridrl.algorithms import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    KEEP_MASKS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    Table,
    cispo,
    compute_advantages,
    correct,
    group_metrics,
    grpo_advantages,
    length_metrics,
    loss_weights,
    option,
    pass_at_k_advantages,
    policy_loss,
    ppo_clip,
    reinforce_advantages,
    second_moment_mask,
    sequence_clip,
    token_kl,
    value_loss,
    whiten,
)
from hybridrl.algorithms.combinations import check_combination
from hybridrl.config import AlgorithmConfig, Choice, KLConfig, OverlongConfig
from hybridrl.errors import BatchError, ConfigError
from tests.unit.algorithms.cases import make_columns

ALL_TABLES = (ADVANTAGES, AGGREGATIONS, CORRECTIONS, KEEP_MASKS, KL_ESTIMATORS, POLICY_LOSSES)


def test_exports():
    assert sorted(set(algorithms.__all__)) == list(algorithms.__all__)
    for name in algorithms.__all__:
        assert getattr(algorithms, name) is not None
        assert not isinstance(getattr(algorithms, name), type(algorithms)), f"{name} is a module"


@pytest.mark.parametrize("table", ALL_TABLES, ids=lambda t: t.kind)
def test_defaults_of_options_and_functions_agree(table):
    import inspect

    for name, entry in table.items():
        built, parameters = table.options(name), inspect.signature(entry.fn).parameters
        for key, value in vars(built).items():
            assert parameters[key].default == value, (name, key)
        assert entry.fn.__doc__, name
        if entry.aggregation:
            assert entry.aggregation in AGGREGATIONS


@dataclass(kw_only=True)
class Options:
    scale: float = option(1.0, gt=0, le=10)
    mode: str = option("a", choices=("a", "b"))
    steps: int | None = option(None, ge=1)
    flag: bool = False
    weights: list[float] | None = None


def make_table():
    table = Table("thing")

    @table.register("one", options=Options)
    def one(x, y=None, *, scale=Options.scale, mode=Options.mode, steps=Options.steps, flag=False, weights=None):
        return x, y, scale, mode, steps, flag, weights

    return table


def test_two_line_registration():
    table = make_table()

    @table.register("mine")
    def mine(x, *, factor: float = 2.0):
        return x * factor

    assert table.call("mine", {"factor": 3}, {"x": 2, "unused": 5}) == 6.0
    assert list(table) == ["one", "mine"]
    assert "mine" in table
    assert "other" not in table
    with pytest.raises(ConfigError, match="mine option 'facto'.*Did you mean factor"):
        table.options("mine", {"facto": 1})
    with pytest.raises(ConfigError, match="already registered"):
        table.register("mine")(lambda x: x)
    same = table["mine"].fn
    table.register("mine")(same)  # a notebook cell that runs again
    assert list(table) == ["one", "mine"]
    with pytest.raises(ConfigError, match="no parameters of"):
        table.register("two", options=Options)(lambda x: x)


def test_options_are_built_and_passed():
    table = make_table()
    given = {"scale": 2, "mode": "b", "steps": 4, "flag": True, "weights": [1, 2]}
    assert table.call("one", given, {"x": 7}) == (7, None, 2.0, "b", 4, True, [1.0, 2.0])
    assert table.call("one", Options(scale=3.0), {"x": 7, "y": 8})[:3] == (7, 8, 3.0)
    assert isinstance(table.options("one", {"scale": 2}).scale, float)
    assert table["one"].columns == {"x": True, "y": False}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scale": 0}, "'scale' of thing 'one' must be a number above 0 and at most 10, got 0"),
        ({"scale": "2"}, "must be a number"),
        ({"scale": True}, "must be a number"),
        ({"scale": float("nan")}, "must be a number"),
        ({"scale": None}, "must be a number"),
        ({"mode": "c"}, "one of a, b, got 'c'"),
        ({"steps": 1.5}, "a whole number at least 1 or null, got 1.5"),
        ({"steps": 0}, "at least 1"),
        ({"flag": 1}, "true or false"),
        ({"weights": [1, "x"]}, "a list of numbers or null"),
        ({"weights": 3}, "a list of numbers"),
        ({"scael": 1}, "Unknown thing one option 'scael'. Did you mean scale"),
        ([1], "must be a mapping"),
    ],
)
def test_bad_options(values, message):
    with pytest.raises(ConfigError, match=message):
        make_table().options("one", values)


def test_unknown_names_show_near_matches():
    for table, typo, near in (
        (ADVANTAGES, "gpro", "grpo"),
        (POLICY_LOSSES, "ppo_clp", "ppo_clip"),
        (AGGREGATIONS, "token_mean", "token-mean"),
        (KL_ESTIMATORS, "rhok3", "rho_k3"),
        (CORRECTIONS, "token_tsi", "token_tis"),
    ):
        with pytest.raises(ConfigError, match=f"Unknown {table.kind} '{typo}'. Did you mean.*{near}"):
            table[typo]


def test_missing_columns_are_named():
    columns = make_columns(1)
    del columns["group_ids"]
    with pytest.raises(BatchError, match="advantage 'grpo' needs the column 'group_ids'"):
        compute_advantages("grpo", columns)
    with pytest.raises(BatchError, match="group_ids"):
        compute_advantages("reinforce", columns, {"baseline": "group"})
    with pytest.raises(BatchError, match="moving_baseline"):
        compute_advantages("reinforce", columns, {"baseline": "moving"})
    with pytest.raises(BatchError, match="policy loss 'kl_cov' needs the column 'kl_cov_tokens'"):
        policy_loss("kl_cov", columns)
    with pytest.raises(BatchError, match="advantage 'gae' needs the column 'values'"):
        compute_advantages("gae", {"mask": columns["mask"], "rewards": columns["rewards"]})
    with pytest.raises(BatchError, match="'rewards'.*or 'token_rewards'"):
        compute_advantages("gae", {"mask": columns["mask"], "values": columns["values"]})


def test_token_rewards_alone_are_enough():
    """Group estimators score a row by the sum of its token rewards: 1 and 0 here."""
    token_rewards = torch.tensor([[0.5, 0.5], [1.0, -1.0]])
    columns = {"token_rewards": token_rewards, "group_ids": torch.tensor([4, 4]), "mask": torch.ones(2, 2).bool()}
    assert compute_advantages("dr_grpo", columns).advantages.tolist() == [[0.5, 0.5], [-0.5, -0.5]]
    assert compute_advantages("max_at_k", columns, {"k": 1}).advantages.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    del columns["token_rewards"]
    with pytest.raises(BatchError, match="'rewards'.*or 'token_rewards'"):
        compute_advantages("dr_grpo", columns)


GOOD = make_columns(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: grpo_advantages(c["rewards"], c["group_ids"], c["mask"].float()), "'mask' must be bool"),
        (lambda c: grpo_advantages(c["rewards"][1:], c["group_ids"], c["mask"]), r"'rewards' must be.*\[7\].*\[6\]"),
        (lambda c: grpo_advantages(c["rewards"].long(), c["group_ids"], c["mask"]), "'rewards' must be floating"),
        (lambda c: grpo_advantages(c["rewards"], c["group_ids"].double(), c["mask"]), "'group_ids' must be an integer"),
        (lambda c: grpo_advantages(c["rewards"], c["group_ids"][:3], c["mask"]), "'group_ids'"),
        (lambda c: grpo_advantages(c["rewards"], None, c["mask"]), "'group_ids'"),
        (lambda c: policy_loss("ppo_clip", {**c, "advantages": c["advantages"][:, :1]}), r"'advantages'.*\[7, 9\]"),
        (lambda c: policy_loss("ppo_clip", {**c, "log_probs": c["log_probs"].long()}), "'log_probs'"),
        (lambda c: token_kl("k1", c["log_probs"], c["ref_log_probs"][0], c["mask"]), "'ref_log_probs'"),
        (lambda c: value_loss(c["values"], c["old_values"], None, c["mask"]), "'returns'"),
        (lambda c: compute_advantages("pass_at_k", {**c, "rewards": c["rewards"] + 3.5}), "0 or 1"),
        (lambda c: compute_advantages("maxrl", {**c, "rewards": c["rewards"] - 9}), "at least 0"),
        (lambda c: compute_advantages("gdpo", c, {"weights": [1.0]}), "one number per component"),
        (lambda c: compute_advantages("gdpo", {**c, "reward_components": c["mask"]}), "'reward_components'.*got.*bool"),
        (lambda c: compute_advantages("grpo", {**c, "values": None, "group_ids": None}), r"batch has: (?!.*group_ids)"),
        (lambda c: compute_advantages("reinforce", {**c, "moving_baseline": torch.ones(2)}, {"baseline": "moving"}),
         r"'moving_baseline' must be.*\[7\].*\[2\]"),
        (lambda c: compute_advantages("reinforce_pp", {**c, "old_log_probs": 1.0}, {"kl_coef": 1}), "'old_log_probs'"),
        (lambda c: policy_loss("gpg", {**c, "log_probs": [1.0]}), "'log_probs'.*got list"),
        (lambda c: policy_loss("aipo", {**c, "rollout_log_probs": None}), "'rollout_log_probs'"),
        (lambda c: policy_loss("aipo", {**c, "rollout_log_probs": c["mask"]}), "'rollout_log_probs'.*bool"),
        (lambda c: policy_loss("kl_cov", {**c, "kl_cov_tokens": c["values"]}), "'kl_cov_tokens' must be bool"),
        (lambda c: policy_loss("clip_cov", {**c, "clip_cov_tokens": c["mask"][1:]}), "'clip_cov_tokens' must be bool"),
        (lambda c: token_kl("rho_k3", c["log_probs"][:2], c["ref_log_probs"], c["mask"], c["old_log_probs"]), "'log_p"),
        (lambda c: correct(["veto"], {**c, "mask": c["mask"].float()}), "'mask' must be bool"),
        (lambda c: length_metrics(c["mask"].float()), "'mask' must be bool"),
        (lambda c: whiten(c["values"], c["mask"].float()), "'mask' must be bool"),
        (lambda c: group_metrics(c["rewards"], c["group_ids"][:2]), r"'group_ids' must be \[N\].*\[2\] for \[7\]"),
    ],
)
def test_bad_tensors(call, message):
    with pytest.raises(BatchError, match=message):
        call(dict(GOOD))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: grpo_advantages(*c, std="half"), "'std' of advantage 'grpo' must be one of .*, got 'half'"),
        (lambda c: reinforce_advantages(c[2], c[0], baseline="mean"), "'baseline' of advantage 'reinforce' must be"),
        (lambda c: pass_at_k_advantages(*c, k=0), "'k' of advantage 'pass_at_k' must be a whole number at least 1"),
        (lambda c: sequence_clip(*[c[3]] * 3, c[2], dual_clip=1.2), "'sequence_clip': dual_clip must be .*got 1.2"),
        (lambda c: ppo_clip(*[c[3]] * 3, c[2], clip_low=-1.0), "'clip_low' of policy loss 'ppo_clip' must be a number"),
        (lambda c: cispo(*[c[3]] * 3, c[2], ratio_min=6.0), "ratio_min must be at most ratio_max = 5, got 6"),
        (lambda c: second_moment_mask(c[3], c[3], c[2], threshold=-1.0), "'threshold' of keep mask 'second_moment'"),
    ],
)
def test_options_of_plain_calls_are_checked(call, message):
    with pytest.raises(ConfigError, match=message):
        call([GOOD[name] for name in ("rewards", "group_ids", "mask", "log_probs")])


def test_k_above_the_group_size():
    columns = {"rewards": torch.ones(3), "group_ids": torch.zeros(3).long(), "mask": torch.ones(3, 1).bool()}
    with pytest.raises(BatchError, match="k=4 and 3"):
        compute_advantages("pass_at_k", columns, {"k": 4})


# ---- combinations


def check(critic=False, **changes):
    """`corrections` and `keep_masks` are given as name -> options, `loss` and `advantage` by name."""
    options = {key: changes.pop(f"{key}_options", {}) for key in ("advantage", "loss")}
    for key, name in (("advantage", "grpo"), ("loss", "ppo_clip")):
        changes[key] = Choice(name=changes.get(key, name), options=options[key])
    for key in ("corrections", "keep_masks"):
        changes[key] = [Choice(name=name, options=values) for name, values in changes.get(key, {}).items()]
    check_combination(AlgorithmConfig(**changes), critic)


def test_good_combinations():
    check()
    check(advantage="reinforce", responses_per_prompt=1)
    check(advantage="gae", critic=True, responses_per_prompt=1)
    check(corrections={"token_tis": {}, "geometric_mask": {}}, self_normalise=True)
    check(loss="aipo", corrections={"geometric_mask": {}})
    check(loss="decoupled_ppo", corrections={"sequence_tis": {}})
    check(anchor="rollout", corrections={"geometric_mask": {}}, keep_masks={"high_entropy": {}})
    check(advantage="grpo", advantage_options={"singleton": "raw"}, responses_per_prompt=1)
    check(aggregation="prompt-mean", kl=KLConfig(estimator="k3+"))
    check(aggregation="seq-mean-token-mean", aggregation_options={"per_trajectory": True})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_options": {"dual_clip": 1.1}}, r"dual_clip must be above 1 \+ clip_high = 1.2 or null, got 1.1"),
        ({"loss": "aipo", "corrections": {"token_tis": {}}}, "token_tis.*aipo.*twice"),
        ({"anchor": "rollout", "corrections": {"sequence_tis": {}}}, "sequence_tis.*'rollout'.*twice"),
        ({"anchor": "rollout", "loss": "decoupled_ppo"}, "anchor must be 'old'.*already corrects; got 'rollout'"),
        ({"anchor": "rollout", "loss": "gpg"}, "anchor must be 'old' with loss 'gpg', which has no ratio"),
        ({"corrections": {"token_tis": {}, "icepop": {}}}, "at most one"),
        ({"corrections": {"icepop": {"lo": 9.0}}}, "lo must be at most hi"),
        ({"self_normalise": True}, "self_normalise must be false without corrections; got true"),
        ({"self_normalise": True, "loss": "aipo", "corrections": {"veto": {}}}, "self_normalise must be false with"),
        ({"responses_per_prompt": 1}, "responses_per_prompt must be at least 2.*got 1"),
        ({"advantage": "reinforce", "advantage_options": {"baseline": "group"}, "responses_per_prompt": 1}, "least 2"),
        ({"advantage": "gae"}, "'gae' needs a critic.*accepted: .*grpo"),
        ({"advantage": "rloo", "critic": True}, "'rloo' does not read the critic.*accepted: gae"),
        ({"advantage": "pass_at_k", "advantage_options": {"k": 9}}, "k must be at most responses_per_prompt = 8"),
        ({"advantage": "max_at_k", "advantage_options": {"k": 9}}, "k must be at most responses_per_prompt = 8, got 9"),
        ({"advantage": "grop"}, "Unknown advantage"),
        ({"aggregation": "mean"}, "Unknown aggregation"),
        ({"aggregation_options": {"per_trajectory": True}}, "Unknown aggregation token-mean option 'per_trajectory'"),
        ({"kl": KLConfig(estimator="k4")}, "Unknown kl estimator"),
        ({"kl": KLConfig(options={"x": 1})}, "Unknown kl estimator k3\\+ option 'x'"),
        ({"keep_masks": {"high_entrop": {}}}, "Unknown keep mask 'high_entrop'. Did you mean high_entropy"),
        ({"keep_masks": {"high_entropy": {"frac": 0}}}, "'frac' of keep mask 'high_entropy' must be a number above 0"),
        ({"advantage": "gdpo", "kl": KLConfig(coefficient=0.1, place="reward")}, "kl.place must be 'loss'.*'gdpo'"),
        ({"advantage": "gdpo", "overlong": OverlongConfig(penalty=1.0)}, "overlong.penalty changes rewards"),
        ({"advantage": "reinforce_pp", "advantage_options": {"kl_coef": 0.1}, "responses_per_prompt": 1,
          "kl": KLConfig(coefficient=0.1, place="reward")}, "kl_coef of advantage 'reinforce_pp' must be 0"),
    ],
)
def test_impossible_combinations(changes, message):
    with pytest.raises(ConfigError, match=message):
        check(**changes)


def test_an_entry_is_chosen_once():
    twice = AlgorithmConfig(corrections=[Choice(name="veto"), Choice(name="veto")])
    with pytest.raises(ConfigError, match="corrections must name each entry once, got veto, veto"):
        check_combination(twice)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda mask: loss_weights("token-mean", mask), BatchError,
         "columns for aggregation must be a mapping of names to padded tensors, got Tensor"),
        (lambda mask: POLICY_LOSSES.prepare("kl_cov", {}, {"mask": mask}), BatchError,
         "policy loss 'kl_cov' needs the column 'advantages'; the batch has: mask"),
        (lambda mask: policy_loss("ppo_clip", {"log_probs": mask}), BatchError, "'ppo_clip' needs 'mask', got None"),
        (lambda mask: correct({}, {}), BatchError, "correct needs 'mask', got None"),
        (lambda mask: correct("token_tis", {"mask": mask}), ConfigError,
         "schemes must be a list of names, or a mapping from name to options, got 'token_tis'"),
        (lambda mask: ADVANTAGES[mask], ConfigError, "Unknown advantage Tensor. Choices: distill"),
    ],
)
def test_misuse_from_plain_python_is_named(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(torch.ones(2, 3, dtype=torch.bool))
