"""N workers called as one.

    group = WorkerGroup(Counter, pool, start=3, role="counter")
    group.score(batch)                    # waits and returns
    group.score.future(batch)             # returns at once; other groups accept the future as an argument
    group.score.within(30)(batch)         # another deadline than cluster.call_timeout_s
"""

from typing import Any

from hybridrl.controller.call import Call, DevicePool, Future
from hybridrl.dispatch import Axis, Dispatch, dispatched
from hybridrl.errors import ConfigError, HybridRLError, unknown
from hybridrl.workers.base import Worker


class GroupMethod:
    """A tagged method of a worker class, called on all workers that its tag names."""

    def __init__(self, group: "WorkerGroup", name: str, dispatch: Dispatch, timeout_s: float):
        self._group, self._name, self._dispatch, self._timeout_s = group, name, dispatch, timeout_s

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._submit(args, kwargs, keep=False).result()

    def future(self, *args: Any, **kwargs: Any) -> Future:
        """Start the call and return its future without waiting (`local` runs it first)."""
        return self._submit(args, kwargs, keep=True)

    def within(self, timeout_s: float) -> "GroupMethod":
        """The same method with another deadline, in seconds."""
        return GroupMethod(self._group, self._name, self._dispatch, timeout_s)

    def _submit(self, args: tuple, kwargs: dict[str, Any], keep: bool) -> Future:
        group = self._group
        if group.closed:
            raise HybridRLError(f"the group {group.role!r} was closed.")
        axis = group.axes[self._dispatch.axis] if self._dispatch.axis else Axis()
        return group.pool.submit(
            Call(group.role, self._name, self._dispatch, axis, group.step, args, kwargs, self._timeout_s, keep))


class WorkerGroup:
    """One worker of `worker_cls` in each process of a pool, under a role.

    Args:
        worker_cls: a `Worker`; built as `worker_cls(context, *args, **kwargs)` in every process.
        pool: from `Cluster.pool`. Groups on one pool share its processes, devices and process group.
        role: name of the group on its pool; errors name it.
    Raises:
        ConfigError: the pool has a group of that role.
        WorkerError: a worker could not be built; `__cause__` is the original when hybridrl raised it.
    """

    step: int | None = None
    """Step of the run that calls belong to: workers see it, errors name it."""

    def __init__(self, worker_cls: type[Worker], pool: DevicePool, *args: Any, role: str = "policy", **kwargs: Any):
        if role in pool.roles:
            raise ConfigError(f"this pool has a group of role {role!r}; close it first, or choose another role.")
        self.pool, self.role, self.closed = pool, role, False
        self._tags = dispatched(worker_cls)
        axes = sorted({tag.axis for tag in self._tags.values() if tag.axis})
        self.axes: dict[str, Axis] = pool.build(role, worker_cls, args, kwargs, axes)
        for name, axis in self.axes.items():
            if axis.peers < 1 or pool.ranks % axis.peers:
                pool.drop(role)
                raise ConfigError(f"{worker_cls.__name__}.peers({name!r}) must divide the {pool.ranks} ranks of the "
                                  f"pool, got {axis.peers}.")
        pool.roles.add(role)

    def close(self) -> None:
        """Close the workers and give the role back; the pool goes on."""
        if not self.closed:
            self.closed = True
            self.pool.roles.discard(self.role)
            self.pool.drop(self.role)

    def method(self, name: str) -> GroupMethod:
        """A method of the workers by name. Raises AttributeError when it does not exist or has no tag."""
        if name not in self._tags:
            raise AttributeError(unknown("method of this group", name, self._tags))
        return GroupMethod(self, name, self._tags[name], self.pool.call_timeout_s)

    def __getattr__(self, name: str) -> GroupMethod:
        if name.startswith("_") or "_tags" not in self.__dict__:
            raise AttributeError(name)
        return self.method(name)
