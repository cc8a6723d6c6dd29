"""Batches packed for the wire and unpacked: same values, memory of their own."""

import pickle

import pytest
import torch
from tensordict import TensorDict

from hybridrl import batch as B
from hybridrl.controller.wire import pack, unpack, unpack_one
from hybridrl.errors import BatchError


def sample() -> TensorDict:
    """Three rows of every kind of column; the middle response is empty."""
    return B.make_batch(
        response_ids=[[1, 2], [], [3, 4, 5]],
        response_mask=[[True, False], [], [True, True, False]],
        rewards=[0.0, 1.0, 0.5],
        answer=["a", None, {"value": 7}],
        pairs=torch.tensor([[1, 2], [3, 4], [5, 6]]),
        halves=torch.tensor([0.5, 1.5, -2.0], dtype=torch.bfloat16),
        routed=B.from_lengths(torch.arange(10).reshape(5, 2), torch.tensor([2, 0, 3])),
    )


def everything(batch: TensorDict) -> dict:
    return {name: [row.tolist() if isinstance(row, torch.Tensor) else row for row in B.rows_of(batch[name])]
            for name in batch.keys()}


def through_pickle(wire):
    """As another process gets it: read-only buffers."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(wire, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers]), len(data)


def test_all_columns_come_back_with_their_dtypes():
    wire, _ = through_pickle(pack(sample()))
    back = unpack_one(wire)
    assert everything(back) == everything(sample())
    assert {name: back.get(name).dtype for name in back.keys() if name != "answer"} == {
        name: sample().get(name).dtype for name in sample().keys() if name != "answer"}


def test_received_tensors_can_be_written():
    wire, _ = through_pickle(pack(sample()))
    back = unpack_one(wire)
    back["rewards"] += 1
    back["response_ids"].values()[0] = 9
    back["response_mask"].values().logical_not_()
    assert back["rewards"].tolist() == [1.0, 2.0, 1.5]
    assert everything(back)["response_ids"] == [[9, 2], [], [3, 4, 5]]
    assert everything(unpack_one(wire)) == everything(sample())


def test_tensor_bytes_travel_beside_the_pickle():
    small = through_pickle(pack(B.make_batch(rewards=torch.zeros(10))))[1]
    large = through_pickle(pack(B.make_batch(rewards=torch.zeros(100_000))))[1]
    assert large - small < 16


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (0, 1), (1, 2), (1, 3), (2, 2), (0, 0)])
def test_a_range_of_rows_equals_the_same_rows_selected(start, stop):
    expected = everything(B.select(sample(), list(range(start, stop))))
    assert everything(unpack_one(pack(sample()).part(start, stop))) == expected
    # A part of a part, after a trip: its offsets do not begin at 0.
    outer = through_pickle(pack(B.concat([sample(), sample()])).part(2, 6))[0]
    assert everything(unpack_one(outer.part(1 + start, 1 + stop))) == expected


def test_pieces_are_laid_end_to_end():
    wire = pack(sample())
    laid = unpack([wire.part(2, 3), wire.part(1, 1), wire.part(0, 2)])
    assert everything(laid) == everything(B.select(sample(), [2, 0, 1]))


def test_pieces_without_rows_may_lack_fields():
    empty = pack(B.make_batch(answer=[]))
    assert everything(unpack([empty, pack(sample()), empty])) == everything(sample())
    assert everything(unpack([empty, empty])) == {"answer": []}


def test_pieces_with_other_fields_are_refused():
    with pytest.raises(BatchError, match=r"\['rewards'\] are not in all"):
        unpack([pack(sample()), pack(sample().exclude("rewards"))])


def test_tensors_with_a_gradient_or_strides_are_packed_by_value():
    column = torch.arange(6.0, requires_grad=True).reshape(2, 3).T
    assert everything(unpack_one(pack(B.make_batch(grid=column)))) == {"grid": [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]}


def test_nested_batches_are_refused():
    batch = B.make_batch(rewards=[1.0])
    batch.set("inner", TensorDict({"a": torch.zeros(1)}, batch_size=[1]))
    with pytest.raises(BatchError, match="'inner' is a nested batch"):
        pack(batch)


@pytest.mark.parametrize("rows", [[2, 0], [1], [], [0, 1, 2], [1, 1, 2]])
def test_any_rows_can_be_taken_also_of_a_part(rows):
    for wire, first in ((pack(sample()), 0), (pack(B.concat([sample(), sample()])).part(1, 5), 1)):
        expected = everything(B.select(B.concat([sample(), sample()]), [first + row for row in rows]))
        assert everything(unpack_one(wire.take(rows))) == expected
