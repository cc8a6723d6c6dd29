"""The critic: a language model with a value head, which learns the return that follows each token."""

from pathlib import Path

import torch
from tensordict import TensorDict

from hybridrl.algorithms.partials import Partial
from hybridrl.algorithms.values import ValueLoss
from hybridrl.batch import lengths, make_batch, padded, put, rows_of, unpadded
from hybridrl.config import ModelConfig, TrainingConfig
from hybridrl.dispatch import RowCosts, over_rows, to_all
from hybridrl.workers.base import Worker, WorkerContext
from hybridrl.workers.training.dry_run import dry_run
from hybridrl.workers.training.engine import TrainingEngine
from hybridrl.workers.training.models import ValueModel


class CriticWorker(Worker):
    """One rank of the critic. Its first values are all 0.

    Args:
        context: rank, device, role.
        model: folder of the language model whose layers it starts from.
        cfg: optimizer and batching.
    Raises:
        ModelError: the model folder can't be used.
    """

    def __init__(self, context: WorkerContext, model: ModelConfig, cfg: TrainingConfig):
        super().__init__(context)
        self.training = TrainingEngine(model, cfg, self.device, module=ValueModel, key="critic.training")
        self.training.offload()

    def peers(self, axis: str) -> int:
        return self.training.cfg.context_parallel if axis == "training" else super().peers(axis)

    def costs(self, axis: str) -> RowCosts | None:
        return self.training.costs

    @over_rows()
    def values(self, batch: TensorDict, bootstrap: bool = False) -> TensorDict:
        """The batch with `values`: of the state before each response token, which is what the token leaves open.

        With `bootstrap` also `bootstrap_values` [B]: of the state after the last token where the length limit cut the
        response (its finish reason is `length`), 0 for other rows.
        """
        self.training.onload()
        wanted = _one_longer(batch) if bootstrap else batch
        with self.measured("critic_values"):
            values = self.training.values(wanted)
        if not bootstrap:
            put(batch, "values", values)
            return batch
        sizes, values = lengths(batch["response_ids"]), padded(values)
        cut = torch.tensor([reason == "length" for reason in batch["finish_reason"]], dtype=torch.bool) & (sizes > 0)
        put(batch, "bootstrap_values", torch.where(cut, values.gather(1, sizes[:, None])[:, 0], 0.0))
        put(batch, "values", unpadded(values, like=batch["response_ids"]))
        return batch

    @over_rows(join="first")
    def update(self, batch: TensorDict, loss: ValueLoss) -> dict[str, Partial]:
        """One optimizer step on the batch; the result does not depend on how rows were split.

        Args:
            batch: `prompt_ids`, `response_ids` and what `loss` reads: `values`, `returns`, `response_mask`,
                `loss_weights`.
        Returns:
            `critic/vf_loss`, `critic/vf_clipfrac`, `critic/grad_norm`, `critic/lr`, ..., as parts that `total` adds
            up over the updates of a step.
        """
        self.training.onload()
        with self.measured("critic_update"):
            metrics = self.training.step(batch, loss)
        metrics["vf_loss"] = metrics.pop("loss")
        return {f"critic/{name}": value for name, value in metrics.items()}

    @to_all
    def dry_run(self, rows: int, prompt_tokens: int, response_tokens: int) -> str:
        """As of TrainerWorker."""
        self.training.onload()
        found = dry_run(self.training, rows, prompt_tokens, response_tokens)
        self.training.offload()
        return found

    @to_all
    def offload(self) -> None:
        """Leave the device to others until the next call; on CUDA, unless `critic.training.offload=never`."""
        self.training.offload()

    @to_all
    def save(self, folder: str) -> None:
        """Write model, optimizer and schedule into `folder`, each rank its shards."""
        self.training.onload()
        self.training.save(Path(folder))
        self.training.offload()

    @to_all
    def load(self, folder: str) -> None:
        """Read what `save` wrote, on any number of ranks."""
        self.training.onload()
        self.training.load(Path(folder))
        self.training.offload()


def _one_longer(batch: TensorDict) -> TensorDict:
    """Prompts and responses, each response one token longer: the value before that token is the one after the last."""
    responses = [torch.cat([row, row.new_zeros(1)]) for row in rows_of(batch["response_ids"])]
    return make_batch(prompt_ids=batch["prompt_ids"], response_ids=responses)
