"""The `ray` backend: one actor per rank on a placement group; references, not data, pass through here."""

import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from tensordict import TensorDict

from hybridrl.config import ClusterConfig
from hybridrl.controller.call import Call, stopped_error, worker_error
from hybridrl.controller.host import Failure, Host, most_threads
from hybridrl.controller.ray_call import RayFuture, reply_kind, rows_by_cost, split_arguments, task_name, whole_argument
from hybridrl.controller.wire import pack, unpack_one
from hybridrl.dispatch import Axis, Dispatch
from hybridrl.errors import DeadlineError, HybridRLError
from hybridrl.workers.base import Worker, WorkerContext

# After a failure the other ranks get this long to report theirs, so that the first cause is named.
_GRACE_S = 3.0
# After a refusal they get longer: the pool lives on where all refuse, however unevenly a busy machine runs them.
_REFUSAL_GRACE_S = 20.0
# Pools are bound to devices, not to CPU shares: any number of pools fits a small machine.
_CPUS_PER_RANK = 0.01


class RayHost(Host):
    """A host in an actor: Ray decides its GPU, batches inside other objects travel packed."""

    def __init__(self, rank: int, world_size: int, local_rank: int, local_size: int, timeout_s: float,
                 log_file: Path | None, most_threads: int | None):
        register_batches()
        device = torch.device("cuda", 0) if ray.get_gpu_ids() else torch.device("cpu")
        super().__init__(WorkerContext(rank, world_size, device, "", local_rank), local_size, timeout_s, log_file,
                         most_threads)

    def run(self, arguments: tuple[tuple, dict, str] = ((), {}, "value")) -> Any:
        """Run the method that the task's name says, see `task_name`."""
        target, _, step = ray.get_runtime_context().get_task_name().rpartition("#")
        role, _, method = target.rpartition(".")
        args, kwargs, reply = arguments
        return self.call(role, method, int(step) if step else None, args, kwargs, reply)

    def listen_here(self) -> tuple[str, int]:
        """Rank 0: open the store at this machine's address."""
        return self.listen(ray.util.get_node_ip_address())


def register_batches() -> None:
    """Make Ray move every batch of this process packed."""
    ray.util.register_serializer(TensorDict, serializer=pack, deserializer=unpack_one)


