"""Batches by hand-worked values: zero rows, empty rows, one row, order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl import batch as B
from hybridrl.errors import BatchError


def sample() -> torch.Tensor:
    """Three rows; the middle response is empty."""
    return B.make_batch(
        response_ids=[[1, 2], [], [3, 4, 5]],
        rollout_log_probs=[[-0.5, -1.0], [], [-2.0, -3.0, -4.0]],
        rewards=[0.0, 1.0, 0.5],
        answer=["a", None, {"value": 7}],
    )


def ids(batch) -> list[list[int]]:
    return [row.tolist() for row in B.rows_of(batch["response_ids"])]


def everything(batch) -> dict:
    """A batch as plain lists."""
    return {name: [row.tolist() if isinstance(row, torch.Tensor) else row for row in B.rows_of(batch[name])]
            for name in batch.keys()}


# making

def test_columns_take_their_declared_dtype():
    batch = sample()
    assert B.num_rows(batch) == 3
    assert batch["response_ids"].dtype == torch.int64
    assert batch["rollout_log_probs"].dtype == torch.float32
    assert batch["rewards"].dtype == torch.float32
    assert everything(batch) == {
        "response_ids": [[1, 2], [], [3, 4, 5]], "rollout_log_probs": [[-0.5, -1.0], [], [-2.0, -3.0, -4.0]],
        "rewards": [0.0, 1.0, 0.5], "answer": ["a", None, {"value": 7}]}


def test_a_declared_field_of_another_dtype_is_refused():
    with pytest.raises(BatchError, match="'rewards' is declared torch.float32, got torch.int64"):
        B.make_batch(rewards=torch.tensor([1, 2]))
    with pytest.raises(BatchError, match="'response_ids' is declared torch.int64, got torch.float32"):
        B.make_batch(response_ids=B.ragged([[1.0]], torch.float32))


def test_differing_row_counts_are_refused_naming_them():
    with pytest.raises(BatchError, match="'answer': 1"):
        B.make_batch(rewards=[0.0, 1.0], answer=["a"])
    batch = sample()
    for value in (torch.zeros(2), [0.0, 1.0]):
        with pytest.raises(BatchError, match="'rewards' has 2 rows, the batch has 3"):
            B.put(batch, "rewards", value)
    with pytest.raises(BatchError, match="'answer' has 1 rows, the batch has 3"):
        B.put(batch, "answer", ["a"])
    with pytest.raises(BatchError, match="at least one field"):
        B.make_batch()


def test_undeclared_tensors_and_objects_are_accepted():
    batch = B.make_batch(scores=torch.tensor([[1.0, 2.0], [3.0, 4.0]]), notes=["x", ["y", "z"]])
    assert everything(batch) == {"scores": [[1.0, 2.0], [3.0, 4.0]], "notes": ["x", ["y", "z"]]}


def test_lists_are_objects_not_nested_columns():
    batch = B.make_batch(prompt=[[{"role": "user"}], [{"role": "user"}, {"role": "assistant"}]])
    assert list(batch["prompt"]) == [[{"role": "user"}], [{"role": "user"}, {"role": "assistant"}]]
    assert everything(B.select(batch, [1])) == {"prompt": [[{"role": "user"}, {"role": "assistant"}]]}


def test_equal_objects_stay_one_a_row():
    batch = B.make_batch(answer=["same", "same"])
    assert list(batch["answer"]) == ["same", "same"]
    assert list(B.make_batch(answer=["one"])["answer"]) == ["one"]


def test_one_object_set_for_the_whole_batch_counts_for_every_row():
    batch = sample()
    batch["note"] = "ab"
    assert B.objects_of(batch, "note") == ["ab", "ab", "ab"]
    assert list(B.concat(B.split(B.select(batch, [0, 1]), 2))["note"]) == ["ab", "ab"]


def test_require_names_the_field_its_writer_and_near_matches():
    with pytest.raises(BatchError, match="'old_log_probs'.*written by training"):
        B.require(sample(), "rewards", "old_log_probs")
    with pytest.raises(BatchError, match="Did you mean rewards"):
        B.require(sample(), "reward")
    B.require(sample(), "rewards", "answer")


# zero rows

def test_zero_rows_have_every_kind_of_column():
    empty = B.make_batch(response_ids=[], rewards=[], answer=[])
    assert B.num_rows(empty) == 0
    assert everything(empty) == {"response_ids": [], "rewards": [], "answer": []}
    assert empty["response_ids"].dtype == torch.int64 and B.is_ragged(empty["response_ids"])
    assert empty["rewards"].dtype == torch.float32


@pytest.mark.parametrize("make_empty", [
    lambda: B.make_batch(response_ids=[], rollout_log_probs=[], rewards=[], answer=[]),
    lambda: B.narrow(sample(), 1, 0),
    lambda: B.select(sample(), []),
    lambda: B.select(sample(), slice(3, None)),
    lambda: B.repeat(sample(), 0),
])
def test_a_batch_without_rows_passes_through_everything(make_empty):
    empty = make_empty()
    assert B.num_rows(empty) == 0
    assert everything(B.concat([empty, sample(), empty])) == everything(sample())
    assert everything(B.concat([sample(), empty])) == everything(sample())
    assert B.num_rows(B.concat([empty, empty])) == 0
    assert [B.num_rows(share) for share in B.split(empty, 3)] == [0, 0, 0]
    assert B.num_rows(B.repeat(empty, 2)) == 0
    assert B.padded(empty["response_ids"]).shape == (0, 0)
    assert B.lengths(empty["response_ids"]).tolist() == []
    B.put(empty, "rewards", torch.zeros(0))


# ragged columns

def test_ragged_columns_have_lengths_and_pad_on_the_right():
    column = sample()["response_ids"]
    assert B.lengths(column).tolist() == [2, 0, 3]
    assert B.padded(column).tolist() == [[1, 2, 0], [0, 0, 0], [3, 4, 5]]
    assert B.padded(column, fill=9, length=4).tolist() == [[1, 2, 9, 9], [9, 9, 9, 9], [3, 4, 5, 9]]
    assert B.padded(B.ragged([[], []], torch.int64)).shape == (2, 0)


def test_padding_shorter_than_a_row_is_refused():
    with pytest.raises(BatchError, match="3"):
        B.padded(sample()["response_ids"], length=2)


def test_padding_keeps_inner_dimensions():
    # Two rows of one and two tokens, two numbers a token.
    column = B.from_lengths(torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([1, 2]))
    assert B.padded(column).tolist() == [[[1, 2], [0, 0]], [[3, 4], [5, 6]]]


def test_unpadded_undoes_padded():
    column = sample()["rollout_log_probs"]
    back = B.unpadded(B.padded(column, length=5), like=column)
    assert [row.tolist() for row in B.rows_of(back)] == [[-0.5, -1.0], [], [-2.0, -3.0, -4.0]]
    with pytest.raises(BatchError, match=r"\(3, 2\) into 3 rows of \[2, 0, 3\]"):
        B.unpadded(torch.zeros(3, 2), like=column)
    with pytest.raises(BatchError, match=r"\(2, 3\)"):
        B.unpadded(torch.zeros(2, 3), like=column)


def test_gradients_flow_through_padding():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    column = B.from_lengths(values, torch.tensor([1, 2]))
    (B.padded(column) * torch.tensor([[1.0, 10.0], [2.0, 3.0]])).sum().backward()
    assert values.grad.tolist() == [1.0, 2.0, 3.0]


# rows

def test_select_takes_rows_in_the_order_given():
    assert ids(B.select(sample(), [2, 0, 2])) == [[3, 4, 5], [1, 2], [3, 4, 5]]
    assert everything(B.select(sample(), torch.tensor([1]))) == {
        "response_ids": [[]], "rollout_log_probs": [[]], "rewards": [1.0], "answer": [None]}
    assert ids(B.select(sample(), slice(None, None, 2))) == [[1, 2], [3, 4, 5]]
    assert ids(B.select(sample(), [-1])) == [[3, 4, 5]]


def test_select_takes_a_mask():
    assert ids(B.select(sample(), torch.tensor([True, False, True]))) == [[1, 2], [3, 4, 5]]
    with pytest.raises(BatchError, match="2 values.*3 rows"):
        B.select(sample(), torch.tensor([True, False]))


@pytest.mark.parametrize("row", [3, -4])
def test_select_refuses_a_row_that_does_not_exist(row):
    with pytest.raises((BatchError, IndexError)):
        B.select(sample(), [row])


def test_select_gives_the_rows_copies():
    batch = sample()
    B.select(batch, [0, 1, 2])["response_ids"].values()[0] = 99
    assert ids(batch) == [[1, 2], [], [3, 4, 5]]


def test_repeat_keeps_copies_together():
    assert ids(B.repeat(sample(), 2)) == [[1, 2], [1, 2], [], [], [3, 4, 5], [3, 4, 5]]
    assert list(B.repeat(sample(), 2)["answer"]) == ["a", "a", None, None, {"value": 7}, {"value": 7}]


def test_concat_lays_rows_end_to_end():
    assert ids(B.concat([sample(), B.select(sample(), [0])])) == [[1, 2], [], [3, 4, 5], [1, 2]]
    assert everything(B.concat([sample()])) == everything(sample())
    with pytest.raises(BatchError, match="empty list"):
        B.concat([])
    with pytest.raises(BatchError, match=r"\['rewards'\] are not in all"):
        B.concat([sample(), sample().exclude("rewards")])


@pytest.mark.parametrize(("total", "parts", "sizes"), [
    (10, 4, [3, 3, 2, 2]), (1, 4, [1, 0, 0, 0]), (8, 4, [2, 2, 2, 2]), (0, 4, [0, 0, 0, 0]), (3, 1, [3])])
def test_shares_differ_by_at_most_one(total, parts, sizes):
    assert B.split_sizes(total, parts) == sizes


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_split_then_concat_changes_nothing(parts):
    shares = B.split(sample(), parts)
    assert len(shares) == parts
    assert everything(B.concat(shares)) == everything(sample())


def test_narrow_shares_memory():
    batch = sample()
    part = B.narrow(batch, 1, 2)
    assert everything(part) == {"response_ids": [[], [3, 4, 5]], "rollout_log_probs": [[], [-2.0, -3.0, -4.0]],
                                "rewards": [1.0, 0.5], "answer": [None, {"value": 7}]}
    part["rewards"][0] = 5.0
    assert batch["rewards"].tolist() == [0.0, 5.0, 0.5]


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=9), st.integers(1, 5), st.data())
def test_rows_survive_any_split_and_selection(rows, parts, data):
    batch = B.make_batch(response_ids=rows, answer=[str(row) for row in rows])
    assert ids(B.concat(B.split(batch, parts))) == rows
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6)) if rows else []
    picked = B.select(batch, index)
    assert ids(picked) == [rows[i] for i in index]
    assert list(picked["answer"]) == [str(rows[i]) for i in index]
