"""GRPO and its critic-free relatives.

    prompts ─> generate ─> reward ─> log-probs ─> advantages ─> update ─> sync ─┐
                  ^                                                             │
                  └────────────────────── new weights ──────────────────────────┘

The policy's two engines share the devices and take turns: `generate` runs on the rollout engine, everything
from `log_probs` to `update` on the training engine, and `sync_weights` moves to the other side.
"""

from functools import partial

from tensordict import TensorDict

from hybridrl.algorithms.algorithm import Algorithm
from hybridrl.algorithms.dynamic_sampling import GroupAccumulator
from hybridrl.algorithms.partials import finalize, total
from hybridrl.batch import concat, num_rows, repeat, select
from hybridrl.command_line import recipe
from hybridrl.config import GRPOConfig
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
from hybridrl.workers.policy import PolicyWorker


@recipe("grpo", GRPOConfig)
def main(cfg: GRPOConfig) -> None:
    """Reinforcement learning from verifiable rewards: GRPO, Dr. GRPO, RLOO, REINFORCE and others by `algorithm=`."""
    rewards, suites = Rewarder(cfg.reward), Suites(cfg.eval_data, cfg.eval_suites)
    algorithm = Algorithm(cfg.algorithm, cfg.policy.rollout.max_response_tokens, reward_weights=rewards.weights)
    with Run(cfg, "grpo") as run, rewards, suites, Cluster(cfg.cluster, run.log_dir) as cluster:
        pool = cluster.pool()
        tokenizer = load_tokenizer(cfg.policy.model)
        longest = cfg.policy.rollout.max_prompt_tokens
        data = load_prompts(cfg.data, tokenizer, longest)
        prompts = PromptLoader(data, seed=cfg.seed, shuffle=cfg.data.shuffle)
        suites.load(cfg.policy, tokenizer, cluster, pool, cfg.seed, data)
        rewards.groups = reward_groups(cfg.reward, cfg.policy, cluster, pool, cfg.seed)
        policy = WorkerGroup(PolicyWorker, pool, cfg.policy, cfg.seed, role="policy")
        reference = reference_group(cfg, policy, cluster, pool) if algorithm.needs_reference else None

        if cfg.trainer.dry_run:
            rows = cfg.trainer.prompts_per_step * cfg.algorithm.responses_per_prompt
            run.say(policy.dry_run(rows, longest, cfg.policy.rollout.max_response_tokens, algorithm.loss)[0])
        evaluate = Evaluation(cfg, run, partial(respond, policy, rewards), suites.ready(policy))
        parts = {"policy": policy, "prompts": prompts, "algorithm": algorithm}
        if run.restore(**parts) == 0 and evaluate.suites:
            run.log(0, evaluate(0))
        version = policy.sync_weights()[0]

        def rollout(step: int, batch: TensorDict, number: int = 0) -> TensorDict:
            """Responses to a batch of prompts, scored; `number` counts the rollouts of a step."""
            if algorithm.needs_greedy:  # ReMax: the reward of the likeliest response is the baseline
                with run.phase("greedy"):
                    batch["greedy_rewards"] = rewards(policy.generate(batch, temperature=0.0))["rewards"]
            batch = repeat(batch, cfg.algorithm.responses_per_prompt)
            first = number * num_rows(batch)
            batch["seeds"] = row_seeds(cfg.seed, step, first + num_rows(batch))[first:]
            with run.phase("generate"):
                batch = policy.generate(batch)
            with run.phase("reward"):
                return rewards(batch)

        def refill(step: int, batch: TensorDict) -> tuple[TensorDict, dict[str, float]]:
            """DAPO's dynamic sampling: fresh prompts in place of groups whose rewards are all equal."""
            groups = GroupAccumulator(cfg.trainer.prompts_per_step, cfg.algorithm.dynamic_sampling.max_rounds)
            groups.add(batch, batch["rewards"], batch["group_ids"])
            while groups.wants_more():
                batch = rollout(step, prompts.next_batch(cfg.trainer.prompts_per_step), groups.num_rounds)
                groups.add(batch, batch["rewards"], batch["group_ids"])
            metrics = finalize(groups.metrics())
            return concat([select(piece, rows) for piece, rows in groups.take()]), metrics

        for step, batch in run.steps(prompts):
            policy.step = step
            batch = rollout(step, batch)
            sampling: dict[str, float] = {}
            if cfg.algorithm.dynamic_sampling.enabled:
                batch, sampling = refill(step, batch)
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
            metrics |= average(policy.take_metrics()) | rewards.metrics
            run.log(step, metrics | sampling | evaluate(step))
            run.samples(step, batch)
            run.checkpoint(step, **parts)

        if cfg.trainer.export:
            policy.export(str(run.dir / "model"))


if __name__ == "__main__":
    main()
