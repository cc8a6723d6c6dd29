"""Which rows go together, and where each token lands."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.batch import fed_lengths, make_batch
from hybridrl.errors import BatchError
from hybridrl.workers.training.packing import columns, cut, micro_batches

CPU = torch.device("cpu")


def pack(batch, bins, share=False):
    return list(micro_batches(batch, bins, CPU, share=share))


def test_cut_takes_as_few_bins_as_first_fit_and_balances_their_costs():
    # 5(row 1) 4(row 3) 4(row 4) 3(row 0) 2(row 2) need 3 bins of 8; each goes to the cheapest so far: 5 | 4+3 | 4+2
    assert cut([3, 5, 2, 4, 4], [3, 5, 2, 4, 4], budget=8) == [[3, 0], [4, 2], [1]]
    # one row costs as much as all others: it stays alone
    assert cut([3, 5, 2, 4, 4], [1, 5, 1, 1, 1], budget=13) == [[1], [3, 4, 0, 2]]


def test_cut_falls_back_to_first_fit_where_balancing_finds_no_room():
    # balanced: 6+3, 5+4, and no room for 2; first fit: 6+4, 5+3+2
    assert cut([6, 5, 4, 3, 2], [6, 5, 4, 3, 2], budget=10) == [[0, 2], [1, 3, 4]]
    assert cut([6, 5, 4, 3, 2], [6, 5, 4, 3, 2], budget=10, count=3) == [[1, 4], [2, 3], [0]]


def test_cut_into_more_bins_than_needed():
    assert cut([3, 1], [3, 1], budget=8, count=2) == [[0], [1]]
    assert cut([3, 1], [3, 1], budget=8, count=4) == [[0], [1], [], []]
    assert cut([], [], budget=8, count=2) == [[], []]


def test_a_row_over_the_budget_gets_a_bin_of_its_own():
    assert cut([2, 50, 3], [2, 50, 3], budget=6) == [[1], [2, 0]]


def test_nothing_to_cut():
    assert cut([], [], budget=6) == []
    assert cut([0, 0], [0, 0], budget=6) == [[0, 1]]  # rows without a response cost nothing and still belong somewhere


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 40), st.integers(0, 12))
def test_cut_keeps_every_row_once_within_the_budget(sizes, budget, count):
    costs = [size + size**2 / 10 for size in sizes]
    bins = cut(sizes, costs, budget, count)
    assert sorted(row for rows in bins for row in rows) == list(range(len(sizes)))
    totals = [sum(costs[row] for row in rows) for rows in bins]
    assert totals == sorted(totals, reverse=True)
    assert len(bins) >= count
    for rows in bins:
        assert rows or len(bins) == count
        taken = [sizes[row] for row in rows]
        assert len(rows) < 2 or sum(taken) <= budget or min(taken) == 0
        assert [sizes[row] for row in rows] == sorted((sizes[row] for row in rows), reverse=True)


def test_the_last_response_token_is_not_fed():
    batch = make_batch(prompt_ids=[[1, 2], [3], [4, 5]], response_ids=[[6, 7, 8], [9], []])
    assert fed_lengths(batch) == [4, 1, 0]


def test_a_micro_batch_by_hand():
    batch = make_batch(prompt_ids=[[1, 2], [3], [4, 5, 6]], response_ids=[[7, 8], [9], [10, 11, 12]])
    [part] = pack(batch, [[2, 0, 1]])
    #            row 2: prompt 4 5 6, fed 10 11     row 0: 1 2, fed 7      row 1: 3
    assert part.input_ids.tolist() == [[4, 5, 6, 10, 11, 1, 2, 7, 3]]
    assert part.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0]]
    assert part.predictors.tolist() == [2, 3, 4, 6, 7, 8]
    assert part.targets.tolist() == [10, 11, 12, 7, 8, 9]
    assert part.sources.tolist() == [3, 4, 5, 0, 1, 2]  # response_ids laid end to end: 7 8 | 9 | 10 11 12
    assert part.width == 3
    assert part.cells.tolist() == [0, 1, 2, 3, 4, 6]
    assert part.padded(torch.tensor([1.0, 2, 3, 4, 5, 6])).tolist() == [[1, 2, 3], [4, 5, 0], [6, 0, 0]]


def test_a_prompt_in_common_is_fed_once():
    batch = make_batch(prompt_ids=[[1, 2], [3], [1, 2], [3]], response_ids=[[7, 8], [], [9, 10, 11], [12]])
    [part] = pack(batch, [[2, 0, 3, 1]], share=True)
    #            row 2: prompt 1 2, fed 9 10     row 0: fed 7, its prompt as above     row 3: 3     row 1: nothing
    assert part.input_ids.tolist() == [[1, 2, 9, 10, 7, 3]]
    assert part.position_ids.tolist() == [[0, 1, 2, 3, 2, 0]]
    assert part.predictors.tolist() == [1, 2, 3, 1, 4, 5]
    assert part.targets.tolist() == [9, 10, 11, 7, 8, 12]
    assert part.cells.tolist() == [0, 1, 2, 3, 4, 6]
    assert part.pack.lengths == [4, 3, 1]
    assert part.pack.shared.places.tolist() == [0, 1, 2, 3, 0, 1, 4, 5]
    assert part.pack.shared.firsts.tolist() == [0, 1, 2, 3, 6, 7]


@pytest.mark.parametrize("prompts", [[[1, 2], [1], [2, 1]], [[1, 2], [1, 3], []]])
def test_a_prompt_that_begins_like_another_is_none_in_common(prompts):
    [shared], [plain] = (pack(make_batch(prompt_ids=prompts, response_ids=[[5, 6], [7], []]), [[0, 1, 2]], share)
                         for share in (True, False))
    assert shared.pack.shared is None and shared.input_ids.tolist() == plain.input_ids.tolist()


@pytest.mark.parametrize("rows", [[], [0]])
def test_nothing_to_feed_has_nothing_in_common(rows):
    [part] = pack(make_batch(prompt_ids=[[1, 2]], response_ids=[[]]), [rows], share=True)
    assert part.pack.shared is None and part.input_ids.shape == (1, 1) and part.pack.lengths == [1]


def test_rows_without_a_response_stay_in_the_batch_and_feed_nothing():
    batch = make_batch(prompt_ids=[[1, 2], [3]], response_ids=[[], [4, 5]], rewards=torch.tensor([1.0, 2.0]))
    [part] = pack(batch, [[1, 0]])
    assert part.input_ids.tolist() == [[3, 4]]
    assert part.padded(torch.tensor([1.0, 2.0])).tolist() == [[1, 2], [0, 0]]
    assert columns(batch, part, CPU)["rewards"].tolist() == [2, 1]


@pytest.mark.parametrize("rows", [[], [0]])
def test_a_micro_batch_with_nothing_to_feed_feeds_one_token(rows):
    batch = make_batch(prompt_ids=[[1, 2]], response_ids=[[]])
    [part] = pack(batch, [rows])
    assert part.input_ids.shape == part.position_ids.shape == (1, 1)
    assert part.targets.shape == part.predictors.shape == (0,)
    assert part.padded(torch.zeros(0)).shape == (len(rows), 0)


def test_padding_keeps_the_gradient():
    batch = make_batch(prompt_ids=[[1], [2]], response_ids=[[3], [4, 5]])
    [part] = pack(batch, [[1, 0]])
    values = torch.ones(3, requires_grad=True)
    (part.padded(values) * torch.tensor([[2.0, 3.0], [5.0, 7.0]])).sum().backward()
    assert values.grad.tolist() == [2, 3, 5]


def test_columns_follow_the_rows_of_the_micro_batch():
    batch = make_batch(prompt_ids=[[1], [2]], response_ids=[[3], [4, 5]], answer=["a", "b"],
                       advantages=[[0.5], [1.5, 2.5]], response_mask=[[True], [True, False]],
                       rewards=torch.tensor([1.0, 2.0]))
    [part] = pack(batch, [[1, 0]])
    got = columns(batch, part, CPU)
    assert set(got) == {"response_ids", "advantages", "response_mask", "rewards"}
    assert got["response_ids"].tolist() == [[4, 5], [3, 0]]
    assert got["advantages"].tolist() == [[1.5, 2.5], [0.5, 0]]
    assert got["response_mask"].tolist() == [[True, False], [True, False]]
    assert got["rewards"].tolist() == [2, 1]


def test_a_column_of_other_lengths_is_refused():
    batch = make_batch(prompt_ids=[[1]], response_ids=[[3, 4]], advantages=[[0.5]])
    [part] = pack(batch, [[0]])
    with pytest.raises(BatchError, match="'advantages' has rows of \\[1\\] tokens, response_ids of \\[2\\]"):
        columns(batch, part, CPU)


def test_a_response_without_a_prompt_is_refused():
    with pytest.raises(BatchError, match="row 1 has a response and an empty prompt"):
        fed_lengths(make_batch(prompt_ids=[[1], []], response_ids=[[], [2]]))


def test_a_missing_column_is_named():
    with pytest.raises(BatchError, match="response_ids"):
        fed_lengths(make_batch(prompt_ids=[[1]]))