class RayPool:
    """Devices reserved as a placement group, one host process on each."""

    def __init__(self, cfg: ClusterConfig, ranks: int, gpus: bool, log_dir: Path | None, name: str):
        self.ranks, self.call_timeout_s = ranks, cfg.call_timeout_s
        self.roles: set[str] = set()
        self.failure: HybridRLError | None = None
        self._start_timeout_s, self._gpus = cfg.start_timeout_s, gpus
        bundle = {"CPU": _CPUS_PER_RANK} | ({"GPU": 1.0} if gpus else {})
        self._reserved = placement_group([bundle] * ranks, strategy="PACK")
        if not self._reserved.wait(cfg.start_timeout_s):
            remove_placement_group(self._reserved)
            free = {key: value for key, value in ray.available_resources().items() if key in ("CPU", "GPU")}
            raise DeadlineError(f"{ranks} devices ({bundle} each) were not free within cluster.start_timeout_s="
                                f"{cfg.start_timeout_s:g} s; free now: {free}.")
        self._logs = [log_dir / f"{name}-rank{rank}.log" if log_dir else None for rank in range(ranks)]
        self.actors = self._start_hosts()
        address = self.actors[0].listen_here.remote()
        self._joined = [actor.join.remote(address, cfg.start_timeout_s) for actor in self.actors]

    def _start_hosts(self) -> list[Any]:
        """Actors by rank: ranks of one machine are consecutive."""
        nodes = placement_group_table(self._reserved)["bundles_to_node_id"]
        bundles = sorted(range(self.ranks), key=lambda index: (nodes[index], index))
        on_node = [nodes[index] for index in bundles]
        host_cls = ray.remote(num_cpus=0, num_gpus=1 if self._gpus else 0, max_restarts=0)(RayHost)
        actors = []
        for rank, (index, node) in enumerate(zip(bundles, on_node, strict=True)):
            place = PlacementGroupSchedulingStrategy(self._reserved, placement_group_bundle_index=index)
            actors.append(host_cls.options(scheduling_strategy=place).remote(
                rank, self.ranks, rank - on_node.index(node), on_node.count(node), self.call_timeout_s,
                self._logs[rank], most_threads()))
        return actors

    def build(self, role: str, worker_cls: type[Worker], args: tuple, kwargs: dict, axes: list[str]) -> dict[str, Axis]:
        """Build the worker of a role in every process; returns what it says of each axis."""
        self.check()
        refs = [actor.build.remote(role, worker_cls, args, kwargs, axes) for actor in self.actors]
        self._everywhere(role, "start of its process", self._joined, self._start_timeout_s)
        return self._everywhere(role, "construction", refs, self.call_timeout_s)[0]

    def drop(self, role: str) -> None:
        """Close the workers of a role."""
        if self.failure is None:
            self._everywhere(role, "close", [actor.drop.remote(role) for actor in self.actors], self.call_timeout_s)

    def _everywhere(self, role: str, what: str, refs: list[Any], timeout_s: float) -> list[Any]:
        """Results of all ranks of something that is no worker method."""
        call = Call(role, what, Dispatch("all"), Axis(), None, (), {}, timeout_s)
        return RayFuture(self, call, list(range(self.ranks)), refs, []).result()

    def submit(self, call: Call) -> RayFuture:
        """Start a call on the ranks that it names."""
        self.check()
        rows = None
        if call.dispatch.split == "rows":
            rows = rows_by_cost(call, self.ranks // call.axis.peers)
            shares = split_arguments(call, self.ranks // call.axis.peers, rows)
        else:
            shares = [(tuple(map(whole_argument, call.args)),
                       {name: whole_argument(value) for name, value in call.kwargs.items()})]
        ranks = [0] if call.dispatch.split == "first" else list(range(self.ranks))
        refs, counts, name = [], [], task_name(call)
        for rank in ranks:
            args, kwargs = shares[rank // call.axis.peers if len(shares) > 1 else 0]
            reply = reply_kind(call, rank)
            run = self.actors[rank].run.options(name=name, num_returns=2 if reply == "counted" else 1)
            made = run.remote((args, kwargs, reply)) if args or kwargs else run.remote()
            count, ref = made if reply == "counted" else (None, made)
            refs.append(ref)
            counts.append(count)
        return RayFuture(self, call, ranks, refs, counts, rows)

    def check(self) -> None:
        """Raise when the pool was stopped or closed."""
        if self.failure is not None:
            raise stopped_error(self.failure)

    def diagnose(self, future: RayFuture) -> HybridRLError:
        """The error of a call that failed: the first cause, not the broken connections that followed it."""
        waiting = dict(zip(future.refs, future.ranks, strict=True))
        failures, end = [], time.monotonic() + _REFUSAL_GRACE_S
        while waiting and time.monotonic() < end:
            ready, _ = ray.wait(list(waiting), timeout=max(0.0, end - time.monotonic()), fetch_local=False)
            for ref in ready:
                rank = waiting.pop(ref)
                try:
                    ray.get(ref)
                except RayError as failed:
                    failures.append(self._failure(failed, rank, future.call))
            if not all(failure.harmless for failure in failures):
                end = min(end, time.monotonic() + _GRACE_S)
        # A process that died (its time counts as 0) breaks its peers' connections; a rank that raised does not.
        error = worker_error(min(failures, key=lambda failure: failure.when))
        if not waiting and len(failures) == len(future.ranks) and all(failure.harmless for failure in failures):
            return error
        return self.stop(error)

    def _failure(self, error: RayError, rank: int, call: Call) -> Failure:
        if isinstance(error, RayTaskError) and isinstance(error.cause, Failure):
            return error.cause
        log = f"; its output: {self._logs[rank]}" if self._logs[rank] else ""
        if isinstance(error, RayActorError):
            text = f"killed, crashed, or out of memory{log}"
            return Failure(call.role, rank, call.step, "process died", text, "", False, 0.0)
        return Failure(call.role, rank, call.step, type(error).__name__, str(error), str(error), False, time.time())

    def stop(self, error: HybridRLError) -> HybridRLError:
        """Kill the processes, so that none waits for a peer that failed; returns the error for raising."""
        if self.failure is None:
            self.failure = error
            self._kill()
        return error

    def close(self) -> None:
        """Close the workers and end the processes."""
        if self.failure is None:
            self.failure = HybridRLError("it was closed.")
            ray.wait([actor.close.remote() for actor in self.actors], num_returns=self.ranks, timeout=2)
            self._kill()

    def _kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        remove_placement_group(self._reserved)
