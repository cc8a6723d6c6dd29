"""Returns over whole trajectories: rows that share one are laid end to end."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.columns import check_ids
from hybridrl.algorithms.groups import Trajectories
from hybridrl.errors import BatchError


def over_trajectories(estimator: Callable[..., Any]) -> Callable[..., Any]:
    """Let an estimator of returns take `trajectory_ids` [B] int64: rows with equal ones are a single row to it.

    They follow each other in the batch's order with a masked column in between, so that rewards, values and turns run
    on from row to row, and a mean counts the trajectory once. One value a row is that of the trajectory:
    `bootstrap_values` of its last row, `rewards` beside `token_rewards` only say whether it could be scored, and all
    others must be the same on its rows.

    Raises:
        BatchError: rows of one trajectory differ, or a column is neither [B] nor [B, R].
    """
    parameters = inspect.signature(estimator)

    @functools.wraps(estimator)
    def whole(*args: Any, trajectory_ids: Tensor | None = None, **kwargs: Any) -> Any:
        if trajectory_ids is None:
            return estimator(*args, **kwargs)
        columns = {name: x for name, x in parameters.bind(*args, **kwargs).arguments.items() if x is not None}
        check_ids(columns["mask"], trajectory_ids=trajectory_ids)
        rows = EndToEnd(trajectory_ids)
        result = estimator(**rows.joined(columns))
        return type(result)(*map(rows.split, result))

    added = inspect.Parameter("trajectory_ids", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Tensor | None)
    whole.__signature__ = parameters.replace(  # type: ignore[attr-defined]
        parameters=[*parameters.parameters.values(), added])
    return whole


class EndToEnd:
    """N trajectories of up to K rows: to [N, K * (R + 1)] and back."""

    def __init__(self, trajectory_ids: Tensor):
        self.rows = Trajectories.of(trajectory_ids, trajectory_ids)
        counts = self.rows.index.bincount(minlength=len(self.rows.first))
        order = self.rows.index.argsort(stable=True)
        self.place = torch.empty_like(order)  # of each row within its trajectory
        self.place[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[
            self.rows.index[order]]
        self.shape = len(counts), int(counts.max()) if len(counts) else 0

    def joined(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Columns of rows as those of trajectories; what is no tensor stays as it is."""
        return {name: self._joined(name, x, columns) for name, x in columns.items()}

    def _joined(self, name: str, x: Any, columns: Mapping[str, Any]) -> Any:
        if not isinstance(x, Tensor) or x.dim() == 0:
            return x
        if x.shape == columns["mask"].shape:
            out = x.new_zeros(*self.shape, x.shape[1] + 1)
            out[self.rows.index, self.place, :-1] = x
            return out.flatten(1)
        if x.shape != columns["mask"].shape[:1]:
            raise BatchError(f"{name!r} must be {list(columns['mask'].shape)} like 'mask', or one value a row, got "
                             f"{list(x.shape)}.")
        if name == "bootstrap_values":
            last = self.rows.last(torch.ones_like(x, dtype=torch.bool))
            return x.new_zeros(self.shape[0]).index_put((self.rows.index[last],), x[last])
        if name == "rewards" and "token_rewards" in columns:
            return self.rows.total(x).to(x.dtype)
        return self.rows.same(name, x)

    def split(self, y: Tensor) -> Tensor:
        """[B, R] from [N, K * (R + 1)]."""
        return y.unflatten(1, (self.shape[1], -1))[self.rows.index, self.place, :-1]
