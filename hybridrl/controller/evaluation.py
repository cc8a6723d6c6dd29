"""Held-out problems, answered on the rollout engine and scored."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from hybridrl.algorithms.evaluation import avg_at_k, maj_at_k, pass_at_k
from hybridrl.batch import num_rows, repeat, require, select
from hybridrl.data import PromptSet, row_seeds
from hybridrl.rewards.numbers import final_number_text

SEED_STEP = -1
"""Step under which evaluation draws its sampling seeds: training steps count from 1, so none is shared."""
CORRECT = 1.0
"""A response whose reward is at least this solved its problem."""


Responder = Callable[[TensorDict, float | None], TensorDict]
"""Answers a batch at a temperature and scores the answers: `partial(respond, policy, rewards)`, or with an environment
`partial(play, policy)`."""


def respond(policy: Any, rewards: Any, batch: TensorDict, temperature: float | None = None) -> TensorDict:
    """One response a row, scored by reward functions."""
    return rewards(policy.generate(batch, temperature))


def answer(responder: Responder, problems: PromptSet, samples: int, seed: int, limit: int = 0,
           temperature: float | None = None) -> TensorDict:
    """Scored responses, `samples` to each of the first `limit` problems (0: all), rows of a problem together.

    The same problems and seed give the same sampling seeds, whatever training did before.
    """
    count = min(limit, len(problems)) if limit else len(problems)
    batch = repeat(problems.batch(range(count)), samples)
    batch["seeds"] = row_seeds(seed, SEED_STEP, num_rows(batch))
    return responder(batch, temperature)


class Evaluation:
    """`eval/accuracy` on held-out problems: before the first step, after the last, and every `trainer.eval_every`.

    Args:
        cfg: a recipe's options, with `trainer` and `seed`.
        run: counts the seconds. responder: answers and scores.
        problems: None turns evaluation off.
    """

    def __init__(self, cfg: Any, run: Any, responder: Responder, problems: PromptSet | None):
        self.cfg, self.run, self.responder, self.problems = cfg, run, responder, problems

    def __call__(self, step: int) -> dict[str, float]:
        """The metrics of a step; empty when it is not due."""
        trainer = self.cfg.trainer
        due = step in (0, trainer.steps) or trainer.eval_every and step % trainer.eval_every == 0
        if self.problems is None or not due:
            return {}
        with self.run.phase("evaluate"):
            batch = answer(self.responder, self.problems, trainer.eval_samples, self.cfg.seed,
                           trainer.eval_prompts, trainer.eval_temperature)
        return {"eval/accuracy": accuracy(batch)}


def accuracy(batch: TensorDict) -> float:
    """Mean reward of the scored responses or trajectories; NaN when none could be scored."""
    return float(torch.nanmean(one_row_each(batch)["rewards"].double()))


def one_row_each(batch: TensorDict) -> TensorDict:
    """The last row of each trajectory; all rows of a batch that was not played in an environment."""
    if "trajectory_ids" not in batch.keys():
        return batch
    last = {trajectory: row for row, trajectory in enumerate(batch["trajectory_ids"].tolist())}
    return select(batch, list(last.values()))


def evaluation_metrics(batch: TensorDict, ks: Sequence[int]) -> dict[str, float]:
    """pass@1, and avg@k, pass@k and maj@k for each k, averaged over problems with at least k scored responses.

    A response is correct when its reward is at least 1; avg@k is the mean reward. maj@k votes with the response's
    final number, or its text where it has none.

    Args:
        batch: `rewards`, `group_ids` and `response` of whole groups. Of a trajectory that is several rows, the last
            counts.
    """
    require(batch, "rewards", "group_ids", "response")
    batch = one_row_each(batch)
    groups: dict[int, list[tuple[float, str]]] = {}
    rows = zip(batch["group_ids"].tolist(), batch["rewards"].tolist(), batch["response"], strict=True)
    for group, reward, response in rows:
        groups.setdefault(group, [])
        if not math.isnan(reward):
            groups[group].append((reward, final_number_text(response) or response.strip()))
    metrics = {}
    for k in sorted({1, *ks}):
        scored = [members for members in groups.values() if len(members) >= k]
        for name, score in (("avg", _avg), ("pass", _pass), ("maj", _maj)):
            if k > 1 or name == "pass":  # with one response the three are the same
                metrics[f"{name}@{k}"] = sum(score(m, k) for m in scored) / len(scored) if scored else math.nan
    failed = sum(math.isnan(reward) for reward in batch["rewards"].tolist())
    return metrics | {"problems": len(groups), "responses": num_rows(batch), "unscored": failed}


def _avg(members: list[tuple[float, str]], k: int) -> float:
    return avg_at_k([reward for reward, _ in members], k)


def _pass(members: list[tuple[float, str]], k: int) -> float:
    return pass_at_k(len(members), sum(reward >= CORRECT for reward, _ in members), k)


def _maj(members: list[tuple[float, str]], k: int) -> float:
    correct = [reward >= CORRECT for reward, _ in members]
    # A scorer may judge two texts with one final number differently: then they are two answers.
    return maj_at_k([(text, right) for (_, text), right in zip(members, correct, strict=True)], correct, k)
