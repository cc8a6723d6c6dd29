"""Scores of responses: reward functions, and the processes that run them.

`Rewarder` is imported on first use: reward processes import this package too, and stay small without torch.
"""

from typing import TYPE_CHECKING, Any

from hybridrl.rewards.functions import REWARDS

if TYPE_CHECKING:
    from hybridrl.rewards.rewarder import Rewarder

__all__ = ["REWARDS", "Rewarder"]


def __getattr__(name: str) -> Any:
    if name == "Rewarder":
        from hybridrl.rewards.rewarder import Rewarder

        return Rewarder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
