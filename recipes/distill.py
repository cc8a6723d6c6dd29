"""On-policy distillation: the policy samples, a larger teacher says what it thinks of every token.

    prompts ─> generate ─> reward ─┬> log-probs         ─┬> advantages ─> update ─> sync ─┐
                  ^                └> teacher's log-probs ┘                               │
                  └────────────────────────────── new weights ────────────────────────────┘

The teacher shares the policy's devices or has some of its own (`teacher.ranks`): then it reads a batch while the policy
computes its own log-probs of it. `distill.loss=sampled` makes the difference of the two each token's advantage;
`distill.loss=top_k` puts the divergence over the teacher's likeliest tokens into the loss, beside the rewards' part.
"""

from functools import partial

from hybridrl.algorithms.algorithm import Algorithm
from hybridrl.algorithms.distillation import (
    TEACHER_COLUMNS,
    DistillationLoss,
    check_distillation,
    distillation_metrics,
    rewards_alone,
)
from hybridrl.algorithms.partials import total
from hybridrl.batch import num_rows, repeat
from hybridrl.command_line import recipe
from hybridrl.config import DistillConfig
from hybridrl.controller.cluster import Cluster
from hybridrl.controller.evaluation import Evaluation, respond
from hybridrl.controller.reward_groups import reward_groups
from hybridrl.controller.run import Run
from hybridrl.controller.suites import Suites
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data import PromptLoader, load_prompts, row_seeds
from hybridrl.metrics import average
from hybridrl.models import check_same_vocabulary, load_tokenizer
from hybridrl.rewards import Rewarder
from hybridrl.workers.policy import PolicyWorker
from hybridrl.workers.teacher import TeacherWorker


@recipe("distill", DistillConfig)
def main(cfg: DistillConfig) -> None:
    """On-policy distillation: learn from a larger teacher on the policy's own samples."""
    rewards, suites = Rewarder(cfg.reward), Suites(cfg.eval_data, cfg.eval_suites)
    algorithm = Algorithm(cfg.algorithm, cfg.policy.rollout.max_response_tokens, columns=["teacher_log_probs"],
                          reward_weights=rewards.weights)
    check_distillation(cfg.distill, algorithm, rewards.components)
    tokenizer = load_tokenizer(cfg.policy.model)
    check_same_vocabulary(tokenizer, load_tokenizer(cfg.teacher.model))
    with Run(cfg, "distill") as run, rewards, suites, Cluster(cfg.cluster, run.log_dir) as cluster:
        pool = cluster.pool()
        longest = cfg.policy.rollout.max_prompt_tokens
        data = load_prompts(cfg.data, tokenizer, longest)
        prompts = PromptLoader(data, seed=cfg.seed, shuffle=cfg.data.shuffle)
        suites.load(cfg.policy, tokenizer, cluster, pool, cfg.seed, data)
        rewards.groups = reward_groups(cfg.reward, cfg.policy, cluster, pool, cfg.seed)
        own = cluster.pool(cfg.teacher.ranks) if cfg.teacher.ranks else pool
        teacher = WorkerGroup(TeacherWorker, own, cfg.teacher, cfg.distill, cfg.policy.model, role="teacher")
        policy = WorkerGroup(PolicyWorker, pool, cfg.policy, cfg.seed, role="policy")
        if cfg.trainer.dry_run:
            rows = cfg.trainer.prompts_per_step * cfg.algorithm.responses_per_prompt
            others = cfg.distill.top_k if cfg.distill.loss == "top_k" else 0
            run.say(policy.dry_run(rows, longest, cfg.policy.rollout.max_response_tokens, algorithm.loss, others)[0])
        evaluate = Evaluation(cfg, run, partial(respond, policy, rewards), suites.ready(policy))
        parts = {"policy": policy, "prompts": prompts, "algorithm": algorithm}
        if run.restore(**parts) == 0 and evaluate.suites:
            run.log(0, evaluate(0))
        version = policy.sync_weights()[0]

        for step, batch in run.steps(prompts):
            policy.step = teacher.step = step
            batch = repeat(batch, cfg.algorithm.responses_per_prompt)
            batch["seeds"] = row_seeds(cfg.seed, step, num_rows(batch))
            with run.phase("generate"):
                batch = policy.generate(batch)
            with run.phase("reward"):
                batch = rewards(batch)
            with run.phase("log_probs"):
                policy.enter_training()  # on shared devices it makes room for the teacher
                taught = teacher.log_probs.future(batch)
                batch = policy.log_probs(batch, also=algorithm.needed_columns)
                for name in TEACHER_COLUMNS[cfg.distill.loss]:
                    batch.set(name, taught.result().get(name))
            batch = algorithm.shape(batch)
            alone = cfg.distill.loss == "top_k"  # then the teacher is in the loss
            batch["advantages"] = algorithm.advantages(rewards_alone(batch) if alone else batch)
            batch = algorithm.correct(batch)
            with run.phase("update"):
                updates = []
                for mini_batch in algorithm.mini_batches(batch, seed=cfg.seed + step):
                    loss = DistillationLoss(algorithm.loss, cfg.distill.weight) if alone else algorithm.loss
                    updates.append(policy.update(mini_batch, loss))
            metrics = algorithm.describe(batch, version) | distillation_metrics(batch) | total(updates)
            with run.phase("sync"):
                version = policy.sync_weights()[0]
            metrics |= average(policy.take_metrics()) | rewards.metrics
            run.log(step, metrics | evaluate(step))
            run.samples(step, batch)
            run.checkpoint(step, **parts)

        if cfg.trainer.export:
            policy.export(str(run.dir / "model"))


if __name__ == "__main__":
    main()
