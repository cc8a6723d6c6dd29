"""Metrics: values, exact reduction over pieces, and evaluation scores by enumeration."""

import itertools
import math
import statistics
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.algorithms import (
    Max,
    Mean,
    Min,
    Moments,
    advantage_metrics,
    avg_at_k,
    bootstrap_interval,
    explained_variance,
    finalize,
    group_metrics,
    length_metrics,
    maj_at_k,
    merge,
    pass_at_k,
    pass_at_k_metrics,
    policy_metrics,
    reward_metrics,
    staleness_metrics,
)
from hybridrl.errors import ConfigError
from tests.unit.algorithms.cases import batches, make_columns, random_pieces, take_rows

QUICK = settings(max_examples=20)


def test_policy_metrics_by_hand():
    now, old = torch.tensor([[0.5, 0.2, 0.9]]).log(), torch.tensor([[0.4, 0.4, 0.1]]).log()
    mask = torch.tensor([[True, True, False]])
    got = finalize(policy_metrics(now, old, mask, ref_log_probs=old, entropies=torch.tensor([[1.0, 3.0, 9.0]])))
    d = [math.log(1.25), math.log(0.5)]
    assert got == pytest.approx(
        {
            "approx_kl_k1": -(d[0] + d[1]) / 2,
            "approx_kl_k3": (1.25 - 1 - d[0] + 0.5 - 1 - d[1]) / 2,
            "ratio_mean": 0.875,
            "ratio_min": 0.5,
            "ratio_max": 1.25,
            "ref_kl": (1 / 1.25 - 1 + d[0] + 2 - 1 + d[1]) / 2,
            "ref_kl_capped_frac": 0.0,
            "entropy": 2.0,
        },
        abs=1e-6,
    )


def test_length_metrics():
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1], [1, 0, 0, 0]]).bool()
    got = finalize(length_metrics(mask, truncated=torch.tensor([True, False, False, False]), max_response_length=3))
    assert got == {
        "aborted_ratio": 0.25,
        "response_length_mean": 7 / 4,
        "response_length_min": 0,
        "response_length_max": 3,
        "response_length_nonaborted_mean": 7 / 3,
        "response_length_nonaborted_min": 1,
        "response_length_nonaborted_max": 3,
        "truncated_ratio": 0.25,
        "at_limit_ratio": 0.5,
    }


def test_reward_and_advantage_metrics():
    got = finalize(reward_metrics(torch.tensor([1.0, 2.0, torch.nan, 6.0]), "outcome"))
    assert got == pytest.approx(
        {
            "outcome_mean": 3.0,
            "outcome_std": statistics.stdev([1, 2, 6]),
            "outcome_min": 1.0,
            "outcome_max": 6.0,
            "outcome_unscorable_frac": 0.25,
        }
    )
    spread = finalize(advantage_metrics(torch.tensor([[1.0, 3.0, torch.nan]]), torch.tensor([[True, True, False]])))
    assert spread["advantage_std"] == pytest.approx(math.sqrt(2))


def test_group_metrics():
    rewards = torch.tensor([1.0, 1, 0, 0, 1, 0, torch.nan, 0.5, 0.5])
    ids = torch.tensor([0, 0, 1, 1, 2, 2, 3, 4, 4])
    got = finalize(group_metrics(rewards, ids))
    assert got == {"group_zero_variance": 0.75, "group_all_solved": 0.25, "group_all_failed": 0.5}


