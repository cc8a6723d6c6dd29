"""Scores of n sampled answers to one question: pass@k, avg@k, maj@k, each exact over all k-subsets.

And how well their mean over questions is known: `bootstrap_interval`.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from math import comb, nan

import numpy as np
import torch
from torch import Tensor

from hybridrl.errors import ConfigError

RESAMPLES = 2000
"""Resamples of a bootstrap interval: its ends move by a few percent of its width from seed to seed."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n responses, c of them correct, contain a correct one: 1 - C(n-c, k) / C(n, k).

    Raises:
        ConfigError: not 0 <= c <= n or not 1 <= k <= n.
    Source: the unbiased estimator of arXiv:2107.03374.
    """
    if not 0 <= c <= n:
        raise ConfigError(f"c must be in [0, n = {n}], got {c}.")
    _check_k(k, n)
    return 1 - comb(n - c, k) / comb(n, k)


def choose_ratio(a: Tensor, b: Tensor, k: int) -> Tensor:
    """C(a, k) / C(b, k) for integer-valued float64 tensors, a <= b; 0 where a < k."""
    possible = a >= k
    top, bottom = torch.where(possible, a, float(k)), torch.where(possible, b, float(k))
    logs = (top + 1).lgamma() - (top - k + 1).lgamma() - (bottom + 1).lgamma() + (bottom - k + 1).lgamma()
    # Equal counts must give exactly 1, or an unsolved group would have a tiny spread instead of none.
    return torch.where(possible, torch.where(top == bottom, 1.0, logs.exp()), 0.0)


def pass_at_k_tensor(n: Tensor, c: Tensor, k: int) -> Tensor:
    """`pass_at_k` of tensors of counts, float64; meaningless where n < k."""
    return 1 - choose_ratio(n.double() - c.double(), n.double(), k)


def avg_at_k(scores: Sequence[float], k: int) -> float:
    """Expected mean score of k of the n responses: the mean of all.

    Raises:
        ConfigError: not 1 <= k <= n.
    """
    _check_k(k, len(scores))
    return sum(scores) / len(scores)


def maj_at_k(answers: Sequence[Hashable], correct: Sequence[bool], k: int) -> float:
    """Probability that the most frequent answer among k of the n responses is correct; ties draw lots.

    Equal answers must be equally correct. None (no answer found) counts as an answer.

    Args:
        answers: n extracted answers. correct: n flags.
    Raises:
        ConfigError: lengths differ, equal answers disagree on correctness, or not 1 <= k <= n.
    """
    if len(answers) != len(correct):
        raise ConfigError(f"answers and correct must be as long, got {len(answers)} and {len(correct)}.")
    _check_k(k, len(answers))
    right: dict[Hashable, bool] = {}
    for answer, flag in zip(answers, correct, strict=True):
        if right.setdefault(answer, bool(flag)) != bool(flag):
            raise ConfigError(f"equal answers must be equally correct, got both for {answer!r}.")
    classes = [(count, right[answer]) for answer, count in Counter(answers).items()]
    largest = min(k, max(count for count, _ in classes))
    credit = sum(_majority_credit(classes, k, votes) for votes in range(1, largest + 1))
    return credit / comb(len(answers), k)


def _majority_credit(classes: list[tuple[int, bool]], k: int, votes: int) -> float:
    """Sum over k-subsets whose most frequent answers have `votes` votes of the share of them that is correct."""
    # states: (answers drawn, classes at the top, correct classes at the top) -> number of subsets
    states: dict[tuple[int, int, int], int] = {(0, 0, 0): 1}
    for count, is_right in classes:
        grown: Counter[tuple[int, int, int]] = Counter()
        for (drawn, top, right), ways in states.items():
            for take in range(min(count, votes, k - drawn) + 1):
                wins = take == votes
                grown[drawn + take, top + wins, right + (wins and is_right)] += ways * comb(count, take)
        states = dict(grown)
    return sum(ways * right / top for (drawn, top, right), ways in states.items() if drawn == k and top)


def bootstrap_interval(scores: Sequence[float], level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of n scores, one a question; (NaN, NaN) for fewer than two.

    Questions are drawn n times with replacement, RESAMPLES times over; the ends are the (1 - level) / 2 and
    (1 + level) / 2 quantiles of the means. The responses to a question stay together, for they are not independent.

    Raises:
        ConfigError: not 0 < level < 1, or a score that is not finite.
    Source: Efron, Tibshirani, "An Introduction to the Bootstrap", 1993, section 13.3.
    """
    if not 0 < level < 1:
        raise ConfigError(f"level must be between 0 and 1, got {level}.")
    if not np.isfinite(scores).all():
        raise ConfigError("scores must be finite.")
    n = len(scores)
    if n < 2:
        return nan, nan
    # How often each value is drawn is multinomial: as many columns as values, which are few, instead of n.
    values, counts = np.unique(scores, return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(n, counts / n, size=RESAMPLES)
    low, high = np.quantile(drawn @ values / n, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _check_k(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ConfigError(f"k must be in [1, n = {n}], got {k}.")
