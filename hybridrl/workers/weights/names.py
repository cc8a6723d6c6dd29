"""From module names to checkpoint names: what `save_pretrained` would write is what vLLM reads.

transformers 5 holds some weights in another shape than checkpoints do (the experts of a mixture are one fused
tensor); passed on under those names, vLLM would ignore them without a word.
"""

from collections.abc import Iterable, Iterator

from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from hybridrl.workers.rollout.engine import Bucket


def checkpoint_buckets(model: nn.Module, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
    """Translate each bucket to checkpoint names and shapes, and repeat a tied embedding as the head's weight.

    Args:
        model: the transformers model that the module names belong to.
        buckets: (module name, full weight) pairs, each parameter once.
    """
    tied = dict(tied_names(model))
    for bucket in buckets:
        named = revert_weight_conversion(model, dict(bucket))
        # An engine packs the head apart from the embedding, so the tied weight must arrive under both names.
        repeated = [(alias, weight) for name, weight in bucket for alias in tied.get(name, [])]
        yield [*named.items(), *repeated]


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """For each parameter that has further names: {name in named_parameters(): [the other names]}."""
    first: dict[int, str] = {id(p): name for name, p in model.named_parameters()}
    tied: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first[id(parameter)] != name:
            tied.setdefault(first[id(parameter)], []).append(name)
    return tied
