"""What a call on a worker group costs next to a bare Ray call on the same actors; the last line is JSON.

    python -m benchmarks.dispatch

Bare and ours take turns in one run. `ratio` is bare / ours. `controller_bytes` are what this process serialises and
deserialises while a batch goes from group to group by future, for a batch and for one four times as large.
`object_column_ms` is what one column of Python objects, for instance the rows' answers, adds to `batch_ms`.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDict

from hybridrl.batch import make_batch, num_rows, put
from hybridrl.config import ClusterConfig
from hybridrl.controller import Cluster, WorkerGroup
from hybridrl.dispatch import over_rows, to_all
from hybridrl.workers.base import Worker

CALLS, BATCHES = 600, 60


class Echo(Worker):
    """Gives back what it got."""

    @to_all
    def ping(self) -> None:
        """Nothing."""

    @over_rows()
    def echo(self, batch: TensorDict) -> TensorDict:
        """The batch."""
        return batch


def rollout_batch(num_bytes: int) -> TensorDict:
    """A batch as a rollout leaves it, about `num_bytes`: prompts of 64 to 256 tokens, responses of 512 to 1,536."""
    generator = torch.Generator().manual_seed(0)
    rows = num_bytes // (160 * 8 + 1024 * (8 + 1 + 4 + 8) + 8)
    prompts = [torch.arange(int(n)) for n in torch.randint(64, 257, (rows,), generator=generator)]
    sizes = torch.randint(512, 1537, (rows,), generator=generator).tolist()
    return make_batch(
        prompt_ids=prompts,
        response_ids=[torch.arange(n) for n in sizes],
        response_mask=[torch.ones(n, dtype=torch.bool) for n in sizes],
        rollout_log_probs=[torch.randn(n, generator=generator) for n in sizes],
        weight_versions=[torch.zeros(n, dtype=torch.int64) for n in sizes],
        group_ids=torch.arange(rows),
    )


def size_bytes(batch: TensorDict) -> int:
    """Bytes of the tensors of a batch."""
    columns = [batch.get(name) for name in batch.keys()]
    values = [column.values() if column.is_nested else column for column in columns if isinstance(column, torch.Tensor)]
    return sum(value.nbytes for value in values)


def medians_ms(first: Callable[[], Any], second: Callable[[], Any], times: int) -> tuple[float, float]:
    """Median milliseconds of two functions run in turn."""
    spent: tuple[list[float], list[float]] = ([], [])
    for turn in range(times + times // 10):
        for function, seconds in zip((first, second), spent, strict=True):
            start = time.perf_counter()
            function()
            if turn >= times // 10:  # the first tenth warms up
                seconds.append(time.perf_counter() - start)
    return statistics.median(spent[0]) * 1e3, statistics.median(spent[1]) * 1e3


def bytes_through_controller(action: Callable[[], Any]) -> int:
    """Bytes of all objects that this process serialises or deserialises during `action`."""
    from ray._private.serialization import SerializationContext as Context

    serialize, deserialize, count = Context.serialize, Context.deserialize_objects, 0

    def counting_serialize(self: Any, value: Any) -> Any:
        nonlocal count
        made = serialize(self, value)
        count += made.total_bytes
        return made

    def counting_deserialize(self: Any, data: Any, *rest: Any, **named: Any) -> Any:
        nonlocal count
        count += sum(len(item[0]) for item in data if item[0] is not None)
        return deserialize(self, data, *rest, **named)

    Context.serialize, Context.deserialize_objects = counting_serialize, counting_deserialize
    try:
        action()
    finally:
        Context.serialize, Context.deserialize_objects = serialize, deserialize
    return count


def hand_over_bytes(first: WorkerGroup, second: WorkerGroup, batch: TensorDict) -> int:
    """Bytes through the controller while a batch that the first group holds is worked on by the second."""
    held = first.echo.future(batch)
    while not held.done():
        time.sleep(0.01)
    kept: list[Any] = []

    def hand_over() -> None:
        kept.append(second.echo.future(held))
        while not kept[0].done():
            time.sleep(0.01)

    return bytes_through_controller(hand_over)


def main() -> None:
    """Measure and print."""
    batch = rollout_batch(10_000_000)
    halves = np.array_split(np.random.default_rng(0).standard_normal(size_bytes(batch) // 8), 2)
    with Cluster(ClusterConfig(ranks=2)) as cluster:
        pool = cluster.pool()
        first, second = WorkerGroup(Echo, pool, role="first"), WorkerGroup(Echo, pool, role="second")
        actors = pool.actors
        ray_call_ms, call_ms = medians_ms(
            lambda: ray.get([actor.ping.remote() for actor in actors]), first.ping, CALLS)
        ray_batch_ms, batch_ms = medians_ms(
            lambda: np.concatenate(ray.get([a.ping.remote(h) for a, h in zip(actors, halves, strict=True)])),
            lambda: first.echo(batch), BATCHES)
        with_objects = batch.copy()
        put(with_objects, "answer", [str(row) for row in range(num_rows(batch))])
        plain_ms, objects_ms = medians_ms(lambda: first.echo(batch), lambda: first.echo(with_objects), BATCHES)
        small, large = rollout_batch(2_500_000), rollout_batch(10_000_000)
        through_small, through_large = (hand_over_bytes(first, second, b) for b in (small, large))
    print(json.dumps({
        "call_ms": round(call_ms, 3), "ray_call_ms": round(ray_call_ms, 3),
        "call_ratio": round(ray_call_ms / call_ms, 3),
        "batch_bytes": size_bytes(batch), "batch_ms": round(batch_ms, 2), "ray_batch_ms": round(ray_batch_ms, 2),
        "batch_ratio": round(ray_batch_ms / batch_ms, 3), "batch_rows": num_rows(batch),
        "object_column_ms": round(objects_ms - plain_ms, 2),
        "small_batch_bytes": size_bytes(small), "small_controller_bytes": through_small,
        "controller_bytes": through_large,
    }))


if __name__ == "__main__":
    main()
