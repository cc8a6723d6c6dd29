"""Environments that tests of recipes name by import path."""

from hybridrl.environments.guess import GuessNumber


class Brittle(GuessNumber):
    """`guess`, but one action in five breaks it."""

    def step(self, action):
        if sum(map(ord, action)) % 5 == 0:
            raise ValueError("unlucky")
        return super().step(action)
