"""Suites of problems to evaluate on."""

import re
from dataclasses import dataclass, field

from hybridrl.config.checks import check, check_k
from hybridrl.config.cluster import ClusterConfig
from hybridrl.config.data import EvalDataConfig
from hybridrl.config.environment import EnvironmentConfig
from hybridrl.config.reward import OptionalRewardConfig
from hybridrl.config.rollout import RolloutConfig


@dataclass(kw_only=True, slots=True)
class SuiteConfig:
    """Problems to evaluate on, and what scores the responses."""

    name: str = ""
    """Name in metrics and results: letters, digits, `-` and `_`."""
    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    """The problems."""
    reward: OptionalRewardConfig = field(default_factory=OptionalRewardConfig)
    """How responses are scored; with an environment, on top of its rewards."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Play episodes in this environment, which scores them. With neither this nor `reward`, problems are answered and
    scored as the recipe's own."""
    samples: int = 0
    """Responses per problem; 0 takes as many as of the recipe's own problems."""
    k: list[int] = field(default_factory=list)
    """The k of avg@k, pass@k and maj@k; empty takes the recipe's."""
    max_prompts: int = 0
    """Problems taken, from the first; 0 takes as many as the recipe says."""

    @property
    def scores(self) -> bool:
        """Whether it says how responses are scored."""
        return self.reward.enabled or self.environment.enabled

    def validate(self, key: str = "suites") -> None:
        check(bool(re.fullmatch(r"[\w-]+", self.name)), f"{key}.name", self.name, "letters, digits, - and _")
        check(self.data.enabled, f"{key}.data.path", self.data.path, "a path (or data.task a reasoning-gym task)")
        check(self.samples >= 0, f"{key}.samples", self.samples, "at least 0")
        check(self.max_prompts >= 0, f"{key}.max_prompts", self.max_prompts, "at least 0")


def check_suites(key: str, suites: list[SuiteConfig], samples: int, ks: list[int], cluster: ClusterConfig,
                 rollout: RolloutConfig) -> None:
    """Raise ConfigError unless names differ, each k has enough responses, and models that score have a place."""
    names = [suite.name for suite in suites]
    for i, suite in enumerate(suites):
        check(suite.name not in names[:i], f"{key}[{i}].name", suite.name, "a name that no other suite has")
        check_k(f"{key}[{i}].k", suite.k or ks, suite.samples or samples, "the suite's samples")
        suite.reward.check_placement(cluster, rollout, f"{key}[{i}].reward")


def check_prompts_of(key: str, suites: list[SuiteConfig]) -> None:
    """Raise ConfigError where the rows of a suite without an environment have no prompts."""
    for i, suite in enumerate(suites):
        if not suite.environment.enabled:
            suite.data.check_prompts(f"{key}[{i}].data")
