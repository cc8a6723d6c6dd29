"""Options of `recipes.distill`."""

import math
from dataclasses import dataclass, field

from hybridrl.config.algorithm import AlgorithmConfig, Choice
from hybridrl.config.checks import check, check_choice
from hybridrl.config.grpo import GRPOConfig
from hybridrl.config.reward import OptionalRewardConfig, RewardFunctionConfig
from hybridrl.config.training import ModelConfig


@dataclass(kw_only=True, slots=True)
class TeacherConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model to learn from; its tokenizer must have the policy's vocabulary."""
    micro_batch_tokens: int = 8192
    """Token budget of one forward pass."""
    logits_chunk_tokens: int = 1024
    """Tokens whose logits are held at a time."""
    offload: str = "auto"
    """`auto` or `never`: wait in CPU memory while nothing is scored (CUDA only)."""
    ranks: int = 0
    """Devices of its own; 0 puts it on the policy's devices, in the same processes."""

    def validate(self, key: str = "teacher") -> None:
        check(self.micro_batch_tokens >= 1, f"{key}.micro_batch_tokens", self.micro_batch_tokens, "at least 1")
        check(self.logits_chunk_tokens >= 1, f"{key}.logits_chunk_tokens", self.logits_chunk_tokens, "at least 1")
        check_choice(f"{key}.offload", self.offload, ("auto", "never"))
        check(self.ranks >= 0, f"{key}.ranks", self.ranks, "at least 0")


@dataclass(kw_only=True, slots=True)
class DistillOptionsConfig:
    loss: str = "sampled"
    """`sampled` learns from the teacher's log-prob of each sampled token, which becomes its advantage; `top_k` from the
    teacher's `top_k` likeliest tokens in its place, by a divergence that becomes part of the loss."""
    top_k: int = 32
    """Likeliest tokens of the teacher (`loss=top_k`); as many as the vocabulary give the exact divergence."""
    teacher_temperature: float = 1.0
    """Divides the teacher's logits: below 1 sharpens what is learnt."""
    weight: float = 1.0
    """Weight of the divergence beside the loss of the rewards (`loss=top_k`)."""

    def validate(self, key: str = "distill") -> None:
        check_choice(f"{key}.loss", self.loss, ("sampled", "top_k"))
        check(self.top_k >= 1, f"{key}.top_k", self.top_k, "at least 1")
        temperature = self.teacher_temperature
        check(0 < temperature < math.inf, f"{key}.teacher_temperature", temperature, "positive")
        check(0 < self.weight < math.inf, f"{key}.weight", self.weight, "positive")
        check(self.loss == "top_k" or self.weight == 1, f"{key}.weight", self.weight,
              "1 with loss=sampled (algorithm.advantage.options.reward_coef weighs rewards against the teacher)")


@dataclass(kw_only=True, slots=True)
class DistillRewardConfig(OptionalRewardConfig):
    functions: list[RewardFunctionConfig] = field(default_factory=list)
    """Reward functions; without any, model or judge every reward is 0 and the teacher alone is learnt from."""


@dataclass(kw_only=True, slots=True)
class DistillConfig(GRPOConfig):
    """On-policy distillation: the policy samples, and a larger teacher says what it thinks of every token."""

    reward: DistillRewardConfig = field(default_factory=DistillRewardConfig)
    """How responses are scored, for evaluation and where rewards are learnt from, too."""
    algorithm: AlgorithmConfig = field(default_factory=lambda: AlgorithmConfig(advantage=Choice(name="distill")))
    """From the teacher's log-probs, and rewards, to a loss."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """The model to learn from, its batching and where it runs."""
    distill: DistillOptionsConfig = field(default_factory=DistillOptionsConfig)
    """What is learnt from it."""

    def validate(self) -> None:
        GRPOConfig.validate(self)
        check(not self.algorithm.dynamic_sampling.enabled, "algorithm.dynamic_sampling.enabled", True,
              "false with a teacher, from which groups of equal rewards learn, too")
        if self.cluster.backend == "local":
            check(self.teacher.ranks == 0, "teacher.ranks", self.teacher.ranks, "0 with cluster.backend=local")
        scored_here = self.eval_data.enabled or not all(suite.scores for suite in self.eval_suites)
        check(self.reward.enabled or not scored_here, "reward.functions", self.reward.functions,
              "at least one function to evaluate with")
