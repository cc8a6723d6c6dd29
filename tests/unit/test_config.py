"""Options: what composes, and the one line that each mistake gets."""

import dataclasses
import inspect
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from hybridrl import config
from hybridrl.algorithms.algorithm import Algorithm
from hybridrl.config import RECIPES, Choice, GRPOConfig, RewardFunctionConfig, TrainerConfig, validate_all
from hybridrl.config_loading import CONFIG_DIR, fitting, groups_of, load, to_yaml
from hybridrl.config_reference import field_docs, options_of, reference
from hybridrl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {
    "grpo": ["policy.model.path=m", "data.path=d"],
    "ppo": ["policy.model.path=m", "data.path=d"],
    "agent": ["policy.model.path=m", "data.path=d", "environment.name=guess"],
    "distill": ["policy.model.path=m", "data.path=d", "teacher.model.path=t"],
    "sft": ["policy.model.path=m", "data.path=d"],
    "evaluate": ["policy.model.path=m", "data.path=d"],
    "serve": ["policy.model.path=m"],
}


def grpo(*overrides, **keywords):
    return load("grpo", GRPOConfig, [*NEEDED["grpo"], *overrides], **keywords)


def refusal(*overrides, **keywords):
    with pytest.raises(ConfigError) as caught:
        grpo(*overrides, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def my_yaml(tmp_path):
    def write(text):
        file = tmp_path / "my.yaml"
        file.write_text(text)
        return file
    return write


# What composes


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_every_recipe_loads_with_its_required_options_only(recipe):
    loaded = load(recipe, RECIPES[recipe], NEEDED[recipe])
    assert type(loaded) is RECIPES[recipe]
    assert loaded.policy.model.path == "m"


@pytest.mark.parametrize("choice", groups_of("grpo")["algorithm"])
def test_every_algorithm_loads(choice):
    algorithm = grpo(f"algorithm={choice}").algorithm
    others = {"dapo", "decoupled", "high_entropy", "m2po", "pkpo", "scalerl"}  # named after more than one entry
    assert choice in {algorithm.advantage.name, algorithm.loss.name} | others
    Algorithm(algorithm, max_response_tokens=8)


def test_a_recipe_offers_the_experiments_whose_options_it_has():
    experiments = {recipe: groups_of(recipe).get("experiment", []) for recipe in RECIPES}
    assert {recipe: fitting("experiment", experiments[recipe], cls) for recipe, cls in RECIPES.items()} == {
        "grpo": ["demo", "moe_demo", "smollm2"], "ppo": ["demo", "moe_demo", "smollm2"],
        "distill": ["demo", "demo_distill", "moe_demo", "smollm2"], "sft": ["demo_sft", "guess_sft"],
        "agent": ["demo", "demo_agent", "moe_demo", "smollm2", "smollm2_agent"], "evaluate": [], "serve": []}


def test_every_experiment_loads_with_one_of_the_recipes():
    for experiment in (path.stem for path in (CONFIG_DIR / "experiment").glob("*.yaml")):
        refusals = []
        for recipe, cls in RECIPES.items():
            try:
                load(recipe, cls, [*(word for word in NEEDED[recipe] if word != "data.path=d"),
                                   f"experiment={experiment}"])
            except ConfigError as error:
                refusals.append(str(error))
        assert len(refusals) < len(RECIPES), refusals


def test_defaults_are_those_of_the_classes():
    loaded = grpo()
    expected = GRPOConfig()
    expected.policy.model.path, expected.data.path = "m", "d"
    assert loaded == expected


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("trainer.steps=7", lambda c: c.trainer.steps, 7),
        ("policy.training.learning_rate=1e-5", lambda c: c.policy.training.learning_rate, 1e-5),
        ("policy.training.learning_rate=1", lambda c: c.policy.training.learning_rate, 1.0),
        ("policy.rollout.enforce_eager=true", lambda c: c.policy.rollout.enforce_eager, True),
        ("data.path='a, b'", lambda c: c.data.path, "a, b"),
        ("data.path=7", lambda c: c.data.path, "7"),
        ("trainer.trackers=[]", lambda c: c.trainer.trackers, []),
        ("trainer={steps: 4}", lambda c: c.trainer.steps, 4),
        ("++trainer.steps=7", lambda c: c.trainer.steps, 7),
        ("trainer.steps=${seed}", lambda c: c.trainer.steps, 0),
        ("data.task_options.min_terms=2", lambda c: c.data.task_options, {"min_terms": 2}),
        ("+data.task_options.min_terms=2", lambda c: c.data.task_options, {"min_terms": 2}),
        ("data.task_options={a: 1, b: [x]}", lambda c: c.data.task_options, {"a": 1, "b": ["x"]}),
        ("reward.functions.0.name=numeric", lambda c: c.reward.functions, [RewardFunctionConfig(name="numeric")]),
        ("reward.functions=[{name: numeric, weight: 2}]", lambda c: c.reward.functions,
         [RewardFunctionConfig(name="numeric", weight=2.0)]),
        ("algorithm.advantage.options.std=batch", lambda c: c.algorithm.advantage,
         Choice(name="grpo", options={"std": "batch"})),
        ("+algorithm=rloo", lambda c: c.algorithm.advantage.name, "rloo"),
        ("~algorithm", lambda c: c.algorithm.advantage.name, "grpo"),
    ],
)
def test_overrides_read_as_in_hydra(override, read, expected):
    assert read(grpo(override)) == expected


