"""Supervised fine-tuning: learn the responses of a dataset.

    examples ─> update
"""

from hybridrl.algorithms.aggregation import loss_weights
from hybridrl.algorithms.algorithm import padded_columns
from hybridrl.algorithms.partials import finalize
from hybridrl.algorithms.sft import sft_loss
from hybridrl.batch import unpadded
from hybridrl.command_line import recipe
from hybridrl.config import SFTConfig
from hybridrl.controller.cluster import Cluster
from hybridrl.controller.run import Run
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data import PromptLoader, load_examples
from hybridrl.metrics import average
from hybridrl.models import load_tokenizer
from hybridrl.workers.trainer import TrainerWorker


@recipe("sft", SFTConfig)
def main(cfg: SFTConfig) -> None:
    """Supervised fine-tuning on prompts with responses."""
    with Run(cfg, "sft") as run, Cluster(cfg.cluster, run.log_dir) as cluster:
        pool = cluster.pool()
        data = load_examples(cfg.data, load_tokenizer(cfg.policy.model), cfg.max_tokens)
        examples = PromptLoader(data, seed=cfg.seed, shuffle=cfg.data.shuffle)
        policy = WorkerGroup(TrainerWorker, pool, cfg.policy.model, cfg.policy.training, role="policy")
        if cfg.trainer.dry_run:
            run.say(policy.dry_run(cfg.trainer.prompts_per_step, 1, cfg.max_tokens - 1)[0])
        run.restore(policy=policy, examples=examples)

        for step, batch in run.steps(examples):
            policy.step = step
            weights = loss_weights("token-mean", padded_columns(batch))
            batch["loss_weights"] = unpadded(weights, like=batch["response_ids"])
            with run.phase("update"):
                metrics = policy.update(batch, sft_loss)
            run.log(step, finalize(metrics) | average(policy.take_metrics()))
            run.checkpoint(step, policy=policy, examples=examples)

        if cfg.trainer.export:
            policy.export(str(run.dir / "model"))


if __name__ == "__main__":
    main()
