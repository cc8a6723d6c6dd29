"""From module names to checkpoint names: what `save_pretrained` would write is what vLLM reads.

transformers 5 holds some weights in another shape than checkpoints do (the experts of a mixture are one fused
tensor); passed on under those names, vLLM would ignore them without a word.
"""

from collections.abc import Mapping

from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion


def checkpoint_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under checkpoint names and in checkpoint shapes, a tied embedding repeated as the head's weight.

    Args:
        model: the transformers model that the module names belong to.
        weights: full weights by module name, each parameter once.
    """
    tied = tied_names(model)
    named = revert_weight_conversion(model, dict(weights))
    # An engine packs the head apart from the embedding, so the tied weight must arrive under both names.
    return named | {alias: weight for name, weight in weights.items() for alias in tied.get(name, [])}


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """For each parameter that has further names: {name in named_parameters(): [the other names]}."""
    first: dict[int, str] = {id(p): name for name, p in model.named_parameters()}
    tied: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first[id(parameter)] != name:
            tied.setdefault(first[id(parameter)], []).append(name)
    return tied