def test_an_entry_of_a_mapping_can_be_removed(my_yaml):
    file = my_yaml("data: {task_options: {a: 1, b: 2}}")
    assert grpo("~data.task_options.a", file=file).data.task_options == {"b": 2}


def test_layers_win_in_the_documented_order(my_yaml):
    file = my_yaml("defaults: [{override /algorithm: rloo}]\ntrainer: {steps: 11, eval_prompts: 12}\n")
    loaded = grpo("trainer.steps=3", file=file)
    assert loaded.algorithm.advantage.name == "rloo" and loaded.algorithm.aggregation == "seq-mean-token-sum"
    assert (loaded.trainer.steps, loaded.trainer.eval_prompts) == (3, 12)
    assert grpo().trainer.steps == TrainerConfig().steps, "a file must not stay for the next load"


def test_a_written_config_reads_back_as_itself(my_yaml):
    loaded = grpo("algorithm=rloo", "data.task_options={a: 1e-6, b: yes, c: '1'}", "policy.training.learning_rate=3e-7")
    assert load("grpo", GRPOConfig, file=my_yaml(to_yaml(loaded))) == loaded


def test_loading_leaves_the_working_directory_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    grpo("algorithm=rloo")
    assert Path.cwd() == tmp_path and not list(tmp_path.iterdir())


def test_a_config_class_of_the_user_may_have_more_options():
    @dataclass(kw_only=True, slots=True)
    class Mine(GRPOConfig):
        bonus: float = 0.5

    assert load("grpo", Mine, [*NEEDED["grpo"], "bonus=2"]).bonus == 2.0


