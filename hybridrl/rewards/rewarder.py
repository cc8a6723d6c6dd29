"""Scores batches: functions in processes that can be killed, a reward model and a judge in worker groups."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from tensordict import TensorDict

from hybridrl.batch import num_rows, objects_of, put, require, rows_of, select
from hybridrl.config import RewardConfig
from hybridrl.errors import RewardError
from hybridrl.models import check_classifier, resolve_model
from hybridrl.rewards.binding import INPUTS, bind
from hybridrl.rewards.cache import ScoreCache, content_key
from hybridrl.rewards.pool import Outcome, WorkerPool

LEARNED_INPUTS = ("prompt", "response", "answer", "prompt_ids", "response_ids", "seeds")
"""What the workers of a reward model and a judge read."""
CONTENTS = {"model": ("prompt", "response", "prompt_ids", "response_ids"), "judge": ("prompt", "response", "answer")}
"""Of these, what their scores depend on."""


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
    mean score of each over the scored rows, reward/<name>. With cfg.cache also cache/reward_<part>: rows whose score is
    that of an equal row, in this batch or one before.

    Raises ConfigError: an unknown function or option, an import that fails. ModelError: the reward model's folder is
    none of a sequence classifier with one label, the judge's none of a model. No process starts before the first batch.
    """

    def __init__(self, cfg: RewardConfig):
        self._functions = [bind(function.name, function.options) for function in cfg.functions]
        self._inputs = [name for name in INPUTS if any(name in function.inputs for function in self._functions)]
        self._pool = WorkerPool([(f.name, f.options) for f in self._functions], cfg.workers, cfg.timeout_s)
        self._learned = list(cfg.learned)
        self._caches = {part: ScoreCache(cfg.cache_size) for part in cfg.cache}
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
        self.metrics = {}
        finish = [self._start(part, batch) for part in self._learned]
        outcomes = self._start("functions", batch)() if self._functions else [Outcome() for _ in range(num_rows(batch))]
        self.metrics["reward/timed_out"] = sum(outcome.timed_out for outcome in outcomes)
        for part, label, result in zip(self._learned, self.components[len(self._functions):], finish, strict=True):
            self._join(part, label, outcomes, result())
        failed = [outcome for outcome in outcomes if outcome.error]
        if failed and len(failed) == len(outcomes):
            raise RewardError(f"none of {len(outcomes)} responses could be scored; the first: {failed[0].error}")
        self.metrics["reward/failed"] = len(failed)
        scored = self._with_scores(batch, outcomes)
        self.metrics["time/reward_workers"] = time.monotonic() - start
        return scored

    def _start(self, part: str, batch: TensorDict) -> Callable[[], list[Outcome]]:
        """Begin to score a batch by one part of the reward; what is returned waits for the outcome of each row."""
        batch = _columns(batch, self._inputs if part == "functions" else LEARNED_INPUTS)
        if part not in self._caches:
            return self._ask(part, batch)
        cache, keys = self._caches[part], _keys(batch, CONTENTS.get(part, self._inputs))
        rows = cache.unknown(keys)
        first = self._ask(part, select(batch, rows))

        def finish() -> list[Outcome]:
            outcomes = cache.complete(keys, dict(zip(rows, first(), strict=True)))
            again = [row for row, outcome in enumerate(outcomes) if outcome is None]
            self.metrics[f"cache/reward_{part}"] = len(keys) - len(rows) - len(again)
            tried = dict(zip(again, self._ask(part, select(batch, again))(), strict=True))
            cache.complete(keys, tried)
            return [outcome or tried[row] for row, outcome in enumerate(outcomes)]

        return finish

    def _ask(self, part: str, batch: TensorDict) -> Callable[[], list[Outcome]]:
        """Begin to score every row; what is returned waits for their outcomes."""
        if not num_rows(batch):
            return list
        if part == "functions":
            columns = {name: rows_of(batch[name]) for name in self._inputs}
            rows = [{name: column[i] for name, column in columns.items()} for i in range(num_rows(batch))]
            return partial(self._pool.run, rows)
        future = self.groups[part].score.future(batch)
        return lambda: _outcomes(future.result())

    def _join(self, part: str, label: str, outcomes: list[Outcome], found: list[Outcome]) -> None:
        """Add the scores of the reward model or the judge to what became of the rows."""
        self.metrics[f"reward/{label}_failed"] = sum(outcome.error is not None for outcome in found)
        for outcome, more in zip(outcomes, found, strict=True):
            outcome.scores += more.scores
            if more.error and not outcome.error:
                outcome.error = f"{part}: {more.error}"

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


def _outcomes(scored: TensorDict) -> list[Outcome]:
    """What a worker group said of each row."""
    return [Outcome([score], error) for score, error in
            zip(scored["scores"].tolist(), objects_of(scored, "score_errors"), strict=True)]


def _keys(batch: TensorDict, names: Iterable[str]) -> list[bytes | None]:
    """A key of each row's content in the named columns, as far as the batch has them."""
    columns = [[ids.tolist() for ids in rows_of(batch[name])] if isinstance(batch[name], torch.Tensor) else
               objects_of(batch, name) for name in names if name in batch.keys()]
    return [content_key(row) for row in zip(*columns, strict=True)]


def _numbered(names: list[str]) -> list[str]:
    """Names of the components, numbered where one comes twice."""
    return [name + (f"_{i + 1}" if names.count(name) > 1 else "") for i, name in enumerate(names)]
