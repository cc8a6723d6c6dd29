"""Splitting and joining, on row counts worked out by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.batch import make_batch, rows_of
from hybridrl.dispatch import (
    Dispatch,
    balanced,
    dispatched,
    in_row_order,
    join_rows,
    over_rows,
    overlaps,
    row_range,
    to_all,
    to_first,
)
from hybridrl.errors import BatchError, ConfigError


class Base:
    @to_all
    def reset(self):
        pass

    @to_first
    def save(self):
        pass

    @over_rows(axis="rollout", join="first")
    def update(self, batch):
        pass

    def untagged(self):
        pass


class Derived(Base):
    def reset(self):
        """Overridden without a tag."""

    @to_all
    def save(self):
        """Overridden with another tag."""

    @over_rows()
    def score(self, batch):
        pass


def test_tags_are_found_by_name_and_inherited():
    assert dispatched(Base) == {"reset": Dispatch("all"), "save": Dispatch("first"),
                                "update": Dispatch("rows", "rollout", "first")}
    assert dispatched(Derived) == {"reset": Dispatch("all"), "save": Dispatch("all"),
                                   "update": Dispatch("rows", "rollout", "first"),
                                   "score": Dispatch("rows", "training", "rows")}


def test_over_rows_without_parentheses_or_with_an_unknown_join_is_refused():
    with pytest.raises(ConfigError, match="over_rows"):
        over_rows(lambda self, batch: batch)
    with pytest.raises(ConfigError, match="'sum'"):
        over_rows(join="sum")


@pytest.mark.parametrize(("total", "expected"), [
    (10, [(0, 3), (3, 6), (6, 8), (8, 10)]),
    (8, [(0, 2), (2, 4), (4, 6), (6, 8)]),
    (1, [(0, 1), (1, 1), (1, 1), (1, 1)]),
    (0, [(0, 0), (0, 0), (0, 0), (0, 0)]),
])
def test_row_ranges_over_four_shards(total, expected):
    assert [row_range(total, 4, shard) for shard in range(4)] == expected


def test_overlaps_name_the_part_and_the_rows_within_it():
    # Parts hold rows 0..2, none, 3..7, 8: rows 2..8 are the last of part 0, all of part 2, none of part 3.
    assert overlaps([3, 0, 5, 1], 2, 8) == [(0, 2, 3), (2, 0, 5)]
    assert overlaps([3, 0, 5, 1], 4, 9) == [(2, 1, 5), (3, 0, 1)]
    assert overlaps([3, 0, 5, 1], 4, 4) == []
    assert overlaps([], 0, 0) == []


@given(st.lists(st.integers(0, 7), max_size=6), st.integers(1, 6))
def test_every_row_of_every_part_goes_to_one_shard_in_order(counts, shards):
    total = sum(counts)
    rows = [(part, row) for part, count in enumerate(counts) for row in range(count)]
    taken = [(part, row) for shard in range(shards) for part, start, stop in
             overlaps(counts, *row_range(total, shards, shard)) for row in range(start, stop)]
    assert taken == rows


def test_results_join_in_row_order():
    joined = join_rows([make_batch(group_ids=[1, 2]), make_batch(group_ids=torch.zeros(0, dtype=torch.int64)),
                        make_batch(group_ids=[3])])
    assert rows_of(joined["group_ids"]) == [1, 2, 3]
    assert join_rows([torch.tensor([1.0]), torch.tensor([2.0, 3.0])]).tolist() == [1.0, 2.0, 3.0]
    assert join_rows([["a"], [], ["b", "c"]]) == ["a", "b", "c"]
    assert join_rows([None, None]) is None


@pytest.mark.parametrize("values", [[1.0, 2.0], [None, [1]], [{"loss": 1.0}]])
def test_results_that_have_no_rows_are_refused(values):
    with pytest.raises(BatchError, match="joins batches, tensors or lists"):
        join_rows(values)


def test_costs_are_spread_costliest_first():
    # 8 | 5 | 4; then 3 to the part with 4, 2 to the one with 5, 1 to one of the two with 7
    assert balanced([1, 8, 3, 4, 5, 2], 3) == [[1], [0, 4, 5], [2, 3]]
    assert balanced([2.0], 3) == [[0], [], []]
    assert balanced([], 2) == [[], []]


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 6))
def test_no_share_is_more_than_a_row_above_the_mean(costs, parts):
    shares = balanced(costs, parts)
    assert sorted(row for share in shares for row in share) == list(range(len(costs)))
    largest = max(sum(costs[row] for row in share) for share in shares)
    assert largest <= sum(costs) / parts + max(costs, default=0)


def test_shares_come_back_in_row_order():
    shares = [[1, 4], [], [0, 2, 3]]
    assert in_row_order(list("beacd"), shares) == list("abcde")
    assert in_row_order(torch.tensor([1, 4, 0, 2, 3]), shares).tolist() == [0, 1, 2, 3, 4]
    batch = make_batch(answer=list("beacd"), response_ids=[[1], [4] * 3, [], [2], [3]])
    ordered = in_row_order(batch, shares)
    assert list(ordered["answer"]) == list("abcde")
    assert [row.tolist() for row in rows_of(ordered["response_ids"])] == [[], [1], [2], [3], [4] * 3]
    assert in_row_order(None, shares) is None
    with pytest.raises(BatchError, match="must return all of its 5 rows, got 1"):
        in_row_order(["a"], shares)
