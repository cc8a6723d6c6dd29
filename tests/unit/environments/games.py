"""Environments whose episodes tests look into: one that says anything, one for two players."""

import random

from hybridrl.environments import AsyncEnvironment, Environment, Step


class Chatter(AsyncEnvironment):
    """Says random things, control tokens among them, for a random number of turns, to one or two agents in turn."""

    def __init__(self, agents: int = 1):
        self.agents = agents

    async def reset(self, task):
        self.rng = random.Random(task.seed)
        self.left = self.rng.randint(1, 5)
        return Step(self.text(), agent="agent 0")

    def text(self):
        words = ["higher", "lower ", "\n", "<|im_end|>", "<think>", "turn", "é", "<|im_start|>user", "3"]
        content = "".join(self.rng.choices(words, k=self.rng.randint(1, 6))) + "."
        if self.rng.random() < 0.3:
            return [{"role": "user", "content": content}, {"role": "user", "content": "begin"}]
        return content

    async def step(self, action):
        self.left -= 1
        rewards = [self.rng.randint(-4, 4) / 4 for _ in action.token_ids] if self.rng.random() < 0.5 else None
        agent = f"agent {self.rng.randrange(self.agents)}"
        return Step(self.text(), self.rng.randint(0, 2), self.left == 0, {}, agent, rewards)

    async def verify(self, trajectory):
        return {turn.agent: 0.25 for turn in trajectory.turns}


class Early(Environment):
    """White's turn earns black, who has not acted yet, a half; black's turn earns white 1 and black 2."""

    def reset(self, task):
        self.turn = 0
        return Step("begin", agent="white")

    def step(self, action):
        self.turn += 1
        rewards = {"black": 0.5, "nobody": 9.0} if self.turn == 1 else {"white": 1.0, "black": 2.0}
        return Step("go on", rewards, self.turn == 2, agent="black")


class Duel(Environment):
    """Two players name numbers in turn; the larger of the two sums wins."""

    def reset(self, task):
        self.sums, self.turn = {"odd": 0, "even": 0}, 0
        return Step("odd begins", agent="odd")

    def step(self, action):
        who, other = ("odd", "even") if self.turn % 2 == 0 else ("even", "odd")
        self.sums[who] += len(action.token_ids)
        self.turn += 1
        return Step(f"{who} said {len(action.token_ids)}", 0.0, self.turn == 4, {}, other)

    def verify(self, trajectory):
        odd = self.sums["odd"] - self.sums["even"]
        return {"odd": float(odd > 0) - float(odd < 0), "even": float(odd < 0) - float(odd > 0)}