# What is refused, and how


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.stepz=3", "Unknown option 'trainer.stepz'. Did you mean trainer.steps?"),
        ("+trainer.stepz=3", "Unknown option 'trainer.stepz'. Did you mean trainer.steps?"),
        ("++trainer.stepz=3", "Unknown option 'trainer.stepz'. Did you mean trainer.steps?"),
        ("trainer={stepz: 3}", "Unknown option 'trainer.stepz'. Did you mean trainer.steps?"),
        ("steps=3", "Unknown option 'steps'. Did you mean trainer.steps?"),
        ("tariner.steps=3", "Unknown option 'tariner.steps'. Did you mean trainer.steps?"),
        ("algorithm.kl.zzz=3", "Unknown option 'algorithm.kl.zzz'. Choices: algorithm.kl.coefficient, "
                               "algorithm.kl.place, algorithm.kl.estimator, algorithm.kl.options, algorithm.kl.target, "
                               "algorithm.kl.horizon."),
        ("zzz=3", "Unknown option 'zzz'. Choices: " + ", ".join(f.name for f in dataclasses.fields(GRPOConfig)) + "."),
        ("hydra.run.dir=x", "Unknown option 'hydra.run.dir'."),
        ("reward.functions.0.nam=x", "Did you mean reward.functions[].name?"),
        ("reward.functions=[{nam: x}]", "Did you mean reward.functions[].name?"),
        ("algorithm=gpro", "Unknown algorithm 'gpro'. Did you mean "),
        ("experiment=nope", "Unknown experiment 'nope'."),
        ("policy.training.lr=1", "Unknown option 'policy.training.lr'. Did you mean policy.training.learning_rate?"),
        ("reward.functions=numeric", "reward.functions must be a list, got 'numeric'."),
        ("reward.functions=[numeric]", "reward.functions[0] must be a mapping of options, {name: value, ...}, got "),
        ("reward=null", "reward must be a group of options (reward.name=value), got "),
        ("eval_suites=[{name: a, data: x}]", "eval_suites[].data must be a group of options "),
        ("algorithm=null", "Unknown algorithm 'null'. Choices: "),
        ("experiment=demo_agent", "experiment=demo_agent sets options of another recipe. "
                                  "Choices here: demo, moe_demo, smollm2."),
        ("data.task=chain_sum", "data.task must be empty with data.source=jsonl, got 'chain_sum'."),
        ("data={source: reasoning_gym, task: chain_sum}", "data.path must be empty with data.source=reasoning_gym, "),
        ("trainer.steps=abc", "trainer.steps must be a whole number, got 'abc'."),
        ("trainer.steps=1.5", "trainer.steps must be a whole number, got '1.5'."),
        ("trainer.steps=null", "trainer.steps must be a whole number, got 'null'."),
        ("seed=[1]", "seed must be a whole number, got '[1]'."),
        ("trainer=3", "trainer must be a group of options (trainer.name=value), got '3'."),
        ("trainer.trackers=wandb", "trainer.trackers must be a list, got 'wandb'."),
        ("policy.rollout.enforce_eager=maybe", "policy.rollout.enforce_eager must be true or false, got 'maybe'."),
        ("policy.training.gradient_checkpointing=layer",
         "policy.training.gradient_checkpointing: Unknown choice 'layer'. Did you mean layers?"),
        ("policy.training.micro_batch_tokens=1000",
         "policy.training.micro_batch_tokens must be at least 1024, the tokens that a rank may have of one sequence "
         "(policy.rollout.max_prompt_tokens=512 + max_response_tokens=512), got 1000."),
        ("reward.functions=[{weight: x}]", "reward.functions[].weight must be a number, got 'x'."),
        ("trainer.steps", "Can't read 'trainer.steps': options are written key=value"),
        ("trainer.steps=[1", "Can't read 'trainer.steps=[1'"),
        ("", "Can't read ''"),
        ("trainer.steps=1,2", "one value is needed; a list is written trainer.steps=[a,b]."),
        ("~trainer.steps", "trainer.steps can't be removed"),
        ("trainer.steps=${nope}", "trainer.steps: Interpolation key 'nope' not found"),
        ("trainer.trackers=[wanb]", "Unknown choice 'wanb'. Did you mean wandb?"),
        ("trainer.steps=-1", "trainer.steps must be at least 0, got -1."),
        ("data.path=''", "data.path must be a path with source=jsonl, got ''."),
        ("eval_data.source=reasoning_gym", "eval_data.task must be a reasoning-gym task"),
    ],
)
def test_a_wrong_option_gets_one_line(override, message):
    assert message in refusal(override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.ranks=3", "policy.rollout.tensor_parallel=2"],
         "cluster.ranks must be a multiple of policy.rollout.tensor_parallel=2, got 3."),
        (["cluster.ranks=4", "policy.training.shard_ranks=3"],
         "policy.training.shard_ranks must be a divisor of cluster.ranks=4 (1, 2, 4), got 3."),
        (["cluster.ranks=2", "policy.training.context_parallel=4"],
         "policy.training.context_parallel must be a divisor of cluster.ranks=2 (1, 2), got 4."),
        (["reference.ranks=-1"], "reference.ranks must be at least 0, got -1."),
        (["reference.ranks=1"], "reference.ranks must be 0 without a KL penalty (algorithm.kl.coefficient), got 1."),
        (["reference.ranks=1", "algorithm.kl.coefficient=0.1", "cluster.backend=local"],
         "reference.ranks must be 0 with cluster.backend=local, got 1."),
        (["reference.ranks=1", "algorithm.kl.coefficient=0.1", "policy.training.lora.rank=4"],
         "reference.ranks must be 0 with policy.training.lora, whose base is the reference, got 1."),
        (["cluster.ranks=2", "reference.ranks=1", "algorithm.kl.coefficient=0.1", "policy.training.context_parallel=2"],
         "policy.training.context_parallel must be a divisor of reference.ranks=1 (1), got 2."),
        (["policy.training.compile=true", "policy.training.gradient_checkpointing=selective"],
         "policy.training.gradient_checkpointing must be `none` or `layers` with compile=true"),
        (["policy.training.optimizer=muom"], "policy.training.optimizer: Unknown choice 'muom'. Did you mean muon"),
        (["policy.training.muon_momentum=1"], "policy.training.muon_momentum must be in [0, 1), got 1.0."),
        (["policy.routing_replay=r3"], "policy.routing_replay: Unknown choice 'r3'. Choices: off, old, rollout."),
        (["policy.routing_compare=true"], "policy.routing_compare must be false with policy.routing_replay=off, got"),
        (["cluster.ranks=2", "policy.training.context_parallel=2", "policy.routing_replay=old"],
         "policy.training.context_parallel must be 1 with policy.routing_replay=old, got 2."),
        (["policy.training.compile=true", "policy.routing_replay=rollout"],
         "policy.training.compile must be false with policy.routing_replay=rollout, got True."),
        (["policy.training.weight_decay=inf"], "policy.training.weight_decay must be at least 0 and finite, got inf."),
        (["policy.training.total_steps=-1"], "policy.training.total_steps must be at least 0, got -1."),
        (["algorithm.kl.coefficient=inf"], "algorithm.kl.coefficient must be at least 0 and finite, got inf."),
        (["algorithm.entropy.coefficient=inf"], "algorithm.entropy.coefficient must be at least 0 and finite, got"),
        (["algorithm.entropy.maximum=inf"], "algorithm.entropy.maximum must be finite, got inf."),
        (["algorithm.overlong.penalty=inf"], "algorithm.overlong.penalty must be at least 0 and finite, got inf."),
        (["algorithm.kl.options={a: 1}"], "Unknown kl estimator k3+ option 'a'. Choices: none."),
        (["policy.training.context_parallel=0"], "policy.training.context_parallel must be at least 1, got 0."),
        (["algorithm.mini_batches=5", "trainer.prompts_per_step=4"],
         "algorithm.mini_batches must be at most trainer.prompts_per_step=4, got 5."),
        (["algorithm.responses_per_prompt=1"], "responses_per_prompt must be at least 2 with advantage 'grpo'"),
        (["algorithm=rloo", "algorithm.responses_per_prompt=1"], "at least 2 with advantage 'rloo'"),
        (["trainer.eval_every=5"], "trainer.eval_every must be 0 while eval_data names no problems"),
        (["cluster.backend=local", "cluster.ranks=2"], "cluster.ranks must be 1 with cluster.backend=local, got 2."),
        (["algorithm.advantage.name=gpro"], "Unknown advantage 'gpro'. Did you mean grpo"),
        (["algorithm.loss.options.clip_hi=1"], "Did you mean clip_high"),
        (["algorithm.kl.estimator=k9"], "Unknown kl estimator 'k9'"),
        (["algorithm.loss.name=ppo_clp"], "Unknown policy loss 'ppo_clp'. Did you mean ppo_clip"),
        (["algorithm.aggregation=token_mean"], "Unknown aggregation 'token_mean'. Did you mean token-mean"),
        (["algorithm.corrections=[{name: token_ti}]"], "Unknown correction 'token_ti'. Did you mean token_tis"),
        (["algorithm.keep_masks=[{name: high_entropi}]"],
         "Unknown keep mask 'high_entropi'. Did you mean high_entropy"),
        (["algorithm.loss.options.dual_clip=1.1"], "dual_clip must be above 1 + clip_high = 1.2 or null, got 1.1."),
        (["algorithm.loss.options.clip_low=-1"],
         "'clip_low' of policy loss 'ppo_clip' must be a number at least 0, got -1."),
        (["algorithm.anchor=rollout"],
         "correction 'token_tis' weighs by the behaviour policy, and anchor 'rollout' already"),
        (["algorithm.loss.name=aipo"],
         "correction 'token_tis' weighs by the behaviour policy, and loss 'aipo' already"),
        (["algorithm.anchor=roll"],
         "algorithm.anchor: Unknown choice 'roll'. Did you mean rollout? Choices: old, rollout."),
        (["algorithm=pass_at_k", "algorithm.advantage.options.k=9"],
         "k must be at most responses_per_prompt = 8, got 9."),
        (["algorithm=pkpo", "algorithm.advantage.options.k=9"], "k must be at most responses_per_prompt = 8, got 9."),
        (["algorithm.kl.target=1"],
         "algorithm.kl.coefficient must be positive with target=1, which multiplies it, got 0.0."),
        (["algorithm.kl.place=lost"], "algorithm.kl.place: Unknown choice 'lost'. Did you mean loss?"),
        (["algorithm.entropy.coefficient=0.1", "algorithm.entropy.target=1"],
         "algorithm.entropy.coefficient must be from minimum=0 to maximum=0.005 with a target, got 0.1."),
        (["algorithm.entropy.minimum=1"], "algorithm.entropy.minimum must be from 0 to maximum=0.005, got 1.0."),
        (["algorithm.shaping.clip=-1"], "algorithm.shaping.clip must be at least 0 and finite, got -1.0."),
        (["algorithm.baseline_decay=1"], "algorithm.baseline_decay must be at least 0 and below 1, got 1.0."),
        (["algorithm=gdpo", "algorithm.overlong.penalty=1"],
         "overlong.penalty changes rewards, which advantage 'gdpo' does"),
    ],
)
def test_impossible_combinations_are_refused(overrides, message):
    assert message in refusal(*overrides)


