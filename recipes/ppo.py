"""PPO: a critic learns what each token may still expect, and advantages are measured against that.

    prompts ─> generate ─> reward ─┬> log-probs ─┬> advantages ─┬> update policy ─┬> sync ─┐
                  ^                └> values    ─┘  and returns └> update critic ─┘        │
                  └─────────────────────────── new weights ────────────────────────────────┘

The critic shares the policy's devices, where the two take turns, or has devices of its own (`critic.ranks`): then
both work at the same time, because each call below is started before the other's result is waited for.
"""

from functools import partial

from hybridrl.algorithms.algorithm import Algorithm
from hybridrl.algorithms.partials import total
from hybridrl.algorithms.values import ValueLoss
from hybridrl.batch import num_rows, repeat
from hybridrl.command_line import recipe
from hybridrl.config import PPOConfig
from hybridrl.controller.cluster import Cluster
from hybridrl.controller.evaluation import Evaluation, respond
from hybridrl.controller.reference_group import reference_group
from hybridrl.controller.reward_groups import reward_groups
from hybridrl.controller.run import Run
from hybridrl.controller.suites import Suites
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data import PromptLoader, load_prompts, row_seeds
from hybridrl.metrics import average
from hybridrl.models import load_tokenizer
from hybridrl.rewards import Rewarder
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.policy import PolicyWorker


@recipe("ppo", PPOConfig)
def main(cfg: PPOConfig) -> None:
    """Reinforcement learning with a critic: PPO with generalized advantage estimation."""
    rewards, suites = Rewarder(cfg.reward), Suites(cfg.eval_data, cfg.eval_suites)
    algorithm = Algorithm(cfg.algorithm, cfg.policy.rollout.max_response_tokens, has_critic=True,
                          reward_weights=rewards.weights)
    value_loss = ValueLoss(cfg.critic.value_clip or None)
    with Run(cfg, "ppo") as run, rewards, suites, Cluster(cfg.cluster, run.log_dir) as cluster:
        pool = cluster.pool()
        own = cluster.pool(cfg.critic.ranks) if cfg.critic.ranks else pool  # too many devices fail before a model loads
        tokenizer = load_tokenizer(cfg.policy.model)
        longest = cfg.policy.rollout.max_prompt_tokens
        data = load_prompts(cfg.data, tokenizer, longest)
        prompts = PromptLoader(data, seed=cfg.seed, shuffle=cfg.data.shuffle)
        suites.load(cfg.policy, tokenizer, cluster, pool, cfg.seed, data)
        rewards.groups = reward_groups(cfg.reward, cfg.policy, cluster, pool, cfg.seed)
        policy = WorkerGroup(PolicyWorker, pool, cfg.policy, cfg.seed, role="policy")
        critic = WorkerGroup(CriticWorker, own, cfg.critic.model, cfg.critic.training, role="critic")
        reference = reference_group(cfg, policy, cluster, pool) if algorithm.needs_reference else None
        if cfg.trainer.dry_run:
            rows = cfg.trainer.prompts_per_step * cfg.algorithm.responses_per_prompt
            run.say(policy.dry_run(rows, longest, cfg.policy.rollout.max_response_tokens, algorithm.loss)[0])
            run.say(critic.dry_run(rows, longest, cfg.policy.rollout.max_response_tokens)[0])
        evaluate = Evaluation(cfg, run, partial(respond, policy, rewards), suites.ready(policy))
        parts = {"policy": policy, "critic": critic, "prompts": prompts, "algorithm": algorithm}
        if run.restore(**parts) == 0 and evaluate.suites:
            run.log(0, evaluate(0))
        version = policy.sync_weights()[0]

        for step, batch in run.steps(prompts):
            policy.step = critic.step = step
            batch = repeat(batch, cfg.algorithm.responses_per_prompt)
            batch["seeds"] = row_seeds(cfg.seed, step, num_rows(batch))
            with run.phase("generate"):
                batch = policy.generate(batch)
            with run.phase("reward"):
                batch = rewards(batch)
            with run.phase("log_probs"):
                policy.enter_training()  # on shared devices it makes room for the critic
                judged = critic.values.future(batch, cfg.critic.bootstrap)
                scored = reference.ref_log_probs.future(batch) if reference is not None else None
                # else the update's own first forward pass gives them
                if algorithm.needs_old_log_probs:
                    batch = policy.log_probs(batch, also=algorithm.needed_columns)
                if scored is not None:
                    batch["ref_log_probs"] = scored.result()["ref_log_probs"]
                for name in ("values", "bootstrap_values") if cfg.critic.bootstrap else ("values",):
                    batch[name] = judged.result()[name]
            batch = algorithm.shape(batch)
            batch["advantages"], batch["returns"] = algorithm.advantages_and_returns(batch)
            batch = algorithm.correct(batch)
            with run.phase("update"):
                updates = []
                for mini_batch in algorithm.mini_batches(batch, seed=cfg.seed + step):
                    learned = policy.update.future(mini_batch, algorithm.loss)
                    judged = critic.update.future(mini_batch, value_loss)
                    updates.append(learned.result() | judged.result())
                if own is pool:
                    critic.offload()
            metrics = algorithm.describe(batch, version) | total(updates)
            with run.phase("sync"):
                version = policy.sync_weights()[0]
            metrics |= average(policy.take_metrics() + critic.take_metrics()) | rewards.metrics
            run.log(step, metrics | evaluate(step))
            run.samples(step, batch)
            run.checkpoint(step, **parts)

        if cfg.trainer.export:
            policy.export(str(run.dir / "model"))


if __name__ == "__main__":
    main()
