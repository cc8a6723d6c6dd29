"""Loading and exporting: what a folder holds is what the model has, or an error says what is wrong."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.config import ModelConfig, TrainingConfig
from hybridrl.errors import ModelError
from hybridrl.workers.training.engine import TrainingEngine
from tests.models import KINDS
from tests.unit.training.reference import policy_gradient, random_batch

pytestmark = pytest.mark.usefixtures("one_rank")


def engine(path):
    return TrainingEngine(ModelConfig(path=str(path)), TrainingConfig(learning_rate=1e-2), torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_are_float32_whatever_is_stored(folder, kind, dtype):
    stored = AutoModelForCausalLM.from_pretrained(folder(kind, dtype))
    assert stored.dtype == dtype
    for name, weight in engine(folder(kind, dtype)).weights():
        assert weight.dtype == torch.float32
        assert torch.equal(weight.full_tensor(), stored.get_parameter(name).detach().float()), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_loads_in_transformers_and_keeps_names_and_dtype(folder, tmp_path, kind, dtype):
    ours = engine(folder(kind, dtype))
    ours.update(random_batch(), policy_gradient)
    ours.export(tmp_path, AutoTokenizer.from_pretrained(folder(kind, dtype)))
    original, exported = (load_file(path / "model.safetensors") for path in (folder(kind, dtype), tmp_path))
    assert {name: (t.shape, t.dtype) for name, t in exported.items()} == {
        name: (t.shape, t.dtype) for name, t in original.items()}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == dtype
    for name, weight in ours.weights():
        assert torch.equal(loaded.get_parameter(name).detach(), weight.full_tensor().to(dtype)), name
    configs = [json.loads((path / "config.json").read_text()) for path in (folder(kind, dtype), tmp_path)]
    assert configs[0] == configs[1]
    generation = [json.loads((path / "generation_config.json").read_text()) for path in (folder(kind, dtype), tmp_path)]
    assert generation[0] == generation[1]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(folder(kind, dtype)).chat_template
    engine(tmp_path)  # and here again


def test_an_export_that_can_not_be_written(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="file"):
        engine(folder()).export(tmp_path / "file" / "export", AutoTokenizer.from_pretrained(folder()))


@pytest.fixture
def copy(folder, tmp_path):
    def make(kind="llama", **changes):
        shutil.copytree(folder(kind, **changes), tmp_path / "copy")
        return tmp_path / "copy"
    return make


def edit_weights(path, change):
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def edit_config(path, **values):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))


def test_a_weight_that_is_not_in_the_folder(copy):
    path = copy()
    edit_weights(path, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"lacks weights .*: model\.layers\.1\.mlp\.up_proj\.weight"):
        engine(path)


def test_an_expert_that_is_not_in_the_folder(copy):
    path = copy("qwen3_moe")
    edit_weights(path, lambda weights: weights.pop("model.layers.1.mlp.experts.2.up_proj.weight"))
    with pytest.raises(ModelError):
        engine(path)


def test_a_weight_that_the_config_has_no_place_for(copy):
    path = copy()
    edit_config(path, num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"no place for: model\.layers\.1\..* and [0-9]+ more"):
        engine(path)


def test_a_weight_of_another_shape(copy):
    path = copy()
    edit_config(path, intermediate_size=80)
    with pytest.raises(ModelError):
        engine(path)


def test_a_truncated_file(copy):
    path = copy()
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:-8])
    with pytest.raises(ModelError, match="half-written"):
        engine(path)


def test_a_missing_folder():
    with pytest.raises(ModelError, match="/nowhere"):
        engine("/nowhere")


@pytest.mark.parametrize(("values", "message"), [
    (dict(logits_scaling=2.0), "logits_scaling=2.0"), (dict(final_logit_softcapping=30.0), "final_logit_softcapping"),
    (dict(layer_types=["full_attention", "linear_attention"]), "linear_attention"), (dict(model_type="nope"), "nope")])
def test_a_model_that_training_does_not_compute(copy, values, message):
    path = copy()
    edit_config(path, **values)
    with pytest.raises(ModelError, match=message):
        engine(path)
