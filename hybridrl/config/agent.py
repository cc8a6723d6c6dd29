"""Options of `recipes.agent`."""

from dataclasses import dataclass, field

from hybridrl.config.checks import check
from hybridrl.config.environment import EnvironmentConfig
from hybridrl.config.grpo import GRPOConfig
from hybridrl.config.reward import OptionalRewardConfig


@dataclass(kw_only=True, slots=True)
class AgentConfig(GRPOConfig):
    """Reinforcement learning on episodes: several turns in an environment, with tools, games or other players."""

    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Where episodes are played, and how they are scored."""
    reward: OptionalRewardConfig = field(default_factory=OptionalRewardConfig)
    """Rewards of trajectories on top of the environment's."""

    def validate(self) -> None:
        GRPOConfig.validate(self)
        check(self.environment.enabled, "environment.name", self.environment.name,
              "the name of an environment, or a class's import path (package.module:Class)")

    def check_data(self) -> None:
        """Nothing to check: environments may make up what rows lack."""