def test_no_check_takes_long_for_a_large_number():
    assert grpo("cluster.ranks=1000000000000").cluster.ranks == 10**12  # what the machine has is known later


def test_one_response_is_fine_without_groups():
    assert grpo("algorithm=reinforce", "algorithm.responses_per_prompt=1").algorithm.responses_per_prompt == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {stepz: 3}", "Unknown option 'trainer.stepz'. Did you mean trainer.steps? (in {file})"),
        ("stepz: 3", "Unknown option 'stepz'."),
        ("trainer: {steps: x}", "trainer.steps must be a whole number, got 'x' (in {file})."),
        ("trainer: [", "{file} is no valid YAML"),
        ("- 1", "{file} must hold a mapping of options, got list."),
        ("defaults: [{override /algorithm: rlo}]", "Unknown algorithm 'rlo'. Did you mean rloo?"),
    ],
)
def test_a_wrong_file_is_named(my_yaml, text, message):
    file = my_yaml(text)
    assert message.format(file=file) in refusal(file=file)


def test_a_missing_file_is_named(tmp_path):
    assert f"Can't read the config file {tmp_path}/none.yaml" in refusal(file=tmp_path / "none.yaml")


def test_a_group_that_the_file_would_overrule_is_refused(my_yaml):
    file = my_yaml("algorithm: {epochs: 2}")
    assert "algorithm=rloo would be overruled" in refusal("algorithm=rloo", file=file)
    assert grpo("algorithm.epochs=3", file=file).algorithm.epochs == 3


