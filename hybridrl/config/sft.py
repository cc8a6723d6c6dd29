"""Options of `recipes.sft`."""

from dataclasses import dataclass, field

from hybridrl.config.checks import check, check_seed
from hybridrl.config.cluster import ClusterConfig
from hybridrl.config.data import DataConfig
from hybridrl.config.trainer import TrainerConfig
from hybridrl.config.training import ModelConfig, TrainingConfig


@dataclass(kw_only=True, slots=True)
class SFTPolicyConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model to start from."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Optimizer and batching."""


@dataclass(kw_only=True, slots=True)
class SFTConfig:
    """Supervised fine-tuning on prompts with reference answers."""

    seed: int = 0
    """Seed of the data order and of initial values."""
    policy: SFTPolicyConfig = field(default_factory=SFTPolicyConfig)
    """The model that is trained and its training engine."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts with answers to train on."""
    max_tokens: int = 1024
    """Longest prompt plus answer; longer rows are left out and counted."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Where workers run."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Steps, run folder, checkpoints, trackers."""

    def validate(self) -> None:
        check_seed(self.seed)
        self.data.check_prompts()
        check(self.max_tokens >= 2, "max_tokens", self.max_tokens, "at least 2")
        self.policy.training.check_longest(self.max_tokens, f"max_tokens={self.max_tokens}")
        self.policy.training.check_ranks(self.cluster.ranks, "cluster.ranks")
