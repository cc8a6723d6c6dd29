"""What a model's matrix products cost at best: their FLOPs, and the rate of bare products at the same shapes.

Used by the benchmarks that compare a pass to its floor. A shape is (tokens, inputs, outputs) of one linear layer.
"""

import time
from collections import Counter
from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

Shapes = Counter[tuple[int, int, int]]
"""(tokens, inputs, outputs) and how many products of that shape there are."""


def linear_shapes(model: PreTrainedModel, fed_tokens: Iterable[int], head_tokens: Iterable[int]) -> Shapes:
    """The products of one forward pass over micro-batches of `fed_tokens` tokens.

    The head is applied to `head_tokens` of them only: those that predict a response token.
    """
    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    shapes: Shapes = Counter()
    for fed, predictors in zip(fed_tokens, head_tokens, strict=True):
        for layer in layers:
            shapes[fed, layer.in_features, layer.out_features] += 1
        shapes[predictors, head.in_features, head.out_features] += 1
    return shapes


def flops(shapes: Shapes) -> int:
    """Floating-point operations of one forward pass; a backward pass takes twice as many."""
    return sum(2 * tokens * inputs * outputs * count for (tokens, inputs, outputs), count in shapes.items())


def seconds(shapes: Shapes, backward: bool, dtype: torch.dtype = torch.float32, repetitions: int = 3) -> float:
    """Seconds of the bare products, each shape timed as the fastest of `repetitions` after a warm-up.

    Args:
        backward: also the two products of the backward pass, for the inputs and for the weights.
    """
    total = 0.0
    for (tokens, inputs, outputs), count in shapes.items():
        x, w = torch.randn(tokens, inputs, dtype=dtype), torch.randn(outputs, inputs, dtype=dtype)
        y = x @ w.T
        products = [lambda x=x, w=w: torch.mm(x, w.T)]
        if backward:
            products += [lambda y=y, w=w: torch.mm(y, w), lambda y=y, x=x: torch.mm(y.T, x)]
        total += count * sum(_fastest(product, repetitions) for product in products)
    return total


def _fastest(call, repetitions: int) -> float:
    call()
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)
