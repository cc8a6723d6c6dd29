"""What moves from batch to batch: coefficients of the KL penalty and the entropy bonus, a moving baseline."""

from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.entropy import AdaptiveEntropy, FixedEntropy
from hybridrl.algorithms.kl import AdaptiveKL, FixedKL, batch_kl
from hybridrl.algorithms.moving_baselines import AgentBaselines
from hybridrl.algorithms.partials import mean_of
from hybridrl.config import AlgorithmConfig


class Steering:
    """The coefficients of a run as they stand, and its moving baseline.

    `kl_coefficient` is fixed for a batch, `entropy_coefficient` for a mini-batch. `metrics` tells what was used.
    """

    def __init__(self, cfg: AlgorithmConfig):
        kl, entropy, advantage = cfg.kl, cfg.entropy, cfg.advantage
        self.kl = AdaptiveKL(kl.coefficient, kl.target, kl.horizon) if kl.target else FixedKL(kl.coefficient)
        self.entropy = FixedEntropy(entropy.coefficient)
        if entropy.target:
            self.entropy = AdaptiveEntropy(entropy.coefficient, target=entropy.target, step=entropy.step,
                                           minimum=entropy.minimum, maximum=entropy.maximum)
        moving = advantage.options.get("baseline") == "moving"
        self.baselines = AgentBaselines(cfg.baseline_decay) if moving else None
        self.gamma = advantage.options.get("gamma", 1.0)
        self.kl_coefficient, self.entropy_coefficient = kl.coefficient, entropy.coefficient
        self.metrics: dict[str, float] = {}
        self._entropy: float | None = None

    def begin(self, columns: dict[str, Tensor], num_responses: int) -> None:
        """A batch with its log-probs: its KL moves the coefficient of the next one."""
        self.kl_coefficient, self.metrics = self.kl.kl_coef, {}
        if "ref_log_probs" not in columns:
            return
        self.metrics["policy/kl_coefficient"] = self.kl_coefficient
        if isinstance(self.kl, AdaptiveKL):
            kl = batch_kl(columns["old_log_probs"], columns["ref_log_probs"], columns["mask"])
            self.metrics["policy/batch_kl"] = kl
            self.kl.update(kl, num_responses)

    def with_baseline(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """The columns with `moving_baseline` [B] of earlier batches, to which this one is added; one for each of
        `agent_ids` where the batch has them."""
        if self.baselines is None:
            return columns
        agents = columns.get("agent_ids", torch.zeros(len(columns["mask"]), dtype=torch.int64))
        past = self.baselines.rows(agents)
        self.metrics["advantage/moving_baseline"] = float(past.mean()) if len(past) else 0.0
        self.baselines.update(agents, columns["mask"], columns["rewards"], columns.get("token_rewards"),
                              columns.get("trajectory_ids"), gamma=self.gamma)
        return {**columns, "moving_baseline": past}

    def before_update(self, columns: dict[str, Tensor]) -> None:
        """A mini-batch whose loss comes next: its entropy says whether there is a bonus."""
        if isinstance(self.entropy, AdaptiveEntropy):
            entropy = mean_of(columns["entropies"], columns["mask"])
            self._entropy = entropy.value() if entropy.count else None
            self.entropy_coefficient = self.entropy.coefficient(entropy.value())
        if self.entropy_coefficient > 0 or isinstance(self.entropy, AdaptiveEntropy):
            self.metrics["policy/entropy_coefficient"] = self.entropy_coefficient

    def after_update(self) -> None:
        """That mini-batch was learned: its entropy moves the coefficient of the next one."""
        if self._entropy is not None:
            self.entropy.update(self._entropy)

    def state_dict(self) -> dict[str, Any]:
        """State of what moves, as JSON values; {} when nothing does."""
        return {name: part.state_dict() for name, part in self._moving().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; what moves now and was fixed when it was written starts anew."""
        for name, part in self._moving().items():
            if name in state:
                part.load_state_dict(state[name])

    def _moving(self) -> dict[str, Any]:
        moving: dict[str, Any] = {} if self.baselines is None else {"baselines": self.baselines}
        moving |= {"kl": self.kl} if isinstance(self.kl, AdaptiveKL) else {}
        return moving | ({"entropy": self.entropy} if isinstance(self.entropy, AdaptiveEntropy) else {})
