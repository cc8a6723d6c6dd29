"""Options of `recipes.evaluate`."""

from dataclasses import dataclass, field
from pathlib import Path

from hybridrl.config.checks import check, check_k, check_seed
from hybridrl.config.cluster import ClusterConfig
from hybridrl.config.data import EvalDataConfig
from hybridrl.config.environment import EnvironmentConfig
from hybridrl.config.policy import PolicyConfig
from hybridrl.config.reward import RewardConfig, RewardFunctionConfig
from hybridrl.config.suites import SuiteConfig, check_prompts_of, check_suites


@dataclass(kw_only=True, slots=True)
class EvaluateConfig:
    """Score a model on suites of problems: accuracy, avg@k, pass@k, maj@k, each with a 95% interval."""

    seed: int = 0
    """Seed of sampling."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """The model and how it samples."""
    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    """The problems; may be left out where there are suites."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """How responses are scored; left out with an environment."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Play episodes instead of single responses: the environment scores them."""
    suites: list[SuiteConfig] = field(default_factory=list)
    """More problems, each suite with rewards or an environment of its own, or those above."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Where workers run."""
    max_prompts: int = 0
    """Problems taken, from the first; 0 takes all."""
    samples_per_prompt: int = 1
    """Responses per problem, at `policy.rollout.temperature`."""
    greedy: bool = False
    """Take the likeliest response to each problem, too."""
    k: list[int] = field(default_factory=list)
    """The k of avg@k, pass@k and maj@k, each at most `samples_per_prompt`."""
    output: str = ""
    """Folder for `results.json`, `config.yaml` and the scored responses, `samples.jsonl`, which `hybridrl show` prints;
    a name that ends in `.jsonl` writes the responses alone to that file; empty writes nothing."""

    def validate(self) -> None:
        check_seed(self.seed)
        ranks, shared = self.cluster.ranks, self.policy.rollout.tensor_parallel
        check(ranks % shared == 0, "cluster.ranks", ranks, f"a multiple of policy.rollout.tensor_parallel={shared}")
        self.reward.check_placement(self.cluster, self.policy.rollout)
        if self.environment.enabled:
            given = [function.name for function in self.reward.functions
                     if function != RewardFunctionConfig()] + list(self.reward.learned)
            check(not given, "reward", given, "left out with environment.name, which scores (a suite takes both)")
        else:
            self.data.check_prompts()
            check_prompts_of("suites", self.suites)
        check(self.max_prompts >= 0, "max_prompts", self.max_prompts, "at least 0")
        check(self.samples_per_prompt >= 1, "samples_per_prompt", self.samples_per_prompt, "at least 1")
        check_k("k", self.k, self.samples_per_prompt, "samples_per_prompt")
        temperature = self.policy.rollout.temperature
        check(not self.greedy or temperature > 0, "greedy", self.greedy,
              f"false with policy.rollout.temperature={temperature:g}, which takes the likeliest response")
        check(bool(self.data.enabled or self.suites), "data.path", self.data.path,
              "a path (or data.task a reasoning-gym task) without suites")
        check_suites("suites", self.suites, self.samples_per_prompt, self.k, self.cluster, self.policy.rollout)
        path = Path(self.output).expanduser().absolute()
        check(not self.output or path.parent.is_dir(), "output", self.output, "a file in a folder that exists")
        is_file = path.suffix == ".jsonl"
        check(not path.is_dir() if is_file else not path.is_file() or not self.output, "output", self.output,
              "no folder's name when it ends in .jsonl" if is_file else "no file's name unless it ends in .jsonl")
