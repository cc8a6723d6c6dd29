"""One call under the `ray` backend: its arguments as each rank gets them, and the future of its results."""

import time
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayError
from tensordict import TensorDict

from hybridrl.batch import num_rows
from hybridrl.controller.call import Call, Future, check_rows, is_rows
from hybridrl.controller.host import Part, Rows, Values
from hybridrl.controller.wire import Wire, pack, unpack, unpack_one
from hybridrl.dispatch import balanced, in_row_order, join_rows, row_range
from hybridrl.errors import BatchError, DeadlineError, HybridRLError


class Diagnosis(Protocol):
    """What a future needs of its pool when a call fails."""

    def diagnose(self, future: "RayFuture") -> HybridRLError:
        """The error of a call that failed."""

    def stop(self, error: HybridRLError) -> HybridRLError:
        """End the pool's processes; returns the error."""


class RayFuture(Future):
    """References to the results of all ranks of a call; `rows` of each shard unless they are consecutive."""

    def __init__(self, pool: Diagnosis, call: Call, ranks: list[int], refs: list[Any], counts: list[Any],
                 rows: list[list[int]] | None = None):
        self.call, self.ranks, self.refs, self.counts, self.rows = call, ranks, refs, counts, rows
        self._pool, self._started = pool, time.monotonic()
        self._outcome: tuple[Any, HybridRLError | None] | None = None

    def result(self, timeout_s: float | None = None) -> Any:
        if self._outcome is None:
            waited = time.monotonic() - self._started
            left = max(0.0, self.call.timeout_s - waited)
            try:
                values = ray.get(self.refs, timeout=left if timeout_s is None else min(left, timeout_s))
                self._outcome = self._join(values), None
            except GetTimeoutError:
                if timeout_s is not None and timeout_s < left:
                    raise self._late() from None
                self._outcome = None, self._pool.stop(self._late())
            except RayError:
                self._outcome = None, self._pool.diagnose(self)
        value, error = self._outcome
        if error is not None:
            raise error
        return value

    def done(self) -> bool:
        ready, _ = ray.wait(self.refs, num_returns=len(self.refs), timeout=0, fetch_local=False)
        return len(ready) == len(self.refs)

    def parts(self) -> list[Part]:
        """The shards' results as parts of another call's rows."""
        if self.call.dispatch.split != "rows" or self.call.dispatch.join != "rows":
            raise BatchError(f"{self.call.role}.{self.call.method} does not return rows; its future can't be split.")
        shards = range(0, len(self.refs), self.call.axis.peers)
        return [Part(self.refs[i], self.counts[i]) for i in shards]

    def _join(self, values: list[Any]) -> Any:
        dispatch = self.call.dispatch
        if dispatch.split == "all":
            return values
        values = values[:: self.call.axis.peers]
        if dispatch.split == "first" or dispatch.join == "first":
            return unpack_one(values[0]) if isinstance(values[0], Wire) else values[0]
        joined = unpack(values) if all(isinstance(value, Wire) for value in values) else join_rows(values)
        return joined if self.rows is None else in_row_order(joined, self.rows)

    def _late(self) -> DeadlineError:
        ready, running = ray.wait(self.refs, num_returns=len(self.refs), timeout=0, fetch_local=False)
        ranks = [rank for rank, ref in zip(self.ranks, self.refs, strict=True) if ref in running]
        waited = time.monotonic() - self._started
        step = "" if self.call.step is None else f" at step {self.call.step}"
        return DeadlineError(f"{self.call.role}.{self.call.method}{step} did not end in {waited:.1f} s; "
                             f"ranks still running: {', '.join(map(str, ranks)) or 'none'}.")


def task_name(call: Call) -> str:
    """`role.method#step`: Ray's tools show it, and a call without arguments sends nothing else (0.15 ms less)."""
    return f"{call.role}.{call.method}#{'' if call.step is None else call.step}"


def reply_kind(call: Call, rank: int) -> str:
    """What a rank sends back: see `Host.call`."""
    if call.dispatch.split != "rows":
        return "value"
    if rank % call.axis.peers:
        return "none"
    return "counted" if call.keep and call.dispatch.join == "rows" else "wire"


def rows_by_cost(call: Call, shards: int) -> list[list[int]] | None:
    """Rows of each shard by what they cost; None where consecutive rows are handed out, equally many to each.

    That is where nothing tells costs, where rows come from futures, and where they may go on as a future.
    """
    batches = [value for value in (*call.args, *call.kwargs.values()) if is_rows(value)]
    kept = call.keep and call.dispatch.join == "rows"
    if shards == 1 or kept or call.axis.costs is None or not all(isinstance(b, TensorDict) for b in batches):
        return None
    costs = next((found for found in map(call.axis.costs, batches) if found is not None), None)
    return None if costs is None else balanced(costs, shards)


def split_arguments(call: Call, shards: int, rows: list[list[int]] | None) -> list[tuple[tuple, dict[str, Any]]]:
    """Arguments of each shard: batches and futures by rows, everything else the same for all."""
    check_rows(call)
    args = [row_argument(value, shards, call.axis.peers, rows) for value in call.args]
    kwargs = {name: row_argument(value, shards, call.axis.peers, rows) for name, value in call.kwargs.items()}
    return [(tuple(arg[shard] for arg in args), {name: value[shard] for name, value in kwargs.items()})
            for shard in range(shards)]


def row_argument(value: Any, shards: int, peers: int, rows: list[list[int]] | None) -> list[Any]:
    """An argument of an `over_rows` call as each shard gets it: its `rows`, or a share of consecutive ones."""
    if not is_rows(value):
        return [whole_argument(value)] * shards
    if not isinstance(value, TensorDict):
        parts = [part for item in (value if isinstance(value, list | tuple) else [value]) for part in _parts(item)]
        return [Rows(parts, shard, shards) for shard in range(shards)]
    shares, packed = [], pack(value)
    for shard in range(shards):
        wire = packed.take(rows[shard]) if rows else packed.part(*row_range(packed.rows, shards, shard))
        # Peers read one copy of their rows.
        shares.append(Rows([Part(ray.put(wire) if peers > 1 else wire, wire.rows)], total=packed.rows))
    return shares


def whole_argument(value: Any) -> Any:
    """An argument that every worker gets whole."""
    if not isinstance(value, RayFuture):
        return value
    if value.call.dispatch.split == "rows" and value.call.dispatch.join == "rows":
        return Rows(value.parts())
    if value.call.dispatch.split == "all":
        return Values(value.refs)
    return Values(value.refs[0])


def _parts(item: TensorDict | RayFuture) -> list[Part]:
    return item.parts() if isinstance(item, RayFuture) else [Part(ray.put(pack(item)), num_rows(item))]