def test_an_unknown_recipe_names_the_known_ones():
    with pytest.raises(ConfigError, match="Unknown recipe config 'grop'. Did you mean grpo"):
        load("grop", GRPOConfig)


def test_validate_all_goes_inside_out_and_hands_out_keys():
    seen = []

    @dataclass
    class Leaf:
        def validate(self, key):
            seen.append(key)

    @dataclass
    class Root:
        one: Leaf = field(default_factory=Leaf)
        many: list = field(default_factory=lambda: [Leaf(), Leaf()])

        def validate(self):
            seen.append("root")

    validate_all(Root())
    assert seen == ["one", "many[0]", "many[1]", "root"]


# An environment


@pytest.mark.parametrize(("recipe", "override", "message"), [
    ("agent", "environment.name=", "environment.name must be the name of an environment, or a class's import path "
                                   "(package.module:Class), got ''."),
    ("agent", "data={source: none, task_size: 0}", "data.task_size must be at least 1, got 0."),
    ("grpo", "data.source=none", "data.source must be a source of prompts without an environment, got 'none'."),
    ("ppo", "eval_data.source=none", "eval_data.source must be a source of prompts without an environment, got "
                                      "'none'."),
    ("sft", "data.source=none", "data.source must be a source of prompts without an environment, got 'none'."),
    ("evaluate", "data.source=none", "data.source must be a source of prompts without an environment, got 'none'."),
])
def test_episodes_need_an_environment(recipe, override, message):
    with pytest.raises(ConfigError) as caught:
        load(recipe, RECIPES[recipe], [*NEEDED[recipe], override])
    assert str(caught.value).startswith(message)


