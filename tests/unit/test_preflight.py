"""Models against options, before anything starts: one line, with the key that the user typed."""

import json
import shutil

import pytest

from hybridrl.command_line import recipe
from hybridrl.config import RECIPES
from hybridrl.config_loading import load
from hybridrl.errors import ConfigError, ModelError
from hybridrl.workers.preflight import check_models
from tests.models import KINDS, MIXTURES, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`folder(kind)`: a tiny model folder of 512 positions; don't write into it."""
    made = {}

    def get(kind="llama_tied", **options):
        if kind not in made:
            made[kind] = tiny_model(tmp_path_factory.mktemp(kind), kind, **options)
        return made[kind]

    return get


def options(recipe, folder, *words):
    data = ["data.path=rows.jsonl"] if recipe != "serve" else []
    few = {"sft": ["max_tokens=512"], "distill": [f"teacher.model.path={folder}"]}.get(recipe, [])
    few += ["policy.rollout.max_prompt_tokens=256", "policy.rollout.max_response_tokens=256"] * (recipe != "sft")
    few += ["environment.name=guess"] * (recipe == "agent")
    return load(recipe, RECIPES[recipe], [f"policy.model.path={folder}", *data, *few, *words])


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_fits_passes(folder, recipe):
    check_models(options(recipe, folder()))


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "sft"])
def test_more_tokens_than_the_model_has_positions(folder, recipe):
    with pytest.raises(ConfigError, match=r"^policy.rollout.max_prompt_tokens \+ max_response_tokens must be at most "
                                          r"the 512 positions of the model, got 513\.$"):
        check_models(options(recipe, folder(), "policy.rollout.max_prompt_tokens=257"))


@pytest.mark.parametrize("recipe, words, message", [
    ("sft", ["max_tokens=513"], "max_tokens must be at most the 512 positions of the model, got 513."),
    ("sft", ["policy.training.attention=flex"], "policy.training.attention=flex has no backward pass on a cpu device"),
    ("grpo", ["policy.training.offload=always"], "policy.training.offload must be auto or never on a cpu device"),
    ("grpo", ["policy.training.lora.rank=4", "policy.training.lora.targets=[q_porj]"],
     "policy.training.lora.targets: 'q_porj' names no linear layer of the model's decoder layers. Did you mean q_proj"),
    ("grpo", ["policy.routing_replay=old"], "policy.routing_replay must be off for a model without experts"),
    ("grpo", ["cluster.ranks=4", "policy.training.context_parallel=4"],
     "policy.training.context_parallel must divide the model's 2 attention heads, got 4; accepted: 1, 2."),
    ("ppo", ["critic.training.attention=flash"], "critic.training.attention=flash needs an NVIDIA GPU"),
    ("ppo", ["critic.training.lora.rank=4", "critic.training.lora.targets=[up]"],
     "critic.training.lora.targets: 'up' names no linear layer"),
    ("distill", ["distill.loss=top_k", "distill.top_k=100000"], "distill.top_k must be at most the "),
    ("evaluate", ["policy.training.attention=flash"], "policy.training.attention=flash needs an NVIDIA GPU"),
])
def test_options_that_the_model_or_the_device_rules_out(folder, monkeypatch, recipe, words, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises((ConfigError, ModelError)) as caught:
        check_models(options(recipe, folder(), *words))
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_the_devices_of_another_cluster_are_not_known(folder):
    check_models(options("grpo", folder(), "policy.training.attention=flash", "cluster.address=auto"))


def edited(folder, target, **values):
    copy = shutil.copytree(folder, target)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | values))
    return copy


@pytest.mark.parametrize("values, message", [
    (dict(num_hidden_layers=3), "lacks weights that its config asks for: model.layers.2."),
    (dict(num_hidden_layers=1), "has weights that its config has no place for: model.layers.1."),
    (dict(intermediate_size=80), "has weights of another shape than its config says: model.layers.0.mlp."),
    (dict(model_type="t5"), "Can't read the model .*for this kind of AutoModel: AutoModelForCausalLM"),
    (dict(hidden_size="big"), "Can't read the config .*'hidden_size' expected int"),
    (dict(quantization_config={"quant_method": "awq", "bits": 4}), "holds quantised weights"),
    (dict(auto_map={"AutoConfig": "mine.Config"}, model_type="mine"), "set trust_remote_code=true beside"),
    (dict(model_type="nope"), "nope"),
    (dict(final_logit_softcapping=30.0), "final_logit_softcapping"),
])
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_weights_and_config_of_each_model(folder, tmp_path, capfd, role, values, message):
    bad = edited(folder(), tmp_path / "bad", **values)
    with pytest.raises(ModelError, match=message) as caught:
        check_models(options("ppo", folder(), f"{role}.model.path={bad}"))
    assert str(bad) in str(caught.value) and "\n" not in str(caught.value)
    assert capfd.readouterr().err == "", "transformers prints no report of its own"


def test_tokenizers_of_another_model(folder, tmp_path):
    other = shutil.copytree(folder(), tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {f"word{i}": 1000 + i for i in range(100)}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("sft", "grpo", "serve"):
        with pytest.raises(ModelError, match="has a tokenizer of [0-9]+ tokens and a model of 64"):
            check_models(options(name, other))
    with pytest.raises(ModelError, match="have different vocabularies"):
        check_models(options("ppo", folder(), f"critic.model.path={other}"))


@pytest.mark.parametrize("file", ["tokenizer.json", "generation_config.json"])
def test_other_files_that_are_damaged(folder, tmp_path, file):
    bad = shutil.copytree(folder(), tmp_path / "bad")
    (bad / file).write_text("{}" if file == "tokenizer.json" else '{"eos')
    with pytest.raises(ModelError, match="Can't read the tokenizer|generation_config.json is half-written") as caught:
        check_models(options("grpo", bad))
    assert str(bad) in str(caught.value) and "\n" not in str(caught.value)


def test_models_that_score(folder, tmp_path):
    with pytest.raises(ModelError, match="is no sequence classifier: its architecture is"):
        check_models(options("grpo", folder(), f"reward.model.path={folder()}"))
    with pytest.raises(ConfigError, match=r"^reward.judge.rollout.max_prompt_tokens \+ max_response_tokens must be at "
                                          r"most the 512 positions of the judge, got 2304\.$"):
        check_models(options("grpo", folder(), f"reward.judge.path={folder()}"))


def test_a_recipe_checks_before_it_runs(folder):
    def main(cfg):
        raise AssertionError("it ran")

    with pytest.raises(ConfigError, match="max_tokens must be at most the 512 positions"):
        recipe("sft", RECIPES["sft"])(main)(options("sft", folder(), "max_tokens=1024"))


@pytest.mark.parametrize("kind", [*KINDS, *MIXTURES])
def test_every_kind_of_model_passes_with_adapters(folder, kind):
    check_models(options("sft", folder(kind), "policy.training.lora.rank=2"))
