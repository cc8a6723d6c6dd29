"""Scores batches: each row through every configured reward function, in processes that can be killed."""

import math
import time
from types import TracebackType

import torch
from tensordict import TensorDict

from hybridrl.batch import num_rows, put, require, rows_of
from hybridrl.config import RewardConfig
from hybridrl.errors import RewardError
from hybridrl.rewards.binding import INPUTS, bind
from hybridrl.rewards.pool import Outcome, WorkerPool


class Rewarder:
    """Rewards for the responses of a batch; a context manager that ends its processes.

    The reward of a row is the weighted sum of its functions' scores. A row on which a function fails (raises, returns
    no finite number, runs longer than cfg.timeout_s or ends its process) has reward NaN and a reason, never 0.

    `metrics` describes the last batch: reward/failed and reward/timed_out in rows (the second is part of the first),
    time/reward_workers in seconds, and with several functions the mean score of each over the scored rows,
    reward/<function>.

    Raises ConfigError: an unknown function or option, an import that fails. No process starts before the first batch.
    """

    def __init__(self, cfg: RewardConfig):
        self._functions = [bind(function.name, function.options) for function in cfg.functions]
        self.weights = [function.weight for function in cfg.functions]
        self._labels = _labels([function.name for function in cfg.functions])
        self._inputs = [name for name in INPUTS if any(name in function.inputs for function in self._functions)]
        self._pool = WorkerPool([(f.name, f.options) for f in self._functions], cfg.workers, cfg.timeout_s)
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

        With several functions also a column reward/<function> [B] of each. A row without a reward has NaN in all.

        Raises BatchError when a column that a function takes is missing, RewardError when every row fails.
        """
        start = time.monotonic()
        require(batch, *self._inputs)
        columns = {name: rows_of(batch[name]) for name in self._inputs}
        rows = [{name: column[i] for name, column in columns.items()} for i in range(num_rows(batch))]
        outcomes = self._pool.run(rows)
        failed = [outcome for outcome in outcomes if outcome.error]
        if failed and len(failed) == len(outcomes):
            raise RewardError(f"none of {len(outcomes)} responses could be scored; the first: {failed[0].error}")
        self.metrics = {"reward/failed": len(failed), "reward/timed_out": sum(o.timed_out for o in failed)}
        scored = self._with_scores(batch, outcomes)
        self.metrics["time/reward_workers"] = time.monotonic() - start
        return scored

    def _with_scores(self, batch: TensorDict, outcomes: list[Outcome]) -> TensorDict:
        """A shallow copy of the batch with the columns of rewards; a failed row has NaN in all of them."""
        scored = batch.copy()
        nothing = [math.nan] * len(self._functions)
        scores = [nothing if outcome.error else outcome.scores for outcome in outcomes]
        put(scored, "rewards", [math.fsum(map(math.prod, zip(self.weights, row, strict=True))) for row in scores])
        put(scored, "reward_error", [outcome.error for outcome in outcomes])
        components = torch.tensor(scores, dtype=torch.float32).view(len(scores), len(self._functions))
        put(scored, "reward_components", components)
        if len(self._functions) > 1:
            for i, label in enumerate(self._labels):
                put(scored, label, components[:, i])
                if outcomes:
                    self.metrics[label] = float(components[:, i].nanmean())
        return scored


def _labels(names: list[str]) -> list[str]:
    """Column names of the functions: reward/<function>, numbered where a function is used twice."""
    bare = [name.rpartition(":")[2] for name in names]
    return [f"reward/{name}" + (f"_{i + 1}" if bare.count(name) > 1 else "") for i, name in enumerate(bare)]
