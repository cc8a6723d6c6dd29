"""Score a model: answer problems on the rollout engine, grade the answers, print one JSON line.

    problems ─> generate ─> reward ─> pass@1, avg@k, pass@k, maj@k
           └──> episodes in an environment ──┘
"""

import json
from functools import partial
from pathlib import Path

from hybridrl.batch import num_rows
from hybridrl.command_line import recipe
from hybridrl.config import EvaluateConfig
from hybridrl.controller.cluster import Cluster
from hybridrl.controller.evaluation import answer, evaluation_metrics, respond
from hybridrl.controller.player import Player
from hybridrl.controller.reward_groups import reward_groups
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data import load_prompts
from hybridrl.metrics import finite
from hybridrl.models import load_tokenizer
from hybridrl.rewards import Rewarder
from hybridrl.workers.policy import PolicyWorker


@recipe("evaluate", EvaluateConfig)
def main(cfg: EvaluateConfig) -> None:
    """Score a model on problems: pass@1, avg@k, pass@k, maj@k."""
    play = Player(cfg.environment) if cfg.environment.enabled else None
    with Rewarder(cfg.reward) as rewards, Cluster(cfg.cluster) as cluster:
        pool = cluster.pool()
        problems = load_prompts(cfg.data, load_tokenizer(cfg.policy.model), cfg.policy.rollout.max_prompt_tokens)
        rewards.groups = reward_groups(cfg.reward, cfg.policy, cluster, pool, cfg.seed)
        policy = WorkerGroup(PolicyWorker, pool, cfg.policy, cfg.seed, role="policy")
        responder = partial(play, policy) if play else partial(respond, policy, rewards)
        batch = answer(responder, problems, cfg.samples_per_prompt, cfg.seed, cfg.max_prompts)
    if cfg.output:
        with Path(cfg.output).expanduser().open("w") as file:
            for row in range(num_rows(batch)):
                kept = {name: batch[name][row]
                        for name in ("prompt", "response", "answer", "finish_reason", "reward_error")}
                kept |= finite({"reward": float(batch["rewards"][row])})
                file.write(json.dumps(kept, default=str, ensure_ascii=False) + "\n")
    print(json.dumps(finite(evaluation_metrics(batch, cfg.k))))


if __name__ == "__main__":
    main()
