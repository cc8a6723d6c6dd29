"""The resharding plan for layouts that no machine here has: who sends what, counted and carried out in memory."""

import pytest
import torch

from hybridrl.workers.weights.plan import Sharded, make_plan, needed_elements
from hybridrl.workers.weights.regions import Copy, Region

HIDDEN, HEADS, HEAD_SIZE, INTER, EXPERTS, VOCABULARY = 16, 8, 4, 24, 3, 50


def mixture(parts: int) -> list[Sharded]:
    """The weights of a layer of a mixture as training holds them, experts fused; rows that don't divide evenly."""
    shapes = {"embed": (VOCABULARY, HIDDEN), "q": (HEADS * HEAD_SIZE, HIDDEN), "k": (2 * HEAD_SIZE, HIDDEN),
              "bias": (HEADS * HEAD_SIZE,), "o": (HIDDEN, HEADS * HEAD_SIZE), "norm": (HIDDEN,),
              "gate_up": (EXPERTS, 2 * INTER, HIDDEN), "down": (EXPERTS, HIDDEN, INTER)}
    weights = [Sharded(name, shape, parts) for name, shape in shapes.items()]
    return [*weights, Sharded("buffer", (EXPERTS,), 1)]


def layout(weights: list[Sharded], rank: int, tensor_parallel: int) -> list[Copy]:
    """What a tensor-parallel engine takes of them, written by hand: slices, replicated heads, padding, a tied head."""
    shapes = {weight.name: weight.shape for weight in weights}
    copies: list[Copy] = []

    def take(name, parameter, *slices):
        """Elements [slices] of weight `name`, put end to end."""
        index = torch.arange(torch.Size(shapes[name]).numel()).view(shapes[name])[slices]
        target = copies[-1].target.last + 1 if copies and copies[-1].parameter == parameter else 0
        source = torch.empty(shapes[name])[slices]
        copies.append(Copy(name, Region(int(index.flatten()[0]), tuple(source.shape), source.stride()), parameter,
                           Region(target, tuple(source.shape), torch.empty(source.shape).stride())))

    def share(size):
        part = size // tensor_parallel
        return slice(rank * part, (rank + 1) * part)

    padded = -(-VOCABULARY // (4 * tensor_parallel)) * 4
    rows = slice(min(VOCABULARY, rank * padded), min(VOCABULARY, (rank + 1) * padded))
    if rows.start < rows.stop:
        take("embed", "embed", rows)
        take("embed", "head", rows)
    take("q", "qk", share(HEADS * HEAD_SIZE))
    kv = slice(HEAD_SIZE * (rank * 2 // tensor_parallel), HEAD_SIZE * (rank * 2 // tensor_parallel) + HEAD_SIZE)
    take("k", "qk", share(2 * HEAD_SIZE) if tensor_parallel <= 2 else kv)
    take("bias", "bias", share(HEADS * HEAD_SIZE))
    take("o", "o", slice(None), share(HEADS * HEAD_SIZE))
    take("norm", "norm", slice(None))
    part = share(INTER)
    for expert in range(EXPERTS):
        take("gate_up", "w13", expert, part)
        take("gate_up", "w13", expert, slice(part.start + INTER, part.stop + INTER))
    for expert in range(EXPERTS):
        take("down", "w2", expert, slice(None), part)
    take("buffer", "buffer", slice(None))
    return copies


def check_plan(weights: list[Sharded], layouts: list[list[Copy]], bucket_elements: int) -> list[int]:
    """Carry a plan out for all ranks at once, with random weights; returns the elements that each rank received."""
    ranks = len(layouts)
    plans = [make_plan(weights, layouts, rank, bucket_elements) for rank in range(ranks)]
    full = {weight.name: torch.randn(torch.Size(weight.shape).numel()) for weight in weights}
    held = [{weight.name: full[weight.name][slice(*weight.held(rank))] for weight in weights} for rank in range(ranks)]
    sizes = {copy.parameter: 0 for copies in layouts for copy in copies}
    for copy in (copy for copies in layouts for copy in copies):
        sizes[copy.parameter] = max(sizes[copy.parameter], copy.target.last + 1)
    engines = [{name: torch.full((size,), torch.nan) for name, size in sizes.items()} for _ in range(ranks)]
    received = [0] * ranks
    for step in zip(*plans, strict=True):
        for rank, bucket in enumerate(step):
            for name, source, parameter, target in bucket.local:
                target.of(engines[rank][parameter])[...] = source.of(held[rank][name])
            for owner, regions in enumerate(bucket.receives):
                sent = step[owner].sends[rank]
                assert len(sent) == len(regions) and step[owner].sent[rank] == bucket.received[owner]
                received[rank] += bucket.received[owner]
                for (name, source), places in zip(sent, regions, strict=True):
                    for parameter, target in places:
                        target.of(engines[rank][parameter])[...] = source.of(held[owner][name])
    for rank, copies in enumerate(layouts):
        for copy in copies:
            assert torch.equal(copy.target.of(engines[rank][copy.parameter]), copy.source.of(full[copy.weight]))
        assert received[rank] == needed_elements(weights, copies, rank), "no element twice, and none too many"
    return received


@pytest.mark.parametrize("bucket_elements", [1, 100, 10**9])
@pytest.mark.parametrize("ranks, tensor_parallel", [
    (1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (4, 4), (6, 2), (8, 1), (8, 2), (8, 4), (8, 8)])
def test_every_rank_gets_exactly_what_its_engine_reads(ranks, tensor_parallel, bucket_elements):
    weights = mixture(ranks)
    check_plan(weights, [layout(weights, rank % tensor_parallel, tensor_parallel) for rank in range(ranks)],
               bucket_elements)


def test_bytes_by_hand():
    """A [4, 4] matrix on 2 ranks, 2 rows each; the engine takes 2 columns each: half of the other's rows."""
    weights = [Sharded("w", (4, 4), 2)]
    columns = [[Copy("w", Region(2 * rank, (4, 2), (4, 1)), "w", Region(0, (4, 2), (2, 1)))] for rank in range(2)]
    (bucket,) = make_plan(weights, columns, 0, 100)
    assert bucket.received == [0, 4] and bucket.sent == [0, 4]
    assert bucket.sends[1] == [("w", Region(2, (2, 2), (4, 1)))]
    assert bucket.receives[1] == [[("w", Region(4, (2, 2), (2, 1)))]]
    assert bucket.local == [("w", Region(0, (2, 2), (4, 1)), "w", Region(0, (2, 2), (2, 1)))]
    assert needed_elements(weights, columns[0], 0) == 4
    rows = [[Copy("w", Region(8 * rank, (2, 4), (4, 1)), "w", Region(0, (2, 4), (4, 1)))] for rank in range(2)]
    assert needed_elements(weights, rows[0], 0) == 0  # its rows are those it holds
    assert make_plan(weights, rows, 0, 100)[0].received == [0, 0]


@pytest.mark.parametrize("bucket_elements, expected", [
    (4, [["a", "b"], ["c"], ["d", "e"]]),  # a and b fill one exactly
    (3, [["a"], ["b", "c"], ["c"], ["d", "e"]]),  # c does not fit into any: its first row goes with b
    (1000, [["a", "b", "c", "d", "e"]]),
])
def test_buckets_are_filled_up_to_their_size_and_larger_weights_cut(bucket_elements, expected):
    weights = [Sharded(name, (size,), 1) for name, size in dict(a=2, b=2, c=4, d=1, e=1).items()]
    assert [bucket.weights for bucket in make_plan(weights, [[]], 0, bucket_elements)] == expected


def test_a_row_larger_than_a_bucket_has_its_own():
    weights = [Sharded("a", (1,), 1), Sharded("wide", (2, 100), 1), Sharded("empty", (0, 4), 1), Sharded("c", (3,), 1)]
    assert [bucket.weights for bucket in make_plan(weights, [[]], 0, 16)] == [
        ["a"], ["wide"], ["wide", "empty"], ["c"]]


@pytest.mark.parametrize("shape, parts, held", [
    ((4, 3), 2, [(0, 6), (6, 12)]), ((5, 2), 2, [(0, 6), (6, 10)]), ((1, 7), 2, [(0, 7), (7, 7)]),
    ((5,), 4, [(0, 2), (2, 4), (4, 5), (5, 5)]), ((0, 4), 2, [(0, 0), (0, 0)]), ((), 1, [(0, 1)])])
def test_rows_of_a_shard(shape, parts, held):
    assert [Sharded("w", shape, parts).held(index) for index in range(parts)] == held