def test_environments_may_make_up_their_tasks():
    words = ["policy.model.path=m", "environment.name=guess", "data.source=none"]
    assert load("agent", RECIPES["agent"], [*words, "eval_data.source=none"]).eval_data.enabled
    load("evaluate", RECIPES["evaluate"], words)


def test_rewards_beside_an_environment_belong_to_a_suite():
    words = [*NEEDED["evaluate"], "environment.name=guess"]
    with pytest.raises(ConfigError, match=r"^reward must be left out with environment.name, .* got \['numeric'\]"):
        load("evaluate", RECIPES["evaluate"], [*words, "reward.functions=[{name: numeric}]"])
    load("evaluate", RECIPES["evaluate"], [*words, "reward.workers=3"])


# A critic


def ppo(*overrides):
    return load("ppo", RECIPES["ppo"], [*NEEDED["ppo"], *overrides])


def test_the_critic_starts_from_the_policy_unless_told_otherwise():
    loaded = ppo("policy.model.trust_remote_code=true")
    assert (loaded.critic.model.path, loaded.critic.model.trust_remote_code) == ("m", True)
    assert ppo("critic.model.path=other").critic.model.path == "other"
    assert loaded.algorithm.advantage.name == "gae"
    assert loaded.policy.training.learning_rate != loaded.critic.training.learning_rate == 1e-5
    assert ppo("algorithm.advantage.options={lam: 0.95, critic_lam: 1.0}").algorithm.advantage.options["lam"] == 0.95


@pytest.mark.parametrize(("override", "message"), [
    ("algorithm.advantage.name=grpo", "'grpo' does not read the critic that this recipe trains; accepted: gae."),
    ("critic.ranks=-1", "critic.ranks must be at least 0, got -1."),
    ("critic.value_clip=-0.1", "critic.value_clip must be at least 0, got -0.1."),
    ("critic.training.learning_rate=-1", "critic.training.learning_rate must be at least 0 and finite, got -1.0."),
    ("critic.training.schedule=lineer", "critic.training.schedule: Unknown choice 'lineer'. Did you mean linear?"),
    ("critic.model.path=", "critic.model.path must be a model folder, got ''."),
    ("critic.lr=1", "Unknown option 'critic.lr'."),
    ("algorithm.dynamic_sampling.enabled=true", "algorithm.dynamic_sampling.enabled must be false with a critic"),
])
def test_mistakes_about_the_critic(override, message):
    with pytest.raises(ConfigError) as caught:
        ppo(override)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_critic_of_its_own_needs_processes():
    with pytest.raises(ConfigError, match="critic.ranks must be 0 with cluster.backend=local, got 1"):
        ppo("critic.ranks=1", "cluster.backend=local")
    assert ppo("critic.ranks=2").critic.ranks == 2


def test_gae_without_a_critic_is_refused():
    assert "advantage 'gae' needs a critic, which this recipe does not train; accepted: " in refusal(
        "algorithm.advantage.name=gae")


# Documentation


def test_every_option_is_documented():
    undocumented = {
        option.key for cls in RECIPES.values() for option in options_of(cls)
        if not option.doc and option.item is not option.type
    }
    assert not undocumented


def test_field_docs_are_those_beneath_the_fields():
    assert field_docs(TrainerConfig)["steps"] == "Steps of the run."
    assert set(field_docs(config.EvalDataConfig)) == {f.name for f in dataclasses.fields(config.EvalDataConfig)}


def test_the_reference_page_is_up_to_date():
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == reference(), "run: python -m hybridrl.config_reference > docs/configuration.md"


def test_the_reference_names_every_option():
    page = reference()
    for cls in RECIPES.values():
        for option in options_of(cls):
            group = option.key.rpartition(".")[0]  # a class used twice has one table, and a line for the second use
            assert f"`{option.key}`" in page or f"`{group}`" in page or f"`{option.key}.*`" in page, option.key