def test_staleness_metrics():
    versions, mask = torch.tensor([[3, 4, 0], [5, 0, 0]]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    assert finalize(staleness_metrics(versions, mask, 5)) == {"staleness_mean": 1.0, "staleness_max": 2.0}


def test_explained_variance():
    mask = torch.tensor([[True, True, True, False]])
    returns, values = torch.tensor([[1.0, 2.0, 4.0, torch.nan]]), torch.tensor([[1.0, 1.0, 4.0, torch.inf]])
    expected = 1 - statistics.variance([0, 1, 0]) / statistics.variance([1, 2, 4])
    assert explained_variance(values, returns, mask).value() == pytest.approx(expected)
    assert explained_variance(values, torch.full((1, 4), 0.1), mask).value() == 0
    assert explained_variance(values, returns, torch.tensor([[True, False, False, False]])).value() == 0


@QUICK
@given(columns=batches, seed=st.integers(0, 1000))
def test_every_metric_merges_exactly(columns, seed):
    def part(c):
        return {
            **policy_metrics(c["log_probs"], c["old_log_probs"], c["mask"], entropies=c["entropies"]),
            **length_metrics(c["mask"], max_response_length=3),
            **reward_metrics(c["rewards"]),
            **advantage_metrics(c["advantages"], c["mask"]),
            "explained_variance": explained_variance(c["values"], c["returns"], c["mask"]),
        }

    pieces = [part(take_rows(columns, rows)) for rows in random_pieces(len(columns["mask"]), seed)]
    assert finalize(merge(pieces)) == pytest.approx(finalize(part(columns)), abs=1e-9)


def test_empty_metrics_are_zero():
    assert finalize({"a": Mean(0, 0), "b": Min(math.inf), "c": Max(-math.inf), "d": Moments(0, 0, 0)}) == dict.fromkeys(
        "abcd", 0.0
    )
    with pytest.raises(TypeError, match="'a' is Mean and Min"):
        merge([{"a": Mean(1, 1)}, {"a": Min(0.0)}])


def test_moments_survive_a_huge_offset():
    parts = [reward_metrics(torch.tensor(x, dtype=torch.float64) + 1e9) for x in ([1.0, 2.0], [6.0])]
    assert finalize(merge(parts))["reward_std"] == pytest.approx(statistics.stdev([1, 2, 6]), rel=1e-6)


# ---- evaluation scores


@pytest.mark.parametrize("n", [1, 4, 6])
def test_pass_at_k_by_enumeration(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(itertools.combinations([i < c for i in range(n)], k))
            expected = sum(any(s) for s in subsets) / len(subsets)
            assert pass_at_k(n, c, k) == pytest.approx(expected)


def test_pass_at_k_metrics_average_over_prompts():
    columns = make_columns(1, rows=9)
    rewards = torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 0, torch.nan])
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    got = finalize(pass_at_k_metrics(rewards, ids, (1, 2, 3)))
    assert got == pytest.approx(
        {
            "pass@1": (1 / 3 + 2 / 3 + 0) / 3,
            "pass@2": (pass_at_k(3, 1, 2) + pass_at_k(3, 2, 2) + 0) / 3,
            "pass@3": 1.0,  # the third prompt has two scored responses only
        }
    )
    assert columns["mask"].shape == (9, 9)


@settings(max_examples=40)
@given(
    answers=st.lists(st.sampled_from("abcd"), min_size=1, max_size=7), k=st.integers(1, 7), right=st.sampled_from("ab")
)
def test_maj_at_k_by_enumeration(answers, k, right):
    k = min(k, len(answers))
    credit = []
    for subset in itertools.combinations(answers, k):
        counts = Counter(subset)
        top = [a for a, c in counts.items() if c == max(counts.values())]
        credit.append((right in top) / len(top))
    expected = sum(credit) / len(credit)
    assert maj_at_k(answers, [a == right for a in answers], k) == pytest.approx(expected)


def test_avg_at_k_and_errors():
    assert avg_at_k([1, 0, 0.5], 2) == 0.5
    for call in (lambda: pass_at_k(3, 4, 1), lambda: pass_at_k(3, 1, 4), lambda: avg_at_k([], 1)):
        with pytest.raises(ConfigError, match="must be in"):
            call()
    with pytest.raises(ConfigError, match="equally correct"):
        maj_at_k(["a", "a"], [True, False], 1)
    with pytest.raises(ConfigError, match="as long"):
        maj_at_k(["a"], [True, False], 1)


# ---- bootstrap intervals


def test_the_interval_of_two_questions_is_worked_out():
    """The mean of two draws from {0, 1} is 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4."""
    assert bootstrap_interval([0.0, 1.0]) == (0.0, 1.0)
    assert bootstrap_interval([1.0, 0.0], level=0.4) == (0.5, 0.5)


@pytest.mark.parametrize(("n", "solved"), [(20, 3), (100, 30), (400, 392)])
def test_the_interval_of_right_and_wrong_is_that_of_the_binomial_distribution(n, solved):
    p, total, quantiles = solved / n, 0.0, {}
    for hits in range(n + 1):
        total += math.comb(n, hits) * p**hits * (1 - p) ** (n - hits)
        for level in (0.025, 0.975):
            if total >= level:
                quantiles.setdefault(level, hits / n)
    found = bootstrap_interval([1.0] * solved + [0.0] * (n - solved))
    assert found == pytest.approx(tuple(quantiles.values()), abs=1 / n)


def test_the_interval_of_any_scores_is_that_of_drawing_questions():
    scores = np.random.default_rng(1).gamma(0.7, size=40)
    draws = np.random.default_rng(2).choice(scores, size=(20_000, 40)).mean(1)
    expected = np.quantile(draws, [0.025, 0.975])
    low, high = bootstrap_interval(scores.tolist())
    assert abs(np.array([low, high]) - expected).max() < 0.05 * (expected[1] - expected[0])
    assert bootstrap_interval(scores.tolist()) == (low, high)
    assert bootstrap_interval(scores.tolist(), seed=1) != (low, high)
    narrow = bootstrap_interval(scores.tolist(), level=0.5)
    assert low < narrow[0] < narrow[1] < high


def test_intervals_without_a_spread():
    assert bootstrap_interval([0.25] * 7) == (0.25, 0.25)
    for scores in ([], [1.0]):
        assert all(map(math.isnan, bootstrap_interval(scores)))
    for call in (lambda: bootstrap_interval([0, 1], level=1.0), lambda: bootstrap_interval([0, math.nan])):
        with pytest.raises(ConfigError):
            call()
