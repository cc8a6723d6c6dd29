"""An algorithm chosen by configuration, applied to batches: the names in a config become calls on columns.

The functions it calls are in the sibling files and work on plain padded tensors; a loop that wants other
mathematics calls those instead and writes the columns itself.

    algorithm = Algorithm(cfg.algorithm, max_response_tokens)
    batch = algorithm.shape(batch)
    batch["advantages"] = algorithm.advantages(batch)
    batch = algorithm.correct(batch)
    updates = [policy.update(mini_batch, algorithm.loss) for mini_batch in algorithm.mini_batches(batch, seed)]
    metrics = algorithm.describe(batch) | total(updates)
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from hybridrl.algorithms.advantages import ADVANTAGES, compute_advantages
from hybridrl.algorithms.aggregation import AGGREGATIONS, loss_weights
from hybridrl.algorithms.batch_metrics import batch_metrics
from hybridrl.algorithms.columns import padded_columns
from hybridrl.algorithms.combinations import check_combination
from hybridrl.algorithms.combined_loss import Loss
from hybridrl.algorithms.corrections import CORRECTIONS, correct
from hybridrl.algorithms.groups import Trajectories
from hybridrl.algorithms.keep_masks import KEEP_MASKS
from hybridrl.algorithms.kl import KL_ESTIMATORS
from hybridrl.algorithms.losses import POLICY_LOSSES, anchored
from hybridrl.algorithms.masked import reject_nonfinite, select
from hybridrl.algorithms.old_log_probs import serves_one_update
from hybridrl.algorithms.returns import place_outcome
from hybridrl.algorithms.reward_shaping import drop_rows, kl_in_reward, overlong_penalty, scale_rewards
from hybridrl.algorithms.steering import Steering
from hybridrl.batch import FIELDS, num_rows, require, split_sizes, unpadded
from hybridrl.batch import select as rows_at
from hybridrl.config import AlgorithmConfig
from hybridrl.errors import ConfigError


class Algorithm:
    """Shaping, advantage estimator, corrections, mini-batches and loss of one configuration.

    What changes from batch to batch (a steered KL or entropy coefficient, a moving baseline) is its state, which
    `run.restore` and `run.checkpoint` take like that of any other part of a run.

    Args:
        cfg: names and options of the table entries.
        max_response_tokens: the length limit, and the constant of `seq-mean-token-sum-norm`.
        columns: names of further columns that the loop writes, for entries that need them.
        absent: names of declared columns that it does not write.
        has_critic: the loop trains a critic, whose `values` the estimator reads.
        reward_weights: of the columns of `reward_components`; an estimator with the option `weights` takes them unless
            it is given its own.
    Raises:
        ConfigError: an unknown name or option, a combination that makes no sense, or an entry that needs a column which
            nothing writes.
    """

    def __init__(self, cfg: AlgorithmConfig, max_response_tokens: int, columns: Sequence[str] = (),
                 has_critic: bool = False, reward_weights: Sequence[float] = (), absent: Sequence[str] = ()):
        check_combination(cfg, has_critic)
        self.cfg, self.max_response_tokens = cfg, max_response_tokens
        self.advantage_options = _with_weights(cfg, reward_weights)
        self.corrections = _corrections(cfg)
        written = {name for name, field in FIELDS.items() if field.writer != "teacher"}
        self._check_columns({"mask", "log_probs", *written, *columns} - set(absent))
        takes = {field.name for field in dataclasses.fields(AGGREGATIONS[cfg.aggregation].options)}
        limit = dict.fromkeys(takes & {"max_response_length"}, max_response_tokens)
        self.aggregation_options = limit | cfg.aggregation_options
        self.steering = Steering(cfg)

    # ---- what the loop must provide

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether `old_log_probs` must be there before the update; if not, its own first forward pass makes them."""
        return self.cfg.old_log_probs == "separate" or not serves_one_update(self.cfg)

    @property
    def needed_columns(self) -> list[str]:
        """Columns that must be there before the update beside `old_log_probs`: `log_probs(also=...)` writes them."""
        steered = {"entropies"} if self.cfg.entropy.target else set()
        return [name for name in ("entropies", "sum_squared_probs") if name in steered or self._reads(name)]

    @property
    def needs_reference(self) -> bool:
        """Whether `ref_log_probs` are read."""
        in_estimator = self.advantage_options.get("kl_coef", 0) > 0
        return self.cfg.kl.coefficient > 0 or in_estimator or self._reads("ref_log_probs")

    @property
    def needs_greedy(self) -> bool:
        """Whether `greedy_rewards` are read: the reward of the likeliest response to each prompt."""
        return self._reads("greedy_rewards")

    def _reads(self, column: str) -> bool:
        """Whether a chosen estimator, loss or keep mask can't do without a column."""
        entries = [ADVANTAGES[self.cfg.advantage.name], POLICY_LOSSES[self.cfg.loss.name],
                   *(KEEP_MASKS[choice.name] for choice in self.cfg.keep_masks)]
        return any(entry.columns.get(column, False) for entry in entries)

    def _check_columns(self, known: set[str]) -> None:
        tables = {"advantage": ADVANTAGES, "loss": POLICY_LOSSES}
        for key, table in tables.items():
            name = getattr(self.cfg, key).name
            missing = sorted({c for c, required in table[name].columns.items() if required} - known)
            if missing and table[name].prepare is None:
                raise ConfigError(
                    f"algorithm.{key}.name={name} needs {', '.join(missing)}, which this loop does not write; a loop "
                    f"that does says so: Algorithm(..., columns={missing}).")

    # ---- the stages of a step

    def shape(self, batch: TensorDict) -> TensorDict:
        """From the environment's rewards to the ones that are learned from; the former stay as `outcomes`.

        In this order: scale, bias and clip, the penalty of overlong responses, the KL penalty as `token_rewards`. Rows
        leave the loss (their `response_mask` is cleared) when they have no score or a log-prob that is not finite, and
        overlong ones when `overlong.mask` asks for it. `response_lengths` counts what was sampled before that.
        """
        columns = padded_columns(batch)
        mask, raw = columns["mask"], columns["rewards"]
        trajectories = Trajectories.of(raw, columns.get("trajectory_ids"))
        batch["outcomes"], batch["response_lengths"] = raw, mask.sum(dim=1)
        lengths = trajectories.total(batch["response_lengths"])[trajectories.index]
        batch["rewards"] = columns["rewards"] = self._shaped(raw, lengths)
        dropped = ~columns["rewards"].isfinite()
        if self.cfg.overlong.mask:
            dropped |= torch.tensor([reason == "length" for reason in batch["finish_reason"]], dtype=torch.bool)
        log_probs = [columns[name] for name in ("old_log_probs", "rollout_log_probs") if name in columns]
        columns["mask"], rejected = reject_nonfinite(drop_rows(mask, dropped), *log_probs)
        self.steering.begin(columns, num_rows(batch))
        self.steering.metrics["response/nonfinite_rows"] = float(rejected)
        by_token = self._token_rewards(raw, columns, mask & trajectories.last(mask.any(dim=1))[:, None])
        if by_token is not None:
            batch["token_rewards"] = unpadded(by_token, like=batch["response_ids"])
        batch["response_mask"] = unpadded(columns["mask"], like=batch["response_ids"])
        return batch

    def _shaped(self, rewards: Tensor, lengths: Tensor) -> Tensor:
        shaping, overlong = self.cfg.shaping, self.cfg.overlong
        rewards = scale_rewards(rewards, scale=shaping.scale, bias=shaping.bias, clip=shaping.clip or None)
        if not overlong.penalty:
            return rewards
        return rewards + overlong_penalty(
            lengths, max_response_length=self.max_response_tokens,
            buffer=round(overlong.buffer_frac * self.max_response_tokens), factor=overlong.penalty)

    def _token_rewards(self, raw: Tensor, columns: dict[str, Tensor], ends: Tensor) -> Tensor | None:
        """Shaped rewards by token, where the environment gave such or the KL penalty makes them; else None.

        `ends` [B, R] is true on what was sampled in the last row of each trajectory: outcomes stand on its last token.
        """
        in_reward = self.cfg.kl.coefficient > 0 and self.cfg.kl.place == "reward"
        if "token_rewards" in columns:
            placed = columns["token_rewards"] + place_outcome(columns["rewards"] - raw, ends)
        elif in_reward:
            placed = place_outcome(columns["rewards"], ends)
        else:
            return None
        if not in_reward:
            return placed
        return kl_in_reward(placed, columns["old_log_probs"], columns["ref_log_probs"], columns["mask"],
                            kl_coef=self.steering.kl_coefficient, estimator=self.cfg.kl.estimator,
                            options=self.cfg.kl.options)

    def advantages(self, batch: TensorDict) -> Tensor:
        """Advantage of every response token of the whole batch, ragged like `response_ids`."""
        return self.advantages_and_returns(batch)[0]

    def advantages_and_returns(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """Also the return of every token, which a critic learns."""
        columns = self.steering.with_baseline(padded_columns(batch))
        result = compute_advantages(self.cfg.advantage.name, columns, self.advantage_options)
        advantages, returns = (unpadded(x.float(), like=batch["response_ids"]) for x in result)
        return advantages, returns

    def correct(self, batch: TensorDict) -> TensorDict:
        """The batch with `correction_weights` for the gap between rollout and training log-probs, if configured.

        Without a configured correction there is no such column: some losses then bring their own. Nor is there
        without `old_log_probs`: then the update computes both.
        """
        if self.corrections and "old_log_probs" in batch.keys():
            correction = correct(self.corrections, padded_columns(batch), self_normalise=self.cfg.self_normalise)
            batch["correction_weights"] = unpadded(correction.weights.float(), like=batch["response_ids"])
        return batch

    def mini_batches(self, batch: TensorDict, seed: int = 0) -> Iterator[TensorDict]:
        """The batch cut into `mini_batches` parts, `epochs` times over, each with what its loss needs.

        The responses to one prompt stay together; with more than one part, prompts are shuffled by `seed`.
        Everything that counts tokens or rows of the mini-batch is computed here, on all of its rows, so that
        the loss does not depend on how workers cut it further. `loss` is that of the part that was drawn last.
        """
        require(batch, "group_ids")
        order = torch.Generator().manual_seed(seed)
        for _ in range(self.cfg.epochs):
            for part in self._parts(batch, order):
                prepared = self._prepared(part)
                yield prepared
                self.steering.after_update()

    def _parts(self, batch: TensorDict, order: torch.Generator) -> Iterator[TensorDict]:
        if self.cfg.mini_batches == 1:
            yield rows_at(batch, slice(None))
            return
        groups = list(dict.fromkeys(batch["group_ids"].tolist()))
        shuffled = [groups[i] for i in torch.randperm(len(groups), generator=order).tolist()]
        start = 0
        for size in split_sizes(len(shuffled), self.cfg.mini_batches):
            wanted = set(shuffled[start:start + size])
            start += size
            rows = [i for i, group in enumerate(batch["group_ids"].tolist()) if group in wanted]
            if rows:
                yield rows_at(batch, rows)

    def _prepared(self, mini_batch: TensorDict) -> TensorDict:
        columns = padded_columns(mini_batch)
        self.steering.before_update(columns)
        made = {"loss_weights": loss_weights(self.cfg.aggregation, columns, self.aggregation_options)}
        columns = anchored(columns, self.cfg.anchor) if "old_log_probs" in columns else columns
        made |= POLICY_LOSSES.prepare(self.cfg.loss.name, self.cfg.loss.options, columns)
        for choice in self.cfg.keep_masks:
            if "step" not in KEEP_MASKS[choice.name].traits:
                keep = KEEP_MASKS.call(choice.name, choice.options, columns)
                weights = made.get("correction_weights", columns.get("correction_weights"))
                made["correction_weights"] = keep.float() if weights is None else select(weights, keep)
        for name, value in made.items():
            ragged = value.dim() == 2 and value.shape == columns["mask"].shape
            mini_batch.set(name, unpadded(value, like=mini_batch["response_ids"]) if ragged else value)
        assert num_rows(mini_batch) == len(columns["mask"]), "preparing a mini-batch must keep its rows"
        return mini_batch

    @property
    def loss(self) -> Loss:
        """The loss of the mini-batch that was drawn last: its coefficients may move from one to the next."""
        cfg, in_loss = self.cfg, self.cfg.kl.coefficient > 0 and self.cfg.kl.place == "loss"
        masks = {KEEP_MASKS[choice.name]: choice.options for choice in cfg.keep_masks}
        return Loss(
            POLICY_LOSSES[cfg.loss.name], cfg.loss.options, cfg.anchor,
            step_masks={entry: options for entry, options in masks.items() if "step" in entry.traits},
            kl=KL_ESTIMATORS[cfg.kl.estimator] if in_loss else None, kl_options=cfg.kl.options,
            kl_coefficient=self.steering.kl_coefficient, entropy_coefficient=self.steering.entropy_coefficient,
            measures_entropy=cfg.entropy.measure,
            corrections={CORRECTIONS[name]: options for name, options in self.corrections.items()},
            diagnoses=serves_one_update(cfg), ratio_bounds=self._ratio_bounds())

    def _ratio_bounds(self) -> tuple[float, float]:
        """Those of the first correction that bounds single tokens, for the metrics."""
        for name, options in self.corrections.items():
            built = CORRECTIONS.options(name, options)
            if "token" in CORRECTIONS[name].traits and hasattr(built, "lo"):
                return built.lo, math.inf if built.hi is None else built.hi
        return 0.0, 2.0

    # ---- metrics and state

    def describe(self, batch: TensorDict, version: int | None = None) -> dict[str, float]:
        """`batch_metrics` of a finished batch, and the coefficients it was trained with.

        Args:
            version: of the weights that were trained, from which `staleness/...` counts; None leaves that out.
        """
        return self.steering.metrics | batch_metrics(
            batch, version=version, max_response_tokens=self.max_response_tokens, bounds=self._ratio_bounds())

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold, as JSON values."""
        return self.steering.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.steering.load_state_dict(state)


def _corrections(cfg: AlgorithmConfig) -> dict[str, Any]:
    """Options of each chosen correction; without any, those of a loss that brings its own."""
    loss = POLICY_LOSSES.options(cfg.loss.name, cfg.loss.options)
    if not cfg.corrections and hasattr(loss, "behaviour_cap"):
        return {"token_tis": {"hi": loss.behaviour_cap}}
    return {choice.name: choice.options for choice in cfg.corrections}


def _with_weights(cfg: AlgorithmConfig, reward_weights: Sequence[float]) -> dict[str, Any]:
    """The advantage's options, with the rewards' weights where it takes some and has none.

    Raises ConfigError for another number of weights than there are rewards.
    """
    options = dict(cfg.advantage.options)
    takes = {field.name for field in dataclasses.fields(ADVANTAGES[cfg.advantage.name].options)}
    if "weights" not in takes or not reward_weights:
        return options
    if options.get("weights") is None:
        options["weights"] = list(reward_weights)
    if len(options["weights"]) != len(reward_weights):
        raise ConfigError(f"algorithm.advantage.options.weights must have one number for each part of the reward "
                          f"({len(reward_weights)}), got {options['weights']}.")
    return options
