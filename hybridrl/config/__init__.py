"""Every option and its checks.

Options are dataclasses; defaults live here only. `hybridrl.config_loading` makes one of them from a recipe's
YAML and a command line and runs every `validate()`, so a wrong option fails before anything starts. The
docstring beneath a field is its documentation: docs/configuration.md is made from these.
"""

from hybridrl.config.agent import AgentConfig
from hybridrl.config.algorithm import (
    AlgorithmConfig,
    Choice,
    DynamicSamplingConfig,
    EntropyConfig,
    KLConfig,
    OverlongConfig,
    ShapingConfig,
)
from hybridrl.config.checks import check, configs_in, validate_all
from hybridrl.config.cluster import ClusterConfig
from hybridrl.config.data import DataConfig, EvalDataConfig
from hybridrl.config.distill import DistillConfig, DistillOptionsConfig, DistillRewardConfig, TeacherConfig
from hybridrl.config.environment import EnvironmentConfig
from hybridrl.config.evaluate import EvaluateConfig
from hybridrl.config.grpo import GRPOConfig, ReferenceConfig
from hybridrl.config.policy import PolicyConfig, SyncConfig
from hybridrl.config.ppo import CriticConfig, PPOConfig
from hybridrl.config.reward import (
    JudgeConfig,
    OptionalRewardConfig,
    RewardConfig,
    RewardFunctionConfig,
    RewardModelConfig,
)
from hybridrl.config.rollout import RolloutConfig
from hybridrl.config.serve import ServeConfig, ServePolicyConfig
from hybridrl.config.sft import SFTConfig, SFTPolicyConfig
from hybridrl.config.suites import SuiteConfig
from hybridrl.config.trainer import TrainerConfig
from hybridrl.config.training import LoRAConfig, ModelConfig, TrainingConfig

RECIPES: dict[str, type] = {"grpo": GRPOConfig, "ppo": PPOConfig, "agent": AgentConfig, "distill": DistillConfig,
                            "sft": SFTConfig, "evaluate": EvaluateConfig, "serve": ServeConfig}
"""The options of each recipe, for the reference page and the tests; `load` takes any config class."""

__all__ = [
    "AgentConfig", "AlgorithmConfig", "Choice", "ClusterConfig", "CriticConfig", "DataConfig", "DistillConfig",
    "DistillOptionsConfig", "DistillRewardConfig", "DynamicSamplingConfig", "EntropyConfig", "EnvironmentConfig",
    "EvalDataConfig", "EvaluateConfig", "GRPOConfig", "JudgeConfig", "KLConfig", "LoRAConfig", "ModelConfig",
    "OptionalRewardConfig", "OverlongConfig", "PPOConfig", "PolicyConfig", "RECIPES", "ReferenceConfig",
    "RewardConfig", "RewardFunctionConfig", "RewardModelConfig", "RolloutConfig", "SFTConfig", "SFTPolicyConfig",
    "ServeConfig", "ServePolicyConfig", "ShapingConfig", "SuiteConfig", "SyncConfig", "TeacherConfig",
    "TrainerConfig", "TrainingConfig", "check", "configs_in", "validate_all",
]
