"""Group statistics over rows that answer the same prompt, and rows that share one trajectory.

Groups may be uneven, interleaved and have any ids. Statistics run in float64 with two passes. An invalid
row (its reward is not finite) is left out of every statistic.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.algorithms.masked import centre
from hybridrl.errors import BatchError


@dataclass(frozen=True)
class Groups:
    """Rewards of N units (responses, or trajectories) with the group of each.

    rewards: [N] float64, 0 where invalid. valid: [N] bool. index: [N] int64 in [0, num_groups).
    """

    rewards: Tensor
    valid: Tensor
    index: Tensor
    num_groups: int

    @classmethod
    def of(cls, rewards: Tensor, group_ids: Tensor) -> "Groups":
        """Number the groups; a reward that is NaN or infinite makes its unit invalid.

        Raises BatchError unless both are [N].
        """
        if not isinstance(group_ids, Tensor) or rewards.dim() != 1 or group_ids.shape != rewards.shape:
            got = list(group_ids.shape) if isinstance(group_ids, Tensor) else type(group_ids).__name__
            raise BatchError(f"'group_ids' must be [N] like the rewards, got {got} for {list(rewards.shape)}.")
        unique, index = torch.unique(group_ids, return_inverse=True)
        valid = rewards.isfinite()
        values = torch.where(valid, rewards.double(), 0.0)
        return cls(values, valid, index, unique.numel())

    def sum(self, x: Tensor) -> Tensor:
        """[num_groups] sum of x over the valid members of each group."""
        zero = torch.zeros(self.num_groups, dtype=torch.float64, device=x.device)
        return zero.index_add(0, self.index, torch.where(self.valid, x.double(), 0.0))

    def max(self, x: Tensor, among: Tensor | None = None) -> Tensor:
        """[num_groups] largest x over the valid members (and `among`); -inf without any."""
        members = self.valid if among is None else self.valid & among
        low = torch.full((self.num_groups,), -torch.inf, dtype=torch.float64, device=x.device)
        return low.scatter_reduce(0, self.index, torch.where(members, x.double(), -torch.inf), "amax")

    def min(self, x: Tensor, among: Tensor | None = None) -> Tensor:
        """[num_groups] smallest x over the valid members (and `among`); +inf without any."""
        return -self.max(-x, among)

    def count(self) -> Tensor:
        """[num_groups] number of valid members, float64."""
        return self.sum(torch.ones_like(self.rewards))

    def baseline(self, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[num_groups] smallest reward and how far the (weighted) mean lies above it; 0 and 0 if empty.

        Kept apart because their sum rounds: after subtracting the smallest reward first, a constant group gives
        exactly 0 and a huge common offset does not matter.
        """
        weights = torch.ones_like(self.rewards) if weights is None else weights.double()
        low = self.min(self.rewards, weights > 0)
        low = torch.where(low.isfinite(), low, 0.0)
        total = self.sum(weights)
        above = self.sum(weights * (self.rewards - low[self.index])) / torch.where(total > 0, total, 1.0)
        return low, above

    def mean(self) -> Tensor:
        """[num_groups] mean reward, exactly the common value of a constant group; 0 if empty."""
        low, above = self.baseline()
        return low + above

    def centred(self, singleton: str = "zero", weights: Tensor | None = None) -> Tensor:
        """[N] reward minus (weighted) group mean; exactly 0 in a constant group.

        A lone valid member has no baseline: 0, or its reward with singleton = "raw".
        """
        low, above = self.baseline(weights)
        centred = (self.rewards - low[self.index]) - above[self.index]
        if singleton == "raw":
            centred = torch.where(self.count()[self.index] == 1, self.rewards, centred)
        return torch.where(self.valid, centred, 0.0)

    def std(self) -> Tensor:
        """[num_groups] sample standard deviation (n - 1); 0 with fewer than two valid members."""
        squares = self.sum(self.centred().square())
        return (squares / (self.count() - 1).clamp(min=1)).sqrt()


@dataclass(frozen=True)
class Trajectories:
    """Which rows belong to one trajectory; without ids every row is its own.

    index: [B] int64 trajectory of each row. first: [N] a row of each trajectory.
    """

    index: Tensor
    first: Tensor

    @classmethod
    def of(cls, rows: Tensor, trajectory_ids: Tensor | None) -> "Trajectories":
        """Number the trajectories; `rows` is any [B] tensor, for the row count and device."""
        order = torch.arange(rows.shape[0], device=rows.device)
        if trajectory_ids is None:
            return cls(order, order)
        unique, index = torch.unique(trajectory_ids, return_inverse=True)
        first = torch.full((unique.numel(),), rows.shape[0], dtype=torch.int64, device=rows.device)
        return cls(index, first.scatter_reduce(0, index, order, "amin"))

    def same(self, name: str, x: Tensor) -> Tensor:
        """[N] the value all rows of a trajectory share.

        Raises BatchError when rows of one trajectory differ.
        """
        shared = x[self.first]
        back = shared[self.index]
        equal = (back == x) | (back.isnan() & x.isnan()) if x.is_floating_point() else back == x
        if not bool(equal.all()):
            row = int((~equal).nonzero()[0])
            raise BatchError(
                f"rows of one trajectory must share {name!r}; row {row} has {x[row].item()}, "
                f"an earlier row of its trajectory has {back[row].item()}."
            )
        return shared

    def last(self, among: Tensor) -> Tensor:
        """[B] bool: of each trajectory the last row where `among` [B] bool is true."""
        order = torch.where(among, torch.arange(len(among), device=among.device), -1)
        top = torch.full((self.first.numel(),), -1, dtype=torch.int64, device=among.device)
        return among & (order == top.scatter_reduce(0, self.index, order, "amax")[self.index])

    def total(self, x: Tensor) -> Tensor:
        """[N] sum over the rows of each trajectory, float64; NaN if any row is."""
        zero = torch.zeros(self.first.numel(), dtype=torch.float64, device=x.device)
        return zero.index_add(0, self.index, x.double())


def std_of(values: Tensor) -> Tensor:
    """Sample standard deviation of a 1-d float64 tensor: two passes, 0 with fewer than two values."""
    if values.numel() < 2:
        return values.new_zeros(())
    return (centre(values).square().sum() / (values.numel() - 1)).sqrt()


def exact_standardize(values: Tensor, valid: Tensor, eps: float) -> Tensor:
    """(x - mean) / (std + eps) over valid entries of a 1-d float64 tensor; 0 when constant or invalid."""
    chosen = values[valid]
    return torch.zeros_like(values).masked_scatter(valid, centre(chosen) / (std_of(chosen) + eps))
