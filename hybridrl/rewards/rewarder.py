"""Scores batches: functions in processes that can be killed, a reward model and a judge in worker groups."""

import math
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from tensordict import TensorDict

from hybridrl.batch import num_rows, objects_of, put, require, rows_of
from hybridrl.config import RewardConfig
from hybridrl.errors import RewardError
from hybridrl.models import check_classifier, resolve_model
from hybridrl.rewards.binding import INPUTS, bind
from hybridrl.rewards.pool import Outcome, WorkerPool

LEARNED_INPUTS = ("prompt", "response", "answer", "prompt_ids", "response_ids", "seeds")
"""What the workers of a reward model and a judge read."""


class Rewarder:
    """Rewards for the responses of a batch; a context manager that ends its processes.

    The reward of a row is the weighted sum of its components: the score of each function, of the reward model and of
    the judge. A row on which one of them fails (raises, gives no finite number, runs longer than cfg.timeout_s, ends
    its process, says no verdict) has reward NaN and a reason, never 0.

    `components` names them, functions first; `weights` has their weights in that order. `groups` holds the worker
    groups that score for `model` and `judge`, each with a method `score(batch)` that returns the columns `scores` and
    `score_errors`; a loop sets it once they run: `rewards.groups = reward_groups(...)`.

    `metrics` describes the last batch: reward/failed and reward/timed_out in rows (the second is part of the first),
    time/reward_workers in seconds, reward/<name>_failed in rows for model and judge, and with several components the
    mean score of each over the scored rows, reward/<name>.

    Raises ConfigError: an unknown function or option, an import that fails. ModelError: the reward model's folder is
    none of a sequence classifier with one label, the judge's none of a model. No process starts before the first batch.
    """

    def __init__(self, cfg: RewardConfig):
        self._functions = [bind(function.name, function.options) for function in cfg.functions]
        self._inputs = [name for name in INPUTS if any(name in function.inputs for function in self._functions)]
        self._pool = WorkerPool([(f.name, f.options) for f in self._functions], cfg.workers, cfg.timeout_s)
        self._learned = list(cfg.learned)
        folders = {name: resolve_model(part.path) for name, part in cfg.learned.items()}
        if "model" in folders:
            check_classifier(folders["model"])
        self.components = _numbered([*(f.name.rpartition(":")[2] for f in cfg.functions), *self._learned])
        self.weights = [*(f.weight for f in cfg.functions), *(part.weight for part in cfg.learned.values())]
        self.groups: Mapping[str, Any] = {}
        self.metrics: dict[str, float] = {}

    def __enter__(self) -> "Rewarder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all reward processes."""
        self._pool.close()

    def __call__(self, batch: TensorDict) -> TensorDict:
        """The batch with `rewards` [B] float32, `reward_error` and `reward_components` [B, K] float32, unweighted.

        With several components also a column reward/<name> [B] of each. A row without a reward is NaN in all of them.

        Raises BatchError when a column that a function takes is missing, RewardError when every row fails or when a
        configured model or judge has no group.
        """
        start = time.monotonic()
        require(batch, *self._inputs)
        missing = [name for name in self._learned if name not in self.groups]
        if missing:
            raise RewardError(f"reward.{missing[0]} has no worker group: set rewards.groups = reward_groups(...).")
        asked = _columns(batch, LEARNED_INPUTS)
        started = [self.groups[name].score.future(asked) for name in self._learned]
        columns = {name: rows_of(batch[name]) for name in self._inputs}
        rows = [{name: column[i] for name, column in columns.items()} for i in range(num_rows(batch))]
        outcomes = self._pool.run(rows) if self._functions else [Outcome() for _ in rows]
        self.metrics = {"reward/failed": 0, "reward/timed_out": sum(outcome.timed_out for outcome in outcomes)}
        for name, label, future in zip(self._learned, self.components[len(self._functions):], started, strict=True):
            self._join(name, label, outcomes, future.result())
        failed = [outcome for outcome in outcomes if outcome.error]
        if failed and len(failed) == len(outcomes):
            raise RewardError(f"none of {len(outcomes)} responses could be scored; the first: {failed[0].error}")
        self.metrics["reward/failed"] = len(failed)
        scored = self._with_scores(batch, outcomes)
        self.metrics["time/reward_workers"] = time.monotonic() - start
        return scored

    def _join(self, name: str, label: str, outcomes: list[Outcome], scored: TensorDict) -> None:
        """Add the scores of the reward model or the judge to what became of the rows."""
        errors = objects_of(scored, "score_errors")
        self.metrics[f"reward/{label}_failed"] = sum(error is not None for error in errors)
        for outcome, score, error in zip(outcomes, scored["scores"].tolist(), errors, strict=True):
            outcome.scores.append(score)
            if error and not outcome.error:
                outcome.error = f"{name}: {error}"

    def _with_scores(self, batch: TensorDict, outcomes: list[Outcome]) -> TensorDict:
        """A shallow copy of the batch with the columns of rewards; a failed row has NaN in all of them."""
        scored = batch.copy()
        nothing = [math.nan] * len(self.components)
        scores = [nothing if outcome.error else outcome.scores for outcome in outcomes]
        put(scored, "rewards", [math.fsum(map(math.prod, zip(self.weights, row, strict=True))) for row in scores])
        put(scored, "reward_error", [outcome.error for outcome in outcomes])
        components = torch.tensor(scores, dtype=torch.float32).view(len(scores), len(self.components))
        put(scored, "reward_components", components)
        if len(self.components) > 1:
            for i, name in enumerate(self.components):
                put(scored, f"reward/{name}", components[:, i])
                if outcomes:
                    self.metrics[f"reward/{name}"] = float(components[:, i].nanmean())
        return scored


def _columns(batch: TensorDict, names: Sequence[str]) -> TensorDict:
    """The named columns, as far as the batch has them."""
    part = TensorDict({}, batch_size=[num_rows(batch)])
    for name in names:
        if name in batch.keys():
            part.set(name, batch.get(name))
    return part


def _numbered(names: list[str]) -> list[str]:
    """Names of the components, numbered where one comes twice."""
    return [name + (f"_{i + 1}" if names.count(name) > 1 else "") for i, name in enumerate(names)]
