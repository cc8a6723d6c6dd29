"""A game that takes at least two turns: find a hidden number from `higher` and `lower`."""

import random
import re
from typing import Any

from hybridrl.environments.environment import Environment, Step, Task, Trajectory

_NUMBER = re.compile(r"\d+")


class GuessNumber(Environment):
    """The policy names numbers until it hits the hidden one, at most `guesses` times; the reward is 1 for a hit.

    The hidden number is the row's answer, or drawn from the task's seed where the row has none. An action counts as
    its last whole number; one without a number is told so and costs a guess.

    Args:
        low, high: the hidden number is one of these or lies between them.
        guesses: actions allowed.
        rules: first observation, with `{low}`, `{high}` and `{guesses}`; empty shows the row's own prompt.
        hint_reward: added for each guess that the hints so far allow.
    """

    def __init__(self, low: int = 1, high: int = 8, guesses: int = 4, rules: str = "Guess {low} to {high}.",
                 hint_reward: float = 0.0):
        if not 0 <= low < high or guesses < 1:
            raise ValueError(f"needs 0 <= low < high and guesses >= 1, got {low}, {high} and {guesses}.")
        self.low, self.high, self.guesses, self.rules, self.hint_reward = low, high, guesses, rules, hint_reward

    def reset(self, task: Task) -> str | None:
        drawn = random.Random(task.seed).randint(self.low, self.high)
        self.hidden = drawn if task.answer is None else int(task.answer)
        if not self.low <= self.hidden <= self.high:
            raise ValueError(f"the row's answer must be from {self.low} to {self.high}, got {self.hidden}.")
        self.left, self.at_least, self.at_most, self.hit = self.guesses, self.low, self.high, False
        return self.rules.format(low=self.low, high=self.high, guesses=self.guesses) or None

    def step(self, action: str) -> Step:
        self.left -= 1
        found = _NUMBER.findall(action)
        if not found or len(found[-1]) > 9:
            return Step("no number", done=self.left == 0, info={"sensible": 0})
        guess = int(found[-1])
        sensible = self.at_least <= guess <= self.at_most
        reward = self.hint_reward if sensible else 0.0
        if guess == self.hidden:
            self.hit = True
            return Step("right", reward, True, {"sensible": 1})
        if guess < self.hidden:
            self.at_least = max(self.at_least, guess + 1)
        else:
            self.at_most = min(self.at_most, guess - 1)
        hint = "higher" if guess < self.hidden else "lower"
        return Step(hint, reward, self.left == 0, {"sensible": int(sensible)})

    def state(self) -> dict[str, Any]:
        return {"hidden": self.hidden, "from": self.at_least, "to": self.at_most, "left": self.left}

    def verify(self, trajectory: Trajectory) -> float:
        return float(self.hit)
