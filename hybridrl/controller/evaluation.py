"""Held-out problems, answered on the rollout engine and scored."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from hybridrl.algorithms.evaluation import avg_at_k, bootstrap_interval, maj_at_k, pass_at_k
from hybridrl.batch import num_rows, repeat, require, select
from hybridrl.controller.run_folder import LineFile
from hybridrl.controller.samples import evenly, samples_of
from hybridrl.data import PromptSet, row_seeds
from hybridrl.rewards.numbers import final_number_text

SEED_STEP = -1
"""Step under which evaluation draws its sampling seeds: training steps count from 1, so none is shared."""
OWN = "data"
"""What files and results call the suite of the recipe's own problems."""
FIRST_GROUP = 2**31
"""First of the `group_ids` of evaluation, from which environments make up tasks: training counts from 0."""
CORRECT = 1.0
"""A response whose reward is at least this solved its problem."""

Responder = Callable[[TensorDict, float | None], TensorDict]
"""Answers a batch at a temperature and scores the answers: `partial(respond, policy, rewards)`, or with an environment
`partial(play, policy)`."""
Scores = list[tuple[float, str]]
"""Reward and vote of each scored response to a problem."""


def respond(policy: Any, rewards: Any, batch: TensorDict, temperature: float | None = None) -> TensorDict:
    """One response a row, scored by reward functions."""
    return rewards(policy.generate(batch, temperature))


def answer(responder: Responder, problems: PromptSet, samples: int, seed: int, limit: int = 0,
           temperature: float | None = None) -> TensorDict:
    """Scored responses, `samples` to each of the first `limit` problems (0: all), rows of a problem together.

    The same problems and seed give the same sampling seeds, whatever training did before.
    """
    count = min(limit, len(problems)) if limit else len(problems)
    batch = repeat(problems.batch(range(count), FIRST_GROUP), samples)
    batch["seeds"] = row_seeds(seed, SEED_STEP, num_rows(batch))
    return responder(batch, temperature)


@dataclass(frozen=True, slots=True)
class Plan:
    """How problems are answered: `samples` responses to each of the first `limit` (0: all) at `temperature` (None: that
    of the rollout engine), with `greedy` the likeliest one, too; `ks` are the k of avg@k, pass@k and maj@k."""

    samples: int
    ks: Sequence[int]
    limit: int
    temperature: float | None
    greedy: bool
    seed: int


@dataclass(frozen=True, slots=True)
class Suite:
    """Named problems, what answers and scores them, and what differs from the plan for all; None and 0 leave that."""

    name: str
    problems: PromptSet
    responder: Responder | None = None
    samples: int = 0
    ks: Sequence[int] = ()
    limit: int = 0

    def answer(self, plan: Plan, responder: Responder) -> "Answers":
        """Answer and score the problems, with `responder` unless the suite has its own."""
        responder, samples = self.responder or responder, self.samples or plan.samples
        limit = self.limit or plan.limit
        sampled = answer(responder, self.problems, samples, plan.seed, limit, plan.temperature)
        greedy = answer(responder, self.problems, 1, plan.seed, limit, 0.0) if plan.greedy else None
        return Answers(sampled, greedy, self.ks or plan.ks, plan.seed)


@dataclass(frozen=True, slots=True)
class Answers:
    """The scored responses to a suite: `sampled` ones, and the likeliest to each problem if that was asked for."""

    sampled: TensorDict
    greedy: TensorDict | None
    ks: Sequence[int]
    seed: int

    @property
    def metrics(self) -> dict[str, float]:
        """`evaluation_metrics` of the sampled responses, and of the likeliest ones as `greedy/...`."""
        metrics = evaluation_metrics(self.sampled, self.ks, self.seed)
        if self.greedy is not None:
            greedy = evaluation_metrics(self.greedy, (), self.seed)
            metrics |= {f"greedy/{name}": value for name, value in greedy.items()}
        return metrics

    def samples(self, step: int, suite: str, wanted: int | None = None) -> Iterator[str]:
        """Lines of `samples.jsonl` with the responses, `wanted` of each kind (None: all)."""
        for batch in filter(lambda batch: batch is not None, (self.sampled, self.greedy)):
            rows = num_rows(batch)
            for sample in samples_of(step, batch, range(rows) if wanted is None else evenly(rows, wanted)):
                sample |= {"suite": suite, "greedy": batch is self.greedy}
                yield json.dumps(sample, default=str, ensure_ascii=False)


