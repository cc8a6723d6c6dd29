"""The training engine: outputs and optimizer steps of one model over the ranks of the default process group.

A batch is cut into packed micro-batches by a token budget (packing.py) and balanced by what rows cost (costs.py).
PolicyModel (models.py) turns each into log-probs, or ValueModel into values; the caller's loss function turns those
into a partial loss. Every rank runs the same number of micro-batches, whatever rows it has, because every forward and
backward pass is a collective. Gradients are added up over ranks in the last one's backward pass.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from hybridrl.algorithms.diagnostics import batch_mismatch
from hybridrl.algorithms.partials import Balance, Mean, Partial, finalize, merge
from hybridrl.batch import fed_lengths, from_lengths, lengths
from hybridrl.errors import BatchError, TrainingError
from hybridrl.workers.memory import give_back
from hybridrl.workers.routing import Routing
from hybridrl.workers.training.lora import adapters_off
from hybridrl.workers.training.packing import MicroBatch, columns, cut, micro_batches, of_fed_tokens
from hybridrl.workers.training.sharded_model import ShardedModel

LossFunction = Callable[[Tensor, dict[str, Tensor], Tensor | None], tuple[Tensor, dict[str, Partial]]]
"""(log_probs [b, R], columns, entropies [b, R] or None) -> (partial loss, metrics that merge over pieces).

