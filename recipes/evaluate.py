"""Score a model: answer suites of problems on the rollout engine, grade the answers, print one JSON line.

    problems ─> generate ─> reward ─> accuracy, avg@k, pass@k, maj@k, with 95% intervals
           └──> episodes in an environment ──┘
"""

import json
from functools import partial

from hybridrl.command_line import recipe
from hybridrl.config import EvaluateConfig
from hybridrl.controller.cluster import Cluster
from hybridrl.controller.evaluation import Plan, respond
from hybridrl.controller.evaluation_output import EvaluationOutput
from hybridrl.controller.player import Player
from hybridrl.controller.reward_groups import reward_groups
from hybridrl.controller.suites import Suites
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.models import load_tokenizer
from hybridrl.rewards import Rewarder
from hybridrl.workers.policy import PolicyWorker


@recipe("evaluate", EvaluateConfig)
def main(cfg: EvaluateConfig) -> None:
    """Score a model on suites of problems: accuracy, avg@k, pass@k, maj@k."""
    play = Player(cfg.environment) if cfg.environment.enabled else None
    rewards, suites, output = Rewarder(cfg.reward), Suites(cfg.data, cfg.suites, "data"), EvaluationOutput(cfg)
    with rewards, suites, Cluster(cfg.cluster) as cluster:
        pool, tokenizer = cluster.pool(), load_tokenizer(cfg.policy.model)
        suites.load(cfg.policy, tokenizer, cluster, pool, cfg.seed)
        rewards.groups = reward_groups(cfg.reward, cfg.policy, cluster, pool, cfg.seed)
        policy = WorkerGroup(PolicyWorker, pool, cfg.policy, cfg.seed, role="policy")
        responder = partial(play, policy) if play else partial(respond, policy, rewards)
        plan = Plan(cfg.samples_per_prompt, cfg.k, cfg.max_prompts, None, cfg.greedy, cfg.seed)
        for suite in suites.ready(policy):
            output.add(suite.name, suite.answer(plan, responder))
    print(json.dumps(output.results))


if __name__ == "__main__":
    main()
