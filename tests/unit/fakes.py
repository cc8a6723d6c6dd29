"""Stand-ins for the parts of a run that need engines: deterministic, with state that a checkpoint must carry."""

from pathlib import Path

import torch

from hybridrl.batch import make_batch


class Prompts:
    """A loader whose batch depends on how many were drawn before; its state is JSON-able."""

    def __init__(self):
        self.drawn = 0

    def next_batch(self, n):
        self.drawn += 1
        return make_batch(prompt=[f"p{self.drawn}.{i}" for i in range(n)], rewards=torch.full((n,), float(self.drawn)))

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


class Policy:
    """A worker group of two ranks: `update` moves a weight, `save` writes one file a rank."""

    def __init__(self):
        self.weight = 1.0

    def update(self, batch):
        self.weight = self.weight * 1.5 + float(batch["rewards"].sum())
        return {"train/weight": self.weight}

    def save(self, folder):
        for rank in (0, 1):
            (Path(folder) / f"rank{rank}.txt").write_text(repr(self.weight))

    def load(self, folder):
        self.weight = float((Path(folder) / "rank1.txt").read_text())