The loss is a sum over the micro-batch with coefficients that already count the whole batch of all ranks; the
engine adds partial losses up. Log-probs and entropies are 0 in the padding. With a ValueModel, values stand in the
place of log-probs, and there are no entropies. A loss that names `candidates` finds their log-probs among the columns.
"""


GIVE_BACK_STEPS = 20
"""Optimizer steps after which freed memory goes back to the system."""


class TrainingEngine(ShardedModel):
    """A sharded model that scores batches and learns from them.

    Every rank calls the methods with its own rows (possibly none), `context_parallel` consecutive ranks with the same
    ones.
    """

    replay = "off"
    """Whose experts log-probs and updates follow: `off` (the model's own), `rollout` (those in `routed_experts`) or
    `old` (those that `log_probs` puts there)."""
    compare_routing = False
    """Whether updates also measure the gap to the rollout without replay; one more forward pass."""

    def log_probs(self, batch: TensorDict, temperature: float = 1.0, entropies: bool = False) -> dict[str, Tensor]:
        """Log-probs of the response tokens, ragged like `response_ids`, float32 on CPU, in the batch's row order.

        Args:
            batch: `prompt_ids` and `response_ids`; this rank's rows.
            temperature: divides the logits.
        Returns:
            `log_probs`, and with `entropies` also `entropies`; `routed_experts` where `replay` is `old` and the batch
            has none.
        """
        return self._score(batch, ["log_probs", "entropies"] if entropies else ["log_probs"], temperature, True)

    def base_log_probs(self, batch: TensorDict, temperature: float = 1.0) -> Tensor:
        """Log-probs under the model that training started from: this one, with its adapters off.

        Raises TrainingError for a model without adapters.
        """
        if not self.cfg.lora.rank:
            raise TrainingError(f"{self.key}.lora.rank is 0: without adapters the weights of the start are gone.")
        with adapters_off(self.model):
            return self._score(batch, ["log_probs"], temperature)["log_probs"]

    def values(self, batch: TensorDict) -> Tensor:
        """A ValueModel's value of the state before each response token, shaped as `log_probs`."""
        return self._score(batch, ["values"])["values"]

    def top_log_probs(self, batch: TensorDict, temperature: float = 1.0) -> dict[str, Tensor]:
        """As `log_probs`, of a TeacherModel: also `top_log_probs` and `top_ids` [B, R, k] of its likeliest tokens."""
        return self._score(batch, ["log_probs", "top_log_probs", "top_ids"], temperature)

    @torch.no_grad()
    def _score(self, batch: TensorDict, names: list[str], temperature: float = 1.0,
               replay: bool = False) -> dict[str, Tensor]:
        """The model's outputs under `names`; with `replay` under the experts that `self.replay` says."""
        self._need("parameters")
        sizes = lengths(batch["response_ids"])
        values = {name: torch.empty(int(sizes.sum()), dtype=torch.float32) for name in names}
        record = replay and self.replay == "old" and "routed_experts" not in batch.keys()
        routings = []
        for part in self._micro_batches(batch):
            routing = self._routing(part, record) if replay else None
            routings.append((part, routing))
            outputs = self._forward(part, temperature, "entropies" in names, routing=routing)
            for name, value in zip(names, outputs, strict=False):
                if values[name].shape[1:] != value.shape[1:] or values[name].dtype != value.dtype:
                    values[name] = value.new_empty(len(values[name]), *value.shape[1:], device="cpu")
                values[name][part.sources] = value.cpu()
        if self.sharded:
            self.model.reshard()  # forward passes alone leave the root's weights gathered
        recorded = {"routed_experts": self._recorded(batch, routings)} if record else {}
        return {name: from_lengths(value, sizes) for name, value in values.items()} | recorded

    def _routing(self, part: MicroBatch, record: bool = False) -> Routing | None:
        """The experts that the forward passes of a micro-batch follow, or with `record` keep; None: nobody asks."""
        mixture = self.model.mixture
        if mixture is None or self.replay == "off" or (part.experts is None and not record):
            return None
        given = None if part.experts is None else mixture.unpacked(part.experts).to(self.device)
        return Routing(mixture, part.input_ids.shape[1], self.device, given)

    def _recorded(self, batch: TensorDict, routings: Iterable[tuple[MicroBatch, Routing | None]]) -> Tensor:
        """The column `routed_experts` of what was kept."""
        mixture, sizes = self.model.mixture, torch.tensor(fed_lengths(batch), dtype=torch.int64)
        assert mixture is not None, "replay is off for dense models"
        column = from_lengths(mixture.unknown(int(sizes.sum())), sizes)
        for part, routing in routings:
            if routing is not None and len(part.sources):
                column.values()[of_fed_tokens(column, part.rows)] = routing.own.cpu()
        return from_lengths(mixture.packed(column.values()), sizes)

    def update(self, batch: TensorDict, loss_fn: LossFunction, temperature: float = 1.0,
               entropies: bool = False, candidates: str = "") -> dict[str, float]:
        """`step`, with its metrics as numbers."""
        return finalize(self.step(batch, loss_fn, temperature, entropies, candidates))

    def step(self, batch: TensorDict, loss_fn: LossFunction, temperature: float = 1.0,
             entropies: bool = False, candidates: str = "") -> dict[str, Partial]:
        """One optimizer step on all rows of all ranks.

        The result does not depend on the number of ranks, on how rows are spread over them, or on
        `micro_batch_tokens`.

        Args:
            batch: `prompt_ids`, `response_ids` and what `loss_fn` reads; this rank's rows.
            loss_fn: see LossFunction.
            temperature: divides the logits.
            entropies: hand entropies to `loss_fn`.
            candidates: name of a column of token ids, ragged [B, R, K]: `loss_fn` finds their log-probs as the column
                `candidate_log_probs` [b, R, K], with gradient.
        Returns:
            The same on every rank, and over several steps `merge` adds them up: `loss` (summed), `grad_norm` (before
            clipping), `lr`, `skipped` (1 when the gradient was not finite), `tokens` (fed, all ranks),
            `micro_batches` (per rank), each counting one step, `balance_ranks` and `balance_micro_batches` (largest
            over mean cost of a rank, and of a micro-batch of any rank), and the merged metrics of `loss_fn`.
        Raises:
            BatchError: no rank has rows, or a column does not fit.
            TrainingError: the model is frozen, or too many steps in a row were skipped.
        """
        optimizer = self._trained()
        totals = self.backward(batch, loss_fn, temperature, entropies, candidates)
        norm, lr, skipped = optimizer.step()
        if optimizer.steps % GIVE_BACK_STEPS == 0:
            give_back(self.device)
        return totals | {"grad_norm": Mean(norm, 1), "lr": Mean(lr, 1), "skipped": Mean(float(skipped), 1)}

    def backward(self, batch: TensorDict, loss_fn: LossFunction, temperature: float = 1.0, entropies: bool = False,
                 candidates: str = "") -> dict[str, Partial]:
        """The first half of `step`: gradients, and all of its metrics that need no more."""
        self._need("parameters", "optimizer")
        self._trained()
        parts = self._micro_batches(batch)
        if not parts:
            raise BatchError("an update needs at least one row; no rank has any.")
        pieces = []
        for part in parts:
            self._reduce_gradients(part is parts[-1])
            pieces.append(self._backward(batch, part, loss_fn, temperature, entropies, candidates))
        costs = self.costs(batch) or []
        pieces.append({"tokens": Mean(sum(fed_lengths(batch)), 1), "balance_ranks": Balance.of([sum(costs)]),
                       "balance_micro_batches": Balance.of(sum(costs[row] for row in part.rows) for part in parts)})
        totals = self._merge_over_ranks(pieces)
        numbers = {name: float(totals.pop(name).sum) for name in ("loss", "tokens")}
        numbers |= {name: totals.pop(name).value() for name in ("balance_ranks", "balance_micro_batches")}
        numbers["micro_batches"] = float(len(parts))
        if "routing/fallback_rows" in totals:
            numbers["routing/fallback_rows"] = float(totals.pop("routing/fallback_rows").sum)
        return {name: Mean(value, 1) for name, value in numbers.items()} | totals

    def _micro_batches(self, batch: TensorDict) -> list[MicroBatch]:
        """This rank's micro-batches, as many as the rank with most of them has."""
        sizes, costs = fed_lengths(batch), self.costs(batch) or []
        budget = self.cfg.micro_batch_tokens * self.cfg.context_parallel
        bins = cut(sizes, costs, budget)
        count = torch.tensor(len(bins), device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        if count > len(bins):
            bins = cut(sizes, costs, budget, int(count))
        return list(micro_batches(batch, bins, self.device, self.kernel, self.shares))

    def _reduce_gradients(self, now: bool) -> None:
        """Let the next backward pass add gradients up over ranks, or leave them whole on this rank until one does."""
        if self.accumulates:
            self.model.set_requires_gradient_sync(now)
            self.model.set_is_last_backward(now)

    def _forward(self, part: MicroBatch, temperature: float, entropies: bool,
                 targets: Tensor | None = None, routing: Routing | None = None) -> tuple[Tensor, Tensor | None]:
        outputs = self.model(part.input_ids, part.position_ids, part.predictors,
                             part.targets if targets is None else targets, part.pack, temperature,
                             self.cfg.logits_chunk_tokens, entropies, routing)
        if routing is not None:
            routing.check()
        return outputs

    def _backward(self, batch: TensorDict, part: MicroBatch, loss_fn: LossFunction, temperature: float,
                  entropies: bool, candidates: str) -> dict[str, Partial]:
        """Add the gradient of one micro-batch; returns sums and counts of its metrics, its loss among them."""
        targets = None
        if candidates:
            others = batch[candidates].values()[part.sources].to(self.device)
            targets = torch.cat([part.targets[:, None], others], dim=1)
        live = self._live_log_probs(part, temperature) if self.compare_routing else None
        routing = self._routing(part)
        log_probs, entropy = self._forward(part, temperature, entropies, targets, routing)
        if not part.rows:
            log_probs.sum().backward()  # no targets: a sum of nothing, whose backward pass is still a collective
            return {}
        inputs = columns(batch, part, self.device)
        if candidates:
            inputs["candidate_log_probs"] = part.padded(log_probs[:, 1:])
            log_probs = log_probs[:, 0]
        loss, metrics = loss_fn(part.padded(log_probs), inputs,
                                part.padded(entropy) if entropy is not None else None)
        if not loss.requires_grad:  # a constant loss still has to join the backward pass of the others
            loss = loss + log_probs.sum() * 0
        loss.backward()
        if routing is not None:
            metrics = {**metrics, **routing.metrics()}
        if live is not None:
            metrics = {**metrics, **_live_mismatch(part.padded(live), inputs)}
        return {**metrics, "loss": Mean(loss.detach(), 1)}

    @torch.no_grad()
    def _live_log_probs(self, part: MicroBatch, temperature: float) -> Tensor:
        """Log-probs under the model's own choice of experts."""
        return self._forward(part, temperature, False)[0]

    def _merge_over_ranks(self, pieces: list[dict[str, Partial]]) -> dict[str, Any]:
        """The metrics of all pieces of all rows, merged in rank order; a name may be missing on some ranks."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, _plain(merge(pieces)))
        return merge(everyone[::self.cfg.context_parallel])  # ranks that share rows found the same


def _live_mismatch(log_probs: Tensor, inputs: dict[str, Tensor]) -> dict[str, Partial]:
    """`mismatch_live/...`: the rollout's log-probs against those [b, R] of a pass that replayed nothing."""
    found = batch_mismatch({"old_log_probs": log_probs, "rollout_log_probs": inputs["rollout_log_probs"],
                            "mask": inputs["response_mask"]})
    return {name.replace("mismatch/", "mismatch_live/"): part for name, part in found.items()}


def _plain(value: Any) -> Any:
    """A metric part, or a dict of them, with plain numbers for tensors."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return type(value)(*map(_plain, value))
    return value.item() if isinstance(value, Tensor) else value
