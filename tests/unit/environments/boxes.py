"""Gymnasium environments that tests register: answers as texts, and a formatter."""

import gymnasium
from gymnasium.spaces import Box, Dict, Text


class Echo(gymnasium.Env):
    """Shows a word, wants it back; the third answer is truncated."""

    observation_space = Dict({"word": Text(9), "place": Box(-1, 1, (2,))})
    action_space = Text(min_length=2, max_length=4, charset="abc")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        letters = (options or {}).get("letters", "abc")
        self.word = "".join(letters[i] for i in self.np_random.integers(len(letters), size=3))
        return self._seen(), {}

    def _seen(self):
        return {"word": self.word, "place": self.observation_space["place"].low.copy()}

    def step(self, action):
        return self._seen(), float(action == self.word), action == self.word, False, {}


gymnasium.register("tests/Echo-v0", Echo, max_episode_steps=3)


def shout(observation, environment):
    """The word of an observation, loud."""
    return f"{type(environment).__name__}: {observation['word'].upper()}"
