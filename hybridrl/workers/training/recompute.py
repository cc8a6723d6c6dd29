"""Activation checkpointing: what a layer computes again in the backward pass, instead of keeping it.

`layers` keeps a layer's input alone, for about a third more compute. `selective` keeps the results of matrix products
and of attention, nearly all of the compute, and repeats what lies between: norms, activations, rotations.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
"""Operators of torch whose results `selective` keeps, beside every one with `attention` or `attn` in its name."""


def recompute(layers: Iterable[nn.Module], mode: str) -> None:
    """Make the layers compute again, as `mode` says: `none`, `layers` or `selective`."""
    if mode == "none":
        return
    contexts = partial(create_selective_checkpoint_contexts, _keep_products)
    options = {"context_fn": contexts} if mode == "selective" else {}
    for layer in layers:
        layer.forward = _recomputed(layer.forward, options)


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)
    return run


def _keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operator.name().partition("::")[2].partition(".")[0]
    kept = name in PRODUCTS or "attention" in name or "attn" in name
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
