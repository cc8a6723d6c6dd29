"""Parts of a metric that pieces of a batch compute alone and that combine exactly.

A mean of means is wrong when pieces differ in size, so a piece reports sum and count, an extreme, or moments.
`merge` combines pieces in any order; `finalize` divides at the end. An empty metric is 0.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridrl.algorithms.masked import low_and_mean

Number = Any
"""A number or a 0-d tensor."""


class Mean(NamedTuple):
    """sum / count."""

    sum: Number
    count: Number

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.sum + other.sum, self.count + other.count)

    def value(self) -> float:
        count = float(self.count)
        return float(self.sum) / count if count else 0.0


class Min(NamedTuple):
    """Smallest value; +inf is the empty metric."""

    min: Number

    def merge(self, other: "Min") -> "Min":
        return Min(min(float(self.min), float(other.min)))

    def value(self) -> float:
        return float(self.min) if math.isfinite(float(self.min)) else 0.0


class Max(NamedTuple):
    """Largest value; -inf is the empty metric."""

    max: Number

    def merge(self, other: "Max") -> "Max":
        return Max(max(float(self.max), float(other.max)))

    def value(self) -> float:
        return float(self.max) if math.isfinite(float(self.max)) else 0.0


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations; the value is the sample standard deviation."""

    count: Number
    mean: Number
    squares: Number

    def merge(self, other: "Moments") -> "Moments":
        # Chan, Golub, LeVeque 1979: exact for any split, without E[x^2] - E[x]^2.
        count = float(self.count) + float(other.count)
        if not count:
            return self
        gap = float(other.mean) - float(self.mean)
        mean = float(self.mean) + gap * float(other.count) / count
        between = gap * gap * float(self.count) * float(other.count) / count
        return Moments(count, mean, float(self.squares) + float(other.squares) + between)

    def variance(self) -> float:
        return float(self.squares) / (float(self.count) - 1) if float(self.count) > 1 else 0.0

    def value(self) -> float:
        return math.sqrt(max(self.variance(), 0.0))


class EffectiveSize(NamedTuple):
    """Effective sample size of weights as a fraction: (sum w)^2 / (N sum w^2), in [0, 1]."""

    sum: Number
    squares: Number
    count: Number

    def merge(self, other: "EffectiveSize") -> "EffectiveSize":
        return EffectiveSize(self.sum + other.sum, self.squares + other.squares, self.count + other.count)

    def value(self) -> float:
        scale = float(self.count) * float(self.squares)
        return float(self.sum) ** 2 / scale if scale else 0.0


class ExplainedVariance(NamedTuple):
    """1 - Var(residual) / Var(target); 0 when the target is constant or has fewer than two values."""

    residual: Moments
    target: Moments

    def merge(self, other: "ExplainedVariance") -> "ExplainedVariance":
        return ExplainedVariance(self.residual.merge(other.residual), self.target.merge(other.target))

    def value(self) -> float:
        variance = self.target.variance()
        return 1 - self.residual.variance() / variance if variance > 0 else 0.0


class Balance(NamedTuple):
    """How evenly work is spread: the largest of some costs over their mean; 1 is even."""

    max: Number
    sum: Number
    count: Number

    @classmethod
    def of(cls, costs: Iterable[float]) -> "Balance":
        costs = list(costs)
        return cls(max(costs), sum(costs), len(costs))

    def merge(self, other: "Balance") -> "Balance":
        return Balance(max(self.max, other.max), self.sum + other.sum, self.count + other.count)

    def value(self) -> float:
        return self.max * self.count / self.sum if self.sum else 1.0


Partial = Mean | Min | Max | Moments | EffectiveSize | ExplainedVariance | Balance


def merge(pieces: Iterable[Mapping[str, Partial]]) -> dict[str, Partial]:
    """Combine the metrics of pieces by name; a piece may lack a name.

    Raises TypeError when one name has different kinds in different pieces.
    """
    merged: dict[str, Partial] = {}
    for piece in pieces:
        for name, partial in piece.items():
            have = merged.get(name)
            if have is not None and type(have) is not type(partial):
                raise TypeError(f"metric {name!r} is {type(have).__name__} and {type(partial).__name__}.")
            merged[name] = partial if have is None else have.merge(partial)  # type: ignore[arg-type]
    return merged


def finalize(metrics: Mapping[str, Partial]) -> dict[str, float]:
    """One number per metric."""
    return {name: partial.value() for name, partial in metrics.items()}


def total(pieces: Iterable[Mapping[str, Partial]]) -> dict[str, float]:
    """One number per metric over all pieces: those of a batch, or the updates of a step."""
    return finalize(merge(pieces))


def mean_of(x: Tensor, mask: Tensor) -> Mean:
    """Sum and count of x where mask is true, summed in float64."""
    return Mean(torch.where(mask, x.detach(), 0).sum(dtype=torch.float64), mask.count_nonzero())


def min_of(x: Tensor, mask: Tensor) -> Min:
    """Smallest x where mask is true."""
    chosen = torch.where(mask, x.detach().double(), torch.inf)
    return Min(chosen.amin() if chosen.numel() else torch.inf)


def max_of(x: Tensor, mask: Tensor) -> Max:
    """Largest x where mask is true."""
    chosen = torch.where(mask, x.detach().double(), -torch.inf)
    return Max(chosen.amax() if chosen.numel() else -torch.inf)


def moments_of(x: Tensor, mask: Tensor) -> Moments:
    """Moments of x where mask is true: two passes in float64; equal values have exactly zero deviation."""
    values = x.detach()[mask].double()
    if values.numel() == 0:
        return Moments(0, 0.0, 0.0)
    low, above = low_and_mean(values)
    return Moments(values.numel(), low + above, ((values - low) - above).square().sum())
