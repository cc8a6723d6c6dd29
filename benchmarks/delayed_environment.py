"""An environment that takes its time: each step waits as long as the task's seed says."""

import math
import random
import time

from hybridrl.environments import Environment, Step, Task

MEAN_DELAY_S = 0.2
SIGMA = 1.0
"""Of the logarithm: one wait in twenty is longer than 0.6 s, one in a thousand longer than 2.6 s."""


def delays(seed: int, turns: int) -> list[float]:
    """Seconds that each turn of a task waits: log-normal with mean MEAN_DELAY_S."""
    rng = random.Random(seed)
    return [rng.lognormvariate(math.log(MEAN_DELAY_S) - SIGMA**2 / 2, SIGMA) for _ in range(turns)]


class Delayed(Environment):
    """Answers `go on` after a while, `turns` times."""

    def __init__(self, turns: int = 3):
        self.turns = turns

    def reset(self, task: Task) -> str:
        self.waits = delays(task.seed, self.turns)
        return f"{task.seed}+1="

    def step(self, action: str) -> Step:
        time.sleep(self.waits.pop(0))
        return Step("go on", 0.0, not self.waits)
