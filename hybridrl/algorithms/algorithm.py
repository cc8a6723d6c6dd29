"""An algorithm chosen by configuration, applied to batches: the names in a config become calls on columns.

The functions it calls are in the sibling files and work on plain padded tensors; a loop that wants other
mathematics calls those instead and writes the columns itself.

    algorithm = Algorithm(cfg.algorithm, max_response_tokens)
    batch["advantages"] = algorithm.advantages(batch)
    for mini_batch in algorithm.mini_batches(batch, seed):
        metrics = policy.update(mini_batch, algorithm.loss)
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from hybridrl.algorithms.advantages import ADVANTAGES, compute_advantages
from hybridrl.algorithms.aggregation import AGGREGATIONS, aggregate, loss_weights
from hybridrl.algorithms.combinations import check_combination
from hybridrl.algorithms.corrections import CORRECTIONS, correct
from hybridrl.algorithms.diagnostics import batch_mismatch
from hybridrl.algorithms.kl import KL_ESTIMATORS, token_kl
from hybridrl.algorithms.losses import POLICY_LOSSES, policy_loss
from hybridrl.algorithms.metrics import policy_metrics
from hybridrl.algorithms.old_log_probs import serves_one_update
from hybridrl.algorithms.partials import Max, Partial, mean_of
from hybridrl.algorithms.returns import place_outcome
from hybridrl.algorithms.reward_shaping import drop_rows, kl_in_reward, overlong_penalty
from hybridrl.algorithms.tables import Entry
from hybridrl.batch import FIELDS, is_ragged, lengths, num_rows, padded, require, select, split_sizes, unpadded
from hybridrl.config import AlgorithmConfig
from hybridrl.errors import ConfigError


def padded_columns(batch: TensorDict) -> dict[str, Tensor]:
    """The tensor columns of a batch under the names that the tables use: response columns padded to [B, R].

    `response_mask` is called `mask` there. Prompt columns and columns of objects are left out.
    """
    require(batch, "response_mask")
    sizes = lengths(batch["response_mask"])
    columns = {}
    for name in batch.keys():
        column = batch.get(name)
        if not isinstance(column, Tensor):
            continue
        if not is_ragged(column):
            columns[name] = column
        elif torch.equal(lengths(column), sizes):
            columns[name] = padded(column)
    columns["mask"] = columns.pop("response_mask")
    return columns


@dataclass(frozen=True)
class Loss:
    """What a policy worker needs to turn log-probs into a partial loss; pickles, a user's own functions included.

    Called with log_probs [b, R] (carrying gradient), the padded columns of the same rows, and entropies or None.
    Where there is no column `old_log_probs`, the update starts from the weights that would have made it: the
    log-probs at hand are the old ones, and the corrections are computed from them here.
    """

    policy_loss: Entry
    options: Mapping[str, Any]
    kl: Entry | None
    kl_coefficient: float
    entropy_coefficient: float
    corrections: Mapping[Entry, Mapping[str, Any]]
    """Options of each correction; used where the batch brings no `correction_weights`."""
    diagnoses: bool
    """Whether it measures `mismatch/...`, which only a single update over the whole batch can."""

    @property
    def needs_entropies(self) -> bool:
        """Whether entropies must be computed for it."""
        return self.entropy_coefficient > 0

    def __call__(self, log_probs: Tensor, columns: Mapping[str, Tensor],
                 entropies: Tensor | None) -> tuple[Tensor, dict[str, Partial]]:
        """The partial loss (0-d) of some rows of a mini-batch and its metrics as sums and counts."""
        POLICY_LOSSES.adopt(self.policy_loss)
        mask, reused = columns["response_mask"], "old_log_probs" not in columns
        columns = {"old_log_probs": log_probs.detach(), **columns, "mask": mask, "log_probs": log_probs}
        if self.corrections and "correction_weights" not in columns:
            columns["correction_weights"] = self._correction_weights(columns)
        result = policy_loss(self.policy_loss.name, columns, self.options)
        moved = policy_metrics(log_probs.detach(), columns["old_log_probs"], mask,
                               ref_log_probs=columns.get("ref_log_probs"), entropies=entropies)
        metrics: dict[str, Partial] = {f"policy/{name}": value for name, value in (result.metrics | moved).items()}
        metrics["old_log_probs_reused"] = Max(float(reused))
        if self.diagnoses and "rollout_log_probs" in columns:
            metrics |= batch_mismatch(columns)
        loss = aggregate(result.loss, columns["loss_weights"], mask)
        if self.kl is not None:
            KL_ESTIMATORS.adopt(self.kl)
            kl = token_kl(self.kl.name, log_probs, columns["ref_log_probs"], mask, columns["old_log_probs"])
            loss = loss + self.kl_coefficient * aggregate(kl, columns["loss_weights"], mask)
            metrics["policy/kl_loss"] = mean_of(kl.detach(), mask)
        if entropies is not None and self.needs_entropies:
            loss = loss - self.entropy_coefficient * aggregate(entropies, columns["loss_weights"], mask)
        return loss, metrics

    def _correction_weights(self, columns: Mapping[str, Tensor]) -> Tensor:
        for entry in self.corrections:
            CORRECTIONS.adopt(entry)
        return correct({entry.name: options for entry, options in self.corrections.items()}, columns).weights.float()


class Algorithm:
    """Advantage estimator, corrections, mini-batches and loss of one configuration.

    Args:
        cfg: names and options of the table entries.
        max_response_tokens: the constant of `seq-mean-token-sum-norm`.
        columns: names of further columns that the loop writes, for estimators that need them.
        has_critic: the loop trains a critic, whose `values` the estimator reads.
    Raises:
        ConfigError: an unknown name or option, a combination that makes no sense, or an estimator that needs a
            column which nothing writes.
    """

    def __init__(self, cfg: AlgorithmConfig, max_response_tokens: int, columns: Sequence[str] = (),
                 has_critic: bool = False):
        self.cfg = cfg
        self.corrections = {choice.name: choice.options for choice in cfg.corrections}
        check_combination(
            advantage=cfg.advantage.name, advantage_options=cfg.advantage.options, loss=cfg.loss.name,
            loss_options=cfg.loss.options, aggregation=cfg.aggregation, corrections=self.corrections,
            kl_estimator=cfg.kl.estimator, num_responses=cfg.responses_per_prompt, has_critic=has_critic)
        needed = {name for name, required in ADVANTAGES[cfg.advantage.name].columns.items() if required}
        missing = sorted(needed - {"mask", *FIELDS, *columns})
        if missing:
            raise ConfigError(
                f"algorithm.advantage.name={cfg.advantage.name} needs {', '.join(missing)}, which this loop does not "
                f"write; a loop that does says so: Algorithm(..., columns={missing}).")
        entry = AGGREGATIONS[cfg.aggregation]
        takes = {field.name for field in dataclasses.fields(entry.options)}
        self.aggregation_options = dict.fromkeys(takes & {"max_response_length"}, max_response_tokens)
        self.loss: Callable[..., tuple[Tensor, dict[str, Partial]]] = Loss(
            POLICY_LOSSES[cfg.loss.name], cfg.loss.options,
            KL_ESTIMATORS[cfg.kl.estimator] if cfg.kl.coefficient and cfg.kl.place == "loss" else None,
            cfg.kl.coefficient, cfg.entropy_coefficient,
            {CORRECTIONS[name]: options for name, options in self.corrections.items()}, serves_one_update(cfg))
        self.max_response_tokens = max_response_tokens

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether `old_log_probs` must be there before the update; if not, its own first forward pass makes them."""
        return self.cfg.old_log_probs == "separate" or not serves_one_update(self.cfg)

    @property
    def needs_reference(self) -> bool:
        """Whether `ref_log_probs` are read, by the loss or by the reward."""
        return self.cfg.kl.coefficient > 0

    @property
    def needs_greedy(self) -> bool:
        """Whether the estimator reads `greedy_rewards`: the reward of the likeliest response to each prompt."""
        return "greedy_rewards" in ADVANTAGES[self.cfg.advantage.name].columns

    def shape(self, batch: TensorDict) -> TensorDict:
        """From the environment's rewards to the ones that are learned from; the former stay as `outcomes`.

        In this order: the penalty of overlong responses, the KL penalty as `token_rewards`. Rows without a score,
        and overlong ones when `overlong.mask` asks for it, leave the loss: their `response_mask` is cleared.
        """
        batch["outcomes"] = batch["rewards"]
        overlong = self.cfg.overlong
        if overlong.penalty:
            batch["rewards"] = batch["rewards"] + overlong_penalty(
                lengths(batch["response_ids"]), max_response_length=self.max_response_tokens,
                buffer=round(overlong.buffer_frac * self.max_response_tokens), factor=overlong.penalty)
        dropped = ~batch["rewards"].isfinite()
        if overlong.mask:
            dropped |= torch.tensor([reason == "length" for reason in batch["finish_reason"]], dtype=torch.bool)
        columns = padded_columns(batch)
        if self.cfg.kl.coefficient and self.cfg.kl.place == "reward":
            placed = place_outcome(columns["rewards"], columns["mask"])
            penalised = kl_in_reward(placed, columns["old_log_probs"], columns["ref_log_probs"], columns["mask"],
                                     kl_coef=self.cfg.kl.coefficient, estimator=self.cfg.kl.estimator)
            batch["token_rewards"] = unpadded(penalised, like=batch["response_ids"])
        batch["response_mask"] = unpadded(drop_rows(columns["mask"], dropped), like=batch["response_ids"])
        return batch

    def advantages(self, batch: TensorDict) -> Tensor:
        """Advantage of every response token of the whole batch, ragged like `response_ids`."""
        return self.advantages_and_returns(batch)[0]

    def advantages_and_returns(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """Also the return of every token, which a critic learns."""
        result = compute_advantages(self.cfg.advantage.name, padded_columns(batch), self.cfg.advantage.options)
        advantages, returns = (unpadded(x.float(), like=batch["response_ids"]) for x in result)
        return advantages, returns

    def correct(self, batch: TensorDict) -> TensorDict:
        """The batch with `correction_weights` for the gap between rollout and training log-probs, if configured.

        Without a configured correction there is no such column: some losses then bring their own. Nor is there
        without `old_log_probs`: then the update computes both.
        """
        if self.corrections and "old_log_probs" in batch.keys():
            correction = correct(self.corrections, padded_columns(batch))
            batch["correction_weights"] = unpadded(correction.weights.float(), like=batch["response_ids"])
        return batch

    def mini_batches(self, batch: TensorDict, seed: int = 0) -> Iterator[TensorDict]:
        """The batch cut into `mini_batches` parts, `epochs` times over, each with what its loss needs.

        The responses to one prompt stay together; with more than one part, prompts are shuffled by `seed`.
        Everything that counts tokens or rows of the mini-batch is computed here, on all of its rows, so that
        the loss does not depend on how workers cut it further.
        """
        require(batch, "group_ids")
        order = torch.Generator().manual_seed(seed)
        groups = list(dict.fromkeys(batch["group_ids"].tolist()))
        for _ in range(self.cfg.epochs):
            if self.cfg.mini_batches == 1:
                yield self._prepared(select(batch, slice(None)))
                continue
            shuffled = [groups[i] for i in torch.randperm(len(groups), generator=order).tolist()]
            start = 0
            for size in split_sizes(len(shuffled), self.cfg.mini_batches):
                wanted = set(shuffled[start:start + size])
                start += size
                rows = [i for i, group in enumerate(batch["group_ids"].tolist()) if group in wanted]
                if rows:
                    yield self._prepared(select(batch, rows))

    def _prepared(self, mini_batch: TensorDict) -> TensorDict:
        columns = padded_columns(mini_batch)
        weights = loss_weights(self.cfg.aggregation, columns, self.aggregation_options)
        extra = POLICY_LOSSES.prepare(self.cfg.loss.name, self.cfg.loss.options, columns)
        for name, value in {"loss_weights": weights, **extra}.items():
            ragged = value.dim() == 2 and value.shape == columns["mask"].shape
            mini_batch.set(name, unpadded(value, like=mini_batch["response_ids"]) if ragged else value)
        assert num_rows(mini_batch) == len(columns["mask"]), "preparing a mini-batch must keep its rows"
        return mini_batch
