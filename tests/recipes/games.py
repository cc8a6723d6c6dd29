"""Environments that tests of recipes name by import path."""

from hybridrl.environments.guess import GuessNumber


class Brittle(GuessNumber):
    """`guess`, but an action that ends on a vowel breaks it."""

    def step(self, action):
        if action[-1:] and action[-1] in "aeiou":
            raise ValueError("a vowel")
        return super().step(action)