def test_every_class_with_values_checks_them():
    unchecked = {
        option.item.__name__ for cls in RECIPES.values() for option in options_of(cls)
        if option.item and not hasattr(option.item, "validate")
        and any(o.type in (int, float) for o in options_of(option.item) if "." not in o.key)
    }
    assert unchecked <= {"RewardFunctionConfig", "KLConfig"}  # any weight; checked by AlgorithmConfig


# The command


SCRIPT = """
import sys
from hybridrl.command_line import recipe
from hybridrl.config import GRPOConfig
from hybridrl.errors import DataError, WorkerError
from types import SimpleNamespace

# this script has no model; see test_preflight.py
sys.modules["hybridrl.workers.preflight"] = SimpleNamespace(check_models=lambda cfg: None)

@recipe("grpo", GRPOConfig)
def main(cfg):
    '''Train on a task.'''
    if cfg.seed == 1: raise DataError("data.jsonl, row 3: no field 'prompt'.")
    if cfg.seed == 2: raise WorkerError("policy", 1, 4, "ValueError: bad", "Traceback of the worker")
    if cfg.seed == 3: raise KeyboardInterrupt("stopped after step 4")
    if cfg.seed == 4: raise ZeroDivisionError("a bug")
    print("steps", cfg.trainer.steps)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def command(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(*words, needed=True):
        words = [*(NEEDED["grpo"] if needed else []), *words]
        done = subprocess.run([sys.executable, str(script), *words], cwd=tmp_path, capture_output=True, text=True,
                              timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert {path.name for path in tmp_path.iterdir()} <= {"script.py", "my.yaml"}, "loading left files behind"
        return done.returncode, done.stdout, done.stderr
    return run


def test_the_command_runs(command):
    assert command("trainer.steps=3") == (0, "steps 3\n", "")


def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(command):
    assert command("trainer.stepz=3") == (2, "", "grpo: Unknown option 'trainer.stepz'. Did you mean trainer.steps?\n")
    assert command("--cgf") == (2, "", "grpo: Unknown flag '--cgf'. Did you mean --cfg, --config? "
                                       "Choices: --cfg, --config, --help.\n")
    assert command("--config") == (2, "", "grpo: --config needs a YAML file after it.\n")


def test_other_errors_have_their_own_exit_codes(command):
    assert command("seed=1") == (1, "", "grpo: data.jsonl, row 3: no field 'prompt'.\n")
    assert command("seed=2") == (1, "", "grpo: policy rank 1 at step 4: ValueError: bad\nTraceback of the worker\n")
    assert command("seed=3") == (130, "", "grpo: stopped after step 4\n")
    code, _, stderr = command("seed=4")
    assert code == 1 and stderr.startswith("Traceback") and "ZeroDivisionError" in stderr


def test_cfg_prints_what_would_run(command, my_yaml):
    code, stdout, _ = command("--config", str(my_yaml("seed: 5")), "--cfg", "algorithm=rloo")
    printed = yaml.safe_load(stdout)
    assert code == 0 and printed["seed"] == 5 and printed["algorithm"]["advantage"]["name"] == "rloo"


def test_help_is_short_and_names_groups_and_options(command):
    code, stdout, _ = command("--help", needed=False)
    assert code == 0 and len(stdout.splitlines()) < 40 and "Train on a task." in stdout
    for choice in groups_of("grpo")["algorithm"]:
        assert choice in stdout
    for name, doc in field_docs(GRPOConfig).items():
        assert name in stdout and doc in stdout


def test_a_recipe_called_with_a_config_just_runs():
    from hybridrl.command_line import recipe

    got = []
    main = recipe("grpo", GRPOConfig)(lambda cfg: got.append(cfg))
    cfg = load("grpo", GRPOConfig, [
        *NEEDED["grpo"], f"policy.model.path={ROOT}/recipes/demo/model", "policy.rollout.max_prompt_tokens=16",
        "policy.rollout.max_response_tokens=8"])
    main(cfg)
    assert got == [cfg] and got[0] is cfg


def test_slots_keep_misspelt_attributes_out():
    for cls in vars(config).values():
        if inspect.isclass(cls) and dataclasses.is_dataclass(cls):
            assert "__slots__" in vars(cls), cls
