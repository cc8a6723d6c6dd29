"""The reward functions that come with the library.

A reward function takes what it needs of `response`, `answer`, `prompt` and `task` by keyword, and its own options, and
returns a finite number. What it can't judge it raises: a failed row is left out of training, never scored 0. A response
without an answer is judged: it is wrong.
"""

import functools
import inspect
import json
import logging
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.rewards.numbers import final_number, final_number_text


def exact(response: str, answer: Any) -> float:
    """1 when the response is the answer, ends stripped, else 0."""
    return float(response.strip() == _given(answer).strip())


def numeric(response: str, answer: Any, *, tolerance: float = 1e-6) -> float:
    """1 when the response's final number is within `tolerance` (absolute) of the answer's, else 0.

    `final_number` says which number that is. Raises ValueError when the answer holds no number.
    """
    truth = final_number(_given(answer))
    if truth is None:
        raise ValueError(f"the reference answer {answer!r} holds no number")
    value = final_number(response)
    return float(value is not None and abs(value - truth) <= Fraction(tolerance))


def math_verify(response: str, answer: Any) -> float:
    """1 when math-verify finds the response's expression equal to the answer's, else 0.

    The answer is an expression in LaTeX, bare or delimited, or text that holds a delimited one.
    Raises ValueError when the answer is no expression. Source: github.com/huggingface/Math-Verify.
    """
    from math_verify import parse, verify

    # Its own time limits are off: they would turn a slow comparison into "wrong". It warns of that at each call.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    truth = _given(answer)
    # Of a bare "x^2 + 1" it would take the last number alone for the expression.
    delimited = any(mark in truth for mark in ("$", "\\boxed", "\\(", "\\["))
    gold = parse(truth if delimited else f"${truth}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify finds no expression in the reference answer {answer!r}")
    found = parse(response, parsing_timeout=None, raise_on_error=True)
    return float(verify(gold, found, timeout_seconds=None, raise_on_error=True))


def reasoning_gym(response: str, task: Any, *, extract: str = "none", allow_eval: bool = False) -> float:
    """The score of the reasoning-gym task's own scorer, usually from 0 to 1.

    Args:
        task: the task's entry: question, answer, metadata; and task_options where the task was given any.
        extract: the scorer wants the bare answer: `none` hands it the response stripped, `last_number` the final
            number, `tag:NAME` the text of the last <NAME>...</NAME>. A response without one scores 0.
        allow_eval: some scorers evaluate the answer as Python code, which a policy can exploit; they raise unless this
            is true or only numbers reach them.
    """
    if not isinstance(task, dict) or "source_dataset" not in task.get("metadata", {}):
        raise ValueError("the row's task is no reasoning-gym entry: use data.source=reasoning_gym")
    answer = extractor(extract)(response)
    if answer is None:
        return 0.0
    scorer = _scorer(task["metadata"]["source_dataset"], json.dumps(task.get("task_options", {})))
    if extract != "last_number" and not allow_eval and _evaluates(scorer):
        raise ValueError(f"the scorer of {task['metadata']['source_dataset']} runs the answer as Python code: "
                         "set the option allow_eval=true to accept that")
    return scorer(answer=answer, entry=task)


def extractor(extract: str) -> Callable[[str], str | None]:
    """The function that `extract` of `reasoning_gym` names. Raises ConfigError for another name."""
    if extract == "none":
        return str.strip
    if extract == "last_number":
        return final_number_text
    if isinstance(extract, str) and re.fullmatch(r"tag:\w+", extract):
        return functools.partial(_tagged, tag=extract.removeprefix("tag:"))
    raise ConfigError(f"reward option extract must be none, last_number or tag:NAME, got {extract!r}.")


def _tagged(response: str, tag: str) -> str | None:
    before, opening, rest = response.rpartition(f"<{tag}>")
    answer, closing, _ = rest.partition(f"</{tag}>")
    return answer.strip() if opening and closing else None


@functools.cache
def _scorer(name: str, options: str) -> Callable[..., float]:
    from reasoning_gym.factory import DATASETS

    dataset, config = DATASETS[name]
    return dataset(config=config(**json.loads(options))).score_answer


def _evaluates(scorer: Callable[..., float]) -> bool:
    return re.search(r"(?<!literal_)\b(eval|exec|parse_expr|sympify)\(", inspect.getsource(scorer)) is not None


def _given(answer: Any) -> str:
    if answer is None:
        raise ValueError("the row has no reference answer")
    return str(answer)


REWARDS: dict[str, Callable[..., float]] = {
    "exact": exact,
    "numeric": numeric,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
}
"""Reward functions by name; any other is named by its import path."""
