"""An OpenEnv environment and its servers: count down from a number that the seed draws."""

import random
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Say(Action):
    number: int
    note: str = ""


class Seen(Observation):
    text: str
    left: int


class Countdown(Environment):
    """A reward of 1 for each number in order, until 0; a wrong one ends it. 99 is a bug of the environment."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, high: int = 3, **_: Any) -> Seen:
        self.left = random.Random(seed).randint(2, high)
        return Seen(text=f"from {self.left}", left=self.left)

    def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Seen:
        if action.number == 99:
            raise RuntimeError("out of numbers")
        right = action.number == self.left - 1
        self.left -= 1
        return Seen(text=f"right {action.note}".strip() if right else "wrong", left=self.left, reward=float(right),
                    done=not right or self.left == 0)

    @property
    def state(self) -> State:
        return State(step_count=0)


app = create_app(Countdown, Say, Seen, max_concurrent_envs=8)
narrow = create_app(Countdown, Say, Seen, max_concurrent_envs=1)
