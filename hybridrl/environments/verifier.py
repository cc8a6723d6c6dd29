"""A single turn with a check: the shortest environment, made from a reward function."""

from typing import Any

from hybridrl.environments.environment import Environment, Step, Task, Trajectory
from hybridrl.rewards.binding import BoundReward, bind


class Verifier(Environment):
    """Shows the row's prompt, takes one response, and scores it with a reward function.

    Args:
        function: a name of `hybridrl.rewards.REWARDS`, or `package.module:function`.
        options: keyword arguments handed to it.
    """

    def __init__(self, function: str, options: dict[str, Any] | None = None):
        self._score = self.check_options(function, options)

    @staticmethod
    def check_options(function: str, options: dict[str, Any] | None = None) -> BoundReward:
        """The reward function with its options. Raises ConfigError when they don't fit."""
        return bind(function, options or {})

    def reset(self, task: Task) -> None:
        return None

    def step(self, action: str) -> Step:
        return Step(done=True)

    def verify(self, trajectory: Trajectory) -> float:
        task = trajectory.task
        return self._score({"response": str(trajectory.response), "answer": task.answer, "prompt": task.prompt,
                            "task": task.data})
