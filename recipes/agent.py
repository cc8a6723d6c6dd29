"""An agent that learns from episodes: several turns in an environment, with tools, games or other players.

    tasks ─> play ─> log-probs ─> advantages ─> update ─> sync ─┐
               ^                                                │
               └──────────────── new weights ───────────────────┘

`play` takes the place of generating and scoring: an episode is turns of the policy and answers of the environment,
which are not trained on. Where a chat template rewrites what was said before, or several agents act, an episode is
several rows; rows of one trajectory share its reward and its place in the group.
"""

from functools import partial

import torch
from tensordict import TensorDict

from hybridrl.algorithms.algorithm import Algorithm
from hybridrl.algorithms.dynamic_sampling import GroupAccumulator
from hybridrl.algorithms.partials import finalize, total
from hybridrl.batch import concat, num_rows, repeat, select
from hybridrl.command_line import recipe
from hybridrl.config import AgentConfig
from hybridrl.controller.cluster import Cluster
from hybridrl.controller.evaluation import Evaluation
from hybridrl.controller.player import Player, episode_metrics
from hybridrl.controller.reference_group import reference_group
from hybridrl.controller.reward_groups import reward_groups
from hybridrl.controller.run import Run
from hybridrl.controller.suites import Suites
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data import PromptLoader, load_prompts, row_seeds
from hybridrl.metrics import average
from hybridrl.models import load_tokenizer
from hybridrl.rewards import Rewarder
from hybridrl.workers.policy import PolicyWorker


@recipe("agent", AgentConfig)
def main(cfg: AgentConfig) -> None:
    """Reinforcement learning on episodes in an environment, without a critic; `algorithm=` as in recipes.grpo."""
    rewards, suites = Rewarder(cfg.reward), Suites(cfg.eval_data, cfg.eval_suites)
    play = Player(cfg.environment, rewards if cfg.reward.enabled else None)
    algorithm = Algorithm(cfg.algorithm, cfg.policy.rollout.max_response_tokens, reward_weights=[1.0, *rewards.weights],
                          absent=[] if cfg.reward.enabled else ["reward_components"])
    with Run(cfg, "agent") as run, rewards, suites, Cluster(cfg.cluster, run.log_dir) as cluster:
        pool = cluster.pool()
        tokenizer = load_tokenizer(cfg.policy.model)
        longest = cfg.policy.rollout.max_prompt_tokens
        data = load_prompts(cfg.data, tokenizer, longest)
        tasks = PromptLoader(data, seed=cfg.seed, shuffle=cfg.data.shuffle)
        suites.load(cfg.policy, tokenizer, cluster, pool, cfg.seed, data)
        rewards.groups = reward_groups(cfg.reward, cfg.policy, cluster, pool, cfg.seed)
        policy = WorkerGroup(PolicyWorker, pool, cfg.policy, cfg.seed, role="policy")
        reference = reference_group(cfg, policy, cluster, pool) if algorithm.needs_reference else None

        if cfg.trainer.dry_run:
            rows = cfg.trainer.prompts_per_step * cfg.algorithm.responses_per_prompt
            run.say(policy.dry_run(rows, longest, cfg.policy.rollout.max_response_tokens, algorithm.loss)[0])
        evaluate = Evaluation(cfg, run, partial(play, policy), suites.ready(policy))
        parts = {"policy": policy, "tasks": tasks, "algorithm": algorithm}
        if run.restore(**parts) == 0 and evaluate.suites:
            run.log(0, evaluate(0))
        version = policy.sync_weights()[0]

        def rollout(step: int, batch: TensorDict, number: int = 0) -> TensorDict:
            """Episodes of a batch of tasks; `number` counts the rollouts of a step."""
            likeliest = None
            if algorithm.needs_greedy:  # ReMax: the reward of the likeliest episode is the baseline
                with run.phase("greedy"):
                    likeliest = rewards_by_agent(play(policy, batch, temperature=0.0))
            batch = repeat(batch, cfg.algorithm.responses_per_prompt)
            first = number * num_rows(batch)
            batch["seeds"] = row_seeds(cfg.seed, step, first + num_rows(batch))[first:]
            with run.phase("play"):
                batch = play(policy, batch)
            if likeliest is not None:
                batch["greedy_rewards"] = torch.tensor([likeliest.get(who, torch.nan) for who in agents_of(batch)])
            return batch

        def gather(step: int, batch: TensorDict) -> tuple[TensorDict, dict[str, float]]:
            """The rows to train on, and what became of all episodes.

            DAPO's dynamic sampling plays fresh tasks in place of groups whose rewards are all equal.
            """
            rounds = [rollout(step, batch)]
            if not cfg.algorithm.dynamic_sampling.enabled:
                return rounds[0], play.metrics
            groups = GroupAccumulator(cfg.trainer.prompts_per_step, cfg.algorithm.dynamic_sampling.max_rounds)
            groups.add(rounds[0], rounds[0]["rewards"], rounds[0]["group_ids"])
            while groups.wants_more():
                rounds.append(rollout(step, tasks.next_batch(cfg.trainer.prompts_per_step), groups.num_rounds))
                groups.add(rounds[-1], rounds[-1]["rewards"], rounds[-1]["group_ids"])
            metrics = play.metrics | episode_metrics(concat(rounds)) | finalize(groups.metrics())
            return concat([select(piece, rows) for piece, rows in groups.take()]), metrics

        for step, batch in run.steps(tasks):
            policy.step = step
            batch, played = gather(step, batch)
            with run.phase("log_probs"):
                policy.enter_training()
                scored = reference.ref_log_probs.future(batch) if reference is not None else None
                # else the update's own first forward pass gives them
                if algorithm.needs_old_log_probs:
                    batch = policy.log_probs(batch, also=algorithm.needed_columns)
                if scored is not None:
                    batch["ref_log_probs"] = scored.result()["ref_log_probs"]
            batch = algorithm.shape(batch)
            batch["advantages"] = algorithm.advantages(batch)
            batch = algorithm.correct(batch)
            with run.phase("update"):
                updates = [policy.update(mini_batch, algorithm.loss)
                           for mini_batch in algorithm.mini_batches(batch, seed=cfg.seed + step)]
            metrics = algorithm.describe(batch, version) | total(updates)
            with run.phase("sync"):
                version = policy.sync_weights()[0]
            metrics |= average(policy.take_metrics()) | played
            run.log(step, metrics | evaluate(step))
            run.samples(step, batch)
            run.checkpoint(step, **parts)

        if cfg.trainer.export:
            policy.export(str(run.dir / "model"))


def agents_of(batch: TensorDict) -> list[tuple[int, int]]:
    """Task and agent of each row."""
    return list(zip(batch["group_ids"].tolist(), batch["agent_ids"].tolist(), strict=True))


def rewards_by_agent(batch: TensorDict) -> dict[tuple[int, int], float]:
    """The reward of each agent in each task, of one episode a task."""
    return dict(zip(agents_of(batch), batch["rewards"].tolist(), strict=True))


if __name__ == "__main__":
    main()
