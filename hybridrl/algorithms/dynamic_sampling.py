"""Dynamic sampling: train only on groups whose outcomes differ, and sample until there are enough.

    acc = GroupAccumulator(target=64, max_rounds=8)
    while acc.wants_more():
        batch = generate_and_score(next(prompts))
        acc.add(batch, batch["rewards"], batch["group_ids"])
    batch = cat([piece[rows] for piece, rows in acc.take()])

The metric is the raw outcome, not the shaped reward: with a length penalty almost every group has some spread.
"""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridrl.algorithms.groups import Groups
from hybridrl.algorithms.partials import Mean, Partial
from hybridrl.errors import BatchError, ConfigError


@torch.no_grad()
def informative_rows(outcomes: Tensor, group_ids: Tensor) -> Tensor:
    """[B] bool: rows of groups with at least two scored responses and outcomes that are not all equal.

    Args:
        outcomes: [B] float, raw; NaN = unscorable (such rows of a kept group are true as well).
        group_ids: [B] int64.
    Source: DAPO, arXiv:2503.14476.
    """
    groups = Groups.of(outcomes, group_ids)
    keep = (groups.count() >= 2) & (groups.max(groups.rewards) > groups.min(groups.rewards))
    return keep[groups.index]


class _Group(NamedTuple):
    piece: Any
    rows: Tensor


class GroupAccumulator:
    """Keeps accepted groups over sampling rounds, in submission order.

    Args:
        target: groups wanted.
        max_rounds: rounds after which it stops; 0 means no limit.
        carry_over: keep surplus groups for the next step (they are older then) instead of discarding them.
        solved_at: outcome from which a response counts as correct, for the log.
    Raises:
        ConfigError: target is below 1 or max_rounds below 0.
    """

    def __init__(self, target: int, max_rounds: int = 0, *, carry_over: bool = False, solved_at: float = 1.0):
        if target < 1 or max_rounds < 0:
            raise ConfigError(f"target must be at least 1 and max_rounds at least 0, got {target} and {max_rounds}.")
        self.target, self.max_rounds, self.carry_over, self.solved_at = (
            target,
            max_rounds,
            carry_over,
            solved_at,
        )
        self._kept: list[_Group] = []
        self._reset()

    def _reset(self) -> None:
        self.num_rounds = self.num_generated = self.num_accepted = self.num_all_correct = self.num_all_wrong = 0
        self.prompts_exhausted = False

    @property
    def num_kept(self) -> int:
        """Groups at hand, those carried over included."""
        return len(self._kept)

    @property
    def exhausted(self) -> bool:
        """True when sampling must stop below the target."""
        over = self.prompts_exhausted or (self.max_rounds > 0 and self.num_rounds >= self.max_rounds)
        return over and self.num_kept < self.target

    def wants_more(self) -> bool:
        """Whether another round is needed and allowed."""
        return self.num_kept < self.target and not self.exhausted

    def missing(self) -> int:
        """Groups still missing."""
        return max(0, self.target - self.num_kept)

    def stop(self) -> None:
        """Tell it that the prompts have run out."""
        self.prompts_exhausted = True

    def add(self, piece: Any, outcomes: Tensor, group_ids: Tensor) -> Tensor:
        """Take one round: whole groups, in submission order.

        Args:
            piece: whatever holds the rows; it comes back from `take` with row numbers.
            outcomes: [B] float, raw. group_ids: [B] int64, unique to a group within the round.
        Returns:
            [B] bool, rows of accepted groups.
        """
        accepted = informative_rows(outcomes, group_ids)
        groups = Groups.of(outcomes, group_ids)
        self.num_rounds += 1
        self._count(groups)
        order = dict.fromkeys(groups.index.tolist())  # groups in order of their first row
        members = torch.argsort(groups.index, stable=True).split(
            torch.bincount(groups.index, minlength=groups.num_groups).tolist()
        )
        for group in order:
            rows = members[group]
            if bool(accepted[rows[0]]):
                self._kept.append(_Group(piece, rows))
                self.num_accepted += 1
        return accepted

    def _count(self, groups: Groups) -> None:
        scored = groups.count() > 0
        self.num_generated += groups.num_groups
        self.num_all_correct += int(((groups.min(groups.rewards) >= self.solved_at) & scored).sum())
        self.num_all_wrong += int(((groups.max(groups.rewards) < self.solved_at) & scored).sum())

    def take(self) -> list[tuple[Any, Tensor]]:
        """The first `target` groups as (piece, rows [n] int64), and start over.

        Below the target it warns with the shortfall and returns what there is.

        Raises:
            BatchError: no group was accepted at all.
        """
        if not self._kept:
            raise BatchError(
                f"dynamic sampling accepted none of {self.num_generated} groups in {self.num_rounds} rounds: "
                "all outcomes of each group were equal. Change the prompts or raise max_rounds."
            )
        if self.num_kept < self.target:
            warnings.warn(
                f"dynamic sampling stopped at {self.num_kept} of {self.target} groups after {self.num_rounds} rounds.",
                stacklevel=2,
            )
        taken, surplus = self._kept[: self.target], self._kept[self.target :]
        self._kept = surplus if self.carry_over else []
        self._reset()
        return [(group.piece, group.rows) for group in taken]

    def metrics(self) -> dict[str, Partial]:
        """Counts since the last `take`: read them before it."""
        return {
            "sampling_rounds": Mean(self.num_rounds, 1),
            "sampling_groups_generated": Mean(self.num_generated, 1),
            "sampling_groups_kept": Mean(self.num_kept, 1),
            "sampling_pass_rate": Mean(self.num_accepted, self.num_generated),
            "sampling_all_correct": Mean(self.num_all_correct, self.num_generated),
            "sampling_all_wrong": Mean(self.num_all_wrong, self.num_generated),
            "sampling_shortfall": Mean(self.missing(), 1),
        }
