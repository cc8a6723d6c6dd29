"""Workers around a training engine alone: a model that learns, and a frozen one that only scores."""

from collections.abc import Sequence
from pathlib import Path

from tensordict import TensorDict

from hybridrl.algorithms.partials import Partial
from hybridrl.batch import from_lengths, lengths, put
from hybridrl.config import ModelConfig, TrainingConfig
from hybridrl.dispatch import RowCosts, over_rows, to_all
from hybridrl.errors import BatchError, unknown
from hybridrl.models import load_tokenizer
from hybridrl.workers.base import Worker, WorkerContext
from hybridrl.workers.training.dry_run import dry_run
from hybridrl.workers.training.engine import LossFunction, TrainingEngine


class TrainerWorker(Worker):
    """One rank of a model in training.

    Args:
        context: rank, device, role.
        model: the model folder.
        cfg: optimizer and batching.
        temperature: of the distribution whose log-probs are trained.
    Raises:
        ModelError: the model folder can't be used.
    """

    def __init__(self, context: WorkerContext, model: ModelConfig, cfg: TrainingConfig, temperature: float = 1.0):
        super().__init__(context)
        self.tokenizer = load_tokenizer(model)
        self.training = TrainingEngine(model, cfg, self.device)
        self.temperature = temperature

    def peers(self, axis: str) -> int:
        return self.training.cfg.context_parallel if axis == "training" else super().peers(axis)

    def costs(self, axis: str) -> RowCosts | None:
        return self.training.costs if axis == "training" else None

    @to_all
    def enter_training(self) -> None:
        """Called before the training engine is used; a worker whose device is shared makes room here."""

    @over_rows()
    def log_probs(self, batch: TensorDict, also: Sequence[str] = ()) -> TensorDict:
        """The batch with `old_log_probs` of its response tokens under the training weights.

        With `policy.routing_replay=old` also with the `routed_experts` of this pass.

        `also` asks for more columns: `entropies`, `sum_squared_probs`. The latter, the sum of p^2 over the vocabulary,
        takes a second forward pass at half the temperature: with l = z_y - log sum exp z at the first and
        l' = 2 z_y - log sum exp 2z at the second it is exp(2 l - l').

        Raises BatchError for another name.
        """
        for name in also:
            if name not in ("entropies", "sum_squared_probs"):
                raise BatchError(unknown("column", name, ("entropies", "sum_squared_probs")))
        self.enter_training()
        with self.measured("log_probs"):
            result = self.training.log_probs(batch, self.temperature, "entropies" in also)
        put(batch, "old_log_probs", result["log_probs"])
        if "routed_experts" in result:
            put(batch, "routed_experts", result["routed_experts"])
        if "entropies" in also:
            put(batch, "entropies", result["entropies"])
        if "sum_squared_probs" in also:
            sharper = self.training.log_probs(batch, self.temperature / 2)["log_probs"]
            squares = (2 * result["log_probs"].values() - sharper.values()).exp()
            put(batch, "sum_squared_probs", from_lengths(squares, lengths(sharper)))
        return batch

    @over_rows()
    def ref_log_probs(self, batch: TensorDict) -> TensorDict:
        """The batch with `ref_log_probs`: as of ReferenceWorker, from this model with its adapters off.

        Raises TrainingError for a model without adapters.
        """
        self.enter_training()
        put(batch, "ref_log_probs", self.training.base_log_probs(batch, self.temperature))
        return batch

    @over_rows(join="first")
    def update(self, batch: TensorDict, loss: LossFunction) -> dict[str, Partial]:
        """One optimizer step on the batch; the result does not depend on how rows were split.

        Args:
            batch: `prompt_ids`, `response_ids` and the columns that `loss` reads.
            loss: gives the partial loss of some rows, with coefficients that count the whole batch; it gets
                entropies when it has an attribute `needs_entropies` that is true, and with an attribute `candidates`
                the log-probs of the tokens in the column of that name.
        Returns:
            `train/loss`, `train/grad_norm`, `train/lr`, ... and the loss function's own metrics, as parts that
            `total` adds up over the updates of a step.
        """
        self.enter_training()
        with self.measured("update"):
            metrics = self.training.step(batch, loss, self.temperature, getattr(loss, "needs_entropies", False),
                                         getattr(loss, "candidates", ""))
        return {name if "/" in name else f"train/{name}": value for name, value in metrics.items()}

    @to_all
    def dry_run(self, rows: int, prompt_tokens: int, response_tokens: int, loss: LossFunction | None = None,
                candidates: int = 0) -> str:
        """Try the largest micro-batch that a batch of `rows` can make, for updates with `loss`; changes nothing.

        `candidates`: how many tokens the loss wants log-probs of beside each sampled one.

        Returns what it took and what is left. Raises ConfigError naming the `micro_batch_tokens` that fit.
        """
        self.enter_training()
        return dry_run(self.training, rows, prompt_tokens, response_tokens, self.temperature,
                       getattr(loss, "needs_entropies", False), candidates)

    @to_all
    def save(self, folder: str) -> None:
        """Write model, optimizer and schedule into `folder`, each rank its shards."""
        self.enter_training()
        self.training.save(Path(folder))

    @to_all
    def load(self, folder: str) -> None:
        """Read what `save` wrote, on any number of ranks."""
        self.enter_training()
        self.training.load(Path(folder))

    @to_all
    def export(self, folder: str) -> None:
        """Write the model as a Hugging Face folder that transformers and vLLM load."""
        self.enter_training()
        self.training.export(Path(folder), self.tokenizer)


class ReferenceWorker(Worker):
    """A frozen model that scores responses: the anchor of a KL penalty. Arguments as of TrainerWorker.

    A policy with adapters is its own reference and needs no such worker.
    """

    def __init__(self, context: WorkerContext, model: ModelConfig, cfg: TrainingConfig, temperature: float = 1.0):
        super().__init__(context)
        self.training = TrainingEngine(model, cfg, self.device, trainable=False)
        self.temperature = temperature

    def peers(self, axis: str) -> int:
        return self.training.cfg.context_parallel if axis == "training" else super().peers(axis)

    def costs(self, axis: str) -> RowCosts | None:
        return self.training.costs

    @over_rows()
    def ref_log_probs(self, batch: TensorDict) -> TensorDict:
        """The batch with `ref_log_probs` of its response tokens."""
        put(batch, "ref_log_probs", self.training.log_probs(batch, self.temperature)["log_probs"])
        return batch
