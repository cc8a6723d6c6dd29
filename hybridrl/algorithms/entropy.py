"""Entropy of the policy: per token from logits, and the coefficient of an entropy bonus.

The bonus is - coefficient * sum(c * H), with c the loss weights of the policy loss.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridrl.algorithms.masked import at_least_float32
from hybridrl.errors import ConfigError


def token_entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """H = logsumexp(z) - sum_v softmax(z)_v z_v with z = logits / temperature, over the last dimension.

    Tokens with logit -inf contribute 0.

    Args:
        logits: [..., V] float; temperature: the one used for sampling.
    Returns:
        [...], at least float32.
    Raises:
        ConfigError: temperature is not above 0.
    """
    if temperature <= 0:
        raise ConfigError(f"temperature must be above 0, got {temperature}.")
    z = at_least_float32(logits) / temperature
    log_p = z.log_softmax(dim=-1)
    possible = log_p > -torch.inf
    safe = torch.where(possible, log_p, 0.0)
    return -torch.where(possible, safe.exp() * safe, 0.0).sum(dim=-1)


class FixedEntropy:
    """A constant coefficient of the entropy bonus."""

    def __init__(self, entropy_coef: float = 0.0):
        self.entropy_coef = entropy_coef

    def coefficient(self, entropy: float) -> float:
        """Coefficient to use on a mini-batch of mean token entropy `entropy`."""
        return self.entropy_coef

    def update(self, entropy: float) -> float:
        """The coefficient, unchanged."""
        return self.entropy_coef

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must hold."""
        return {"entropy_coef": self.entropy_coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint."""
        self.entropy_coef = float(state["entropy_coef"])


class AdaptiveEntropy(FixedEntropy):
    """A coefficient that rises by `step` while entropy is below target and falls while above.

    It stays in [minimum, maximum]; the bonus acts only while entropy is at or below the target.
    Source: Skywork-OR1, arXiv:2505.22312.
    """

    def __init__(
        self,
        entropy_coef: float = 0.0,
        *,
        target: float,
        step: float,
        minimum: float = 0.0,
        maximum: float = 1.0,
    ):
        if step <= 0 or not minimum <= entropy_coef <= maximum:
            raise ConfigError(
                f"step must be above 0 and entropy_coef in [{minimum}, {maximum}], got {step}, {entropy_coef}."
            )
        super().__init__(entropy_coef)
        self.target, self.step, self.minimum, self.maximum = target, step, minimum, maximum

    def coefficient(self, entropy: float) -> float:
        """The coefficient, or 0 while entropy is above the target."""
        return self.entropy_coef if entropy <= self.target else 0.0

    def update(self, entropy: float) -> float:
        """Move the coefficient after an optimizer step on a mini-batch of that entropy, and return it."""
        direction = (entropy < self.target) - (entropy > self.target)
        moved = self.entropy_coef + direction * self.step
        self.entropy_coef = min(max(moved, self.minimum), self.maximum)
        return self.entropy_coef
