"""Options of `recipes.ppo`."""

from dataclasses import dataclass, field

from hybridrl.config.algorithm import AlgorithmConfig, Choice
from hybridrl.config.checks import check
from hybridrl.config.grpo import GRPOConfig
from hybridrl.config.training import ModelConfig, TrainingConfig


@dataclass(kw_only=True, slots=True)
class CriticConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model whose layers the critic starts from; `recipes.ppo` takes the policy's unless told otherwise."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Optimizer and batching."""
    value_clip: float = 0.2
    """How far values may move from those that made the advantages before they stop to gain; 0 sets no limit."""
    bootstrap: bool = False
    """End responses that the length limit cut with the critic's value of what was written so far; otherwise with 0,
    which counts being cut as failing."""
    ranks: int = 0
    """Devices of its own; 0 puts it on the policy's devices, in the same processes."""

    def validate(self) -> None:
        check(self.value_clip >= 0, "critic.value_clip", self.value_clip, "at least 0")
        check(self.ranks >= 0, "critic.ranks", self.ranks, "at least 0")


@dataclass(kw_only=True, slots=True)
class PPOConfig(GRPOConfig):
    """Reinforcement learning with a critic: PPO with generalized advantage estimation."""

    algorithm: AlgorithmConfig = field(default_factory=lambda: AlgorithmConfig(advantage=Choice(name="gae")))
    """From rewards and values to a loss."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The model that learns values, its training engine and where it runs."""

    def validate(self) -> None:
        GRPOConfig.validate(self)
        check(not self.algorithm.dynamic_sampling.enabled, "algorithm.dynamic_sampling.enabled", True,
              "false with a critic, which learns from groups of equal rewards, too")
        own = self.critic.ranks
        self.critic.training.check_longest(*self.policy.rollout.longest, "critic.training")
        self.critic.training.check_ranks(own or self.cluster.ranks, "critic.ranks" if own else "cluster.ranks",
                                         "critic.training")
        if self.cluster.backend == "local":
            check(self.critic.ranks == 0, "critic.ranks", self.critic.ranks, "0 with cluster.backend=local")