class Evaluation:
    """Metrics `eval/...` on held-out problems: before the first step, after the last, and every `trainer.eval_every`.

    Training is the same whether it is evaluated or not: neither its data nor its sampling seeds depend on it.

    Args:
        cfg: a recipe's options, with `trainer` and `seed`.
        run: counts the seconds; its folder gets `eval_samples.jsonl`, `trainer.save_samples` responses of each suite.
        responder: answers and scores.
        suites: of `eval_data`, which has no name, for `eval/accuracy` and the like, of others for
            `eval/<suite>/accuracy`; none turn evaluation off.
    """

    def __init__(self, cfg: Any, run: Any, responder: Responder, suites: Sequence[Suite]):
        trainer = cfg.trainer
        self.trainer, self.run, self.responder, self.suites = trainer, run, responder, suites
        self.plan = Plan(trainer.eval_samples, trainer.eval_k, trainer.eval_prompts, trainer.eval_temperature,
                         trainer.eval_greedy, cfg.seed)

    def __call__(self, step: int) -> dict[str, float]:
        """The metrics of a step; empty when it is not due, or there is nothing to evaluate on."""
        last, every = self.trainer.steps, self.trainer.eval_every
        due = step in (0, last) or every and step % every == 0
        metrics: dict[str, float] = {}
        samples: list[str] = []
        for suite in self.suites if due else ():
            with self.run.phase("evaluate"):
                answers = suite.answer(self.plan, self.responder)
            prefix = f"eval/{suite.name}/" if suite.name else "eval/"
            metrics |= {f"{prefix}{name}": value for name, value in answers.metrics.items()}
            samples += answers.samples(step, suite.name or OWN, self.trainer.save_samples)
        if samples:
            self._write(step, samples)
        return metrics

    def _write(self, step: int, samples: Iterable[str]) -> None:
        lines = LineFile(self.run.dir / "eval_samples.jsonl")
        lines.cut(step - 1)  # of a session that went further before this one resumed
        for sample in samples:
            lines.write(sample)
        lines.close()


def one_row_each(batch: TensorDict) -> TensorDict:
    """The last row of each trajectory; all rows of a batch that was not played in an environment."""
    if "trajectory_ids" not in batch.keys():
        return batch
    last = {trajectory: row for row, trajectory in enumerate(batch["trajectory_ids"].tolist())}
    return select(batch, list(last.values()))


def evaluation_metrics(batch: TensorDict, ks: Sequence[int] = (), seed: int = 0) -> dict[str, float]:
    """Scores averaged over problems, each with the ends of its 95% interval as `<name>_low` and `<name>_high`.

    accuracy is the mean reward of a problem's scored responses. pass@1, and avg@k, pass@k and maj@k for each k, are of
    the problems with at least k scored responses: a response is correct when its reward is at least 1; avg@k is the
    mean reward; maj@k votes with the final number of the response, of an episode that of its last action, or the text
    where it has none. A score that no problem has, and the interval of fewer than two problems, is NaN. Also:
    problems, responses, unscored.

    Args:
        batch: `rewards`, `group_ids` and `response` of whole groups. Of a trajectory that is several rows, the last
            counts.
        seed: of the intervals, see `bootstrap_interval`.
    """
    require(batch, "rewards", "group_ids", "response")
    batch = one_row_each(batch)
    groups = scores_by_problem(batch)
    metrics = _with_interval("accuracy", [_avg(scores, 1) for scores in groups if scores], seed)
    for k in sorted({1, *ks}):
        enough = [scores for scores in groups if len(scores) >= k]
        for name, score in (("avg", _avg), ("pass", _pass), ("maj", _maj)):
            if k > 1 or name == "pass":  # avg@1 is the accuracy, maj@1 is pass@1
                metrics |= _with_interval(f"{name}@{k}", [score(scores, k) for scores in enough], seed)
    failed = sum(math.isnan(reward) for reward in batch["rewards"].tolist())
    return metrics | {"problems": len(groups), "responses": num_rows(batch), "unscored": failed}


def scores_by_problem(batch: TensorDict) -> list[Scores]:
    """The scored responses of each group, in order of the groups' first rows."""
    groups: dict[int, Scores] = {}
    said = list(batch["response"])
    if "turns" in batch.keys():  # an episode's answer is what was said last, not what the environment showed
        said = [turns[-1]["action"] if turns else text for turns, text in zip(batch["turns"], said, strict=True)]
    rows = zip(batch["group_ids"].tolist(), batch["rewards"].tolist(), said, strict=True)
    for group, reward, response in rows:
        scores = groups.setdefault(group, [])
        if not math.isnan(reward):
            scores.append((reward, final_number_text(response) or response.strip()))
    return list(groups.values())


def _with_interval(name: str, scores: list[float], seed: int) -> dict[str, float]:
    low, high = bootstrap_interval(scores, seed=seed)
    mean = sum(scores) / len(scores) if scores else math.nan
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def _avg(scores: Scores, k: int) -> float:
    return avg_at_k([reward for reward, _ in scores], k)


def _pass(scores: Scores, k: int) -> float:
    return pass_at_k(len(scores), sum(reward >= CORRECT for reward, _ in scores), k)


def _maj(scores: Scores, k: int) -> float:
    correct = [reward >= CORRECT for reward, _ in scores]
    # A scorer may judge two texts with one final number differently: then they are two answers.
    return maj_at_k([(text, right) for (_, text), right in zip(scores, correct, strict=True)], correct, k)
