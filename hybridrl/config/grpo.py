"""Options of `recipes.grpo`, which the other recipes of reinforcement learning extend."""

from dataclasses import dataclass, field

from hybridrl.config.algorithm import AlgorithmConfig
from hybridrl.config.checks import check, check_seed
from hybridrl.config.cluster import ClusterConfig
from hybridrl.config.data import DataConfig, EvalDataConfig
from hybridrl.config.policy import PolicyConfig
from hybridrl.config.reward import RewardConfig
from hybridrl.config.suites import SuiteConfig, check_prompts_of, check_suites
from hybridrl.config.trainer import TrainerConfig


@dataclass(kw_only=True, slots=True)
class ReferenceConfig:
    ranks: int = 0
    """Devices of its own for the frozen reference of a KL penalty; 0 puts it on the policy's devices."""

    def validate(self) -> None:
        check(self.ranks >= 0, "reference.ranks", self.ranks, "at least 0")


@dataclass(kw_only=True, slots=True)
class GRPOConfig:
    """Reinforcement learning with several responses to each prompt: GRPO, Dr. GRPO, RLOO, REINFORCE."""

    seed: int = 0
    """Seed of prompts, sampling and initial values; two runs with one seed give the same metrics."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """The model that is trained, its training engine, its rollout engine and the sync between them."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts to train on."""
    eval_data: EvalDataConfig = field(default_factory=EvalDataConfig)
    """Held-out problems; evaluation is off while neither `path` nor `task` is given."""
    eval_suites: list[SuiteConfig] = field(default_factory=list)
    """More held-out problems, each suite with rewards or an environment of its own and its metrics under its name."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """How responses are scored."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """From rewards to a loss."""
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    """Where the reference of a KL penalty runs."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Where workers run."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Steps, run folder, evaluation, checkpoints, trackers."""

    def validate(self) -> None:
        check_seed(self.seed)
        ranks, shared = self.cluster.ranks, self.policy.rollout.tensor_parallel
        check(ranks % shared == 0, "cluster.ranks", ranks, f"a multiple of policy.rollout.tensor_parallel={shared}")
        self.policy.training.check_ranks(ranks, "cluster.ranks")
        if self.reference.ranks:
            self._check_reference(self.reference.ranks)
        self.check_data()
        self.reward.check_placement(self.cluster, self.policy.rollout)
        self.policy.training.check_longest(*self.policy.rollout.longest)
        temperature = self.policy.rollout.temperature
        check(temperature > 0, "policy.rollout.temperature", temperature, "positive to train")
        prompts = self.trainer.prompts_per_step
        check(self.algorithm.mini_batches <= prompts, "algorithm.mini_batches", self.algorithm.mini_batches,
              f"at most trainer.prompts_per_step={prompts}")
        check(bool(self.eval_data.enabled or self.eval_suites or not self.trainer.eval_every), "trainer.eval_every",
              self.trainer.eval_every, "0 while eval_data names no problems (set eval_data.path or eval_data.task)")
        check_suites("eval_suites", self.eval_suites, self.trainer.eval_samples, self.trainer.eval_k, self.cluster,
                     self.policy.rollout)

    def check_data(self) -> None:
        """Raise ConfigError where rows have no prompts."""
        self.data.check_prompts()
        self.eval_data.check_prompts("eval_data")
        check_prompts_of("eval_suites", self.eval_suites)

    def _check_reference(self, ranks: int) -> None:
        for nothing, why in ((not self.algorithm.kl.coefficient, "without a KL penalty (algorithm.kl.coefficient)"),
                             (self.policy.training.lora.rank, "with policy.training.lora, whose base is the reference"),
                             (self.cluster.backend == "local", "with cluster.backend=local")):
            check(not nothing, "reference.ranks", ranks, f"0 {why}")
        self.policy.training.check_ranks(ranks, "reference.ranks")
