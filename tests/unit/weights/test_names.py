"""Module names to checkpoint names: those, and the values, of what `save_pretrained` writes."""

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.workers.weights.names import checkpoint_weights, tied_names
from tests.models import KINDS, MIXTURES, tiny_model


@pytest.fixture(scope="module", params=sorted({*KINDS, *MIXTURES}))
def saved(request, tmp_path_factory):
    """A model as training holds it, and the tensors of its file."""
    from transformers import AutoModelForCausalLM

    folder = tiny_model(tmp_path_factory.mktemp(request.param), request.param)
    return request.param, AutoModelForCausalLM.from_pretrained(folder), load_file(folder / "model.safetensors")


def test_names_and_values_are_those_of_the_saved_file(saved):
    kind, model, file = saved
    weights = checkpoint_weights(model, dict(model.named_parameters()))
    if kind == "llama_tied":  # written once by save_pretrained; an engine packs the head apart
        torch.testing.assert_close(weights.pop("lm_head.weight"), file["model.embed_tokens.weight"], atol=0, rtol=0)
    assert weights.keys() == {name for name in file if "e_score_correction_bias" not in name}  # a buffer
    for name, value in weights.items():
        torch.testing.assert_close(value, file[name], atol=0, rtol=0)


def test_experts_go_one_by_one(saved):
    kind, model, file = saved
    experts = [name for name in file if ".experts." in name]
    layers = 0 if kind not in MIXTURES else 1 if kind == "glm4_moe" else 2
    assert len(experts) == layers * 4 * 3  # layers, experts, projections
    assert any("experts.gate_up_proj" in name for name, _ in model.named_parameters()) == (kind in MIXTURES)


def test_tied_names(saved):
    kind, model, _ = saved
    expected = {"model.embed_tokens.weight": ["lm_head.weight"]} if kind == "llama_tied" else {}
    assert tied_names(model) == expected
