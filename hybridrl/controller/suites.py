"""The suites of a recipe: from options to named problems and what scores the answers to them."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

from hybridrl.config import EvalDataConfig, PolicyConfig, SuiteConfig
from hybridrl.controller.call import DevicePool
from hybridrl.controller.cluster import Cluster
from hybridrl.controller.evaluation import Responder, Suite, respond
from hybridrl.controller.player import Player
from hybridrl.controller.reward_groups import reward_groups
from hybridrl.data import PromptSet, load_prompts
from hybridrl.rewards import Rewarder


class Suites:
    """Suites on their way to being evaluated; a context manager that ends their reward processes.

        with Suites(cfg.eval_data, cfg.eval_suites) as suites, Cluster(cfg.cluster) as cluster:
            suites.load(cfg.policy, tokenizer, cluster, pool, cfg.seed, trained=data)
            evaluate = Evaluation(cfg, run, responder, suites.ready(policy))

    Args:
        own: the recipe's own problems: the first suite, without a name. more: the suites with names.
        key: of `own` in the recipe's options, for messages.
    Raises:
        ConfigError: an unknown environment, reward function or option.
    """

    def __init__(self, own: EvalDataConfig, more: Sequence[SuiteConfig], key: str = "eval_data"):
        self.key = key
        self.cfgs = cfgs = [SuiteConfig(data=own), *more] if own.enabled else list(more)
        self._rewarders = {cfg.name: Rewarder(cfg.reward) for cfg in cfgs if cfg.reward.enabled}
        self._players = {cfg.name: Player(cfg.environment, self._rewarders.get(cfg.name))
                         for cfg in cfgs if cfg.environment.enabled}
        self._problems: dict[str, PromptSet] = {}

    def __enter__(self) -> "Suites":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        with ExitStack() as stack:
            for rewards in self._rewarders.values():
                stack.callback(rewards.close)

    def load(self, policy: PolicyConfig, tokenizer: Any, cluster: Cluster, pool: DevicePool, seed: int = 0,
             trained: PromptSet | None = None) -> None:
        """Read the problems, without those in `trained`, and start the models that score them.

        Raises DataError, ModelError, and what the workers of reward models and judges raise.
        """
        for cfg in self.cfgs:
            key = f"{cfg.name}.data" if cfg.name else self.key
            problems = load_prompts(cfg.data, tokenizer, policy.rollout.max_prompt_tokens, key)
            self._problems[cfg.name] = problems if trained is None else problems.held_out(trained)
        for cfg in self.cfgs:
            if cfg.name in self._rewarders:
                groups = reward_groups(cfg.reward, policy, cluster, pool, seed, cfg.name)
                self._rewarders[cfg.name].groups = groups

    def ready(self, policy: Any) -> list[Suite]:
        """The suites, answered by this policy."""
        return [Suite(cfg.name, self._problems[cfg.name], self._responder(cfg.name, policy), cfg.samples, cfg.k,
                      cfg.max_prompts) for cfg in self.cfgs]

    def _responder(self, name: str, policy: Any) -> Responder | None:
        if name in self._players:
            return partial(self._players[name], policy)
        return partial(respond, policy, self._rewarders[name]) if name in self._rewarders else None
