"""Baselines that remember earlier batches: one number, or one per agent of a game."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridrl.algorithms.columns import check_ids, given
from hybridrl.algorithms.masked import low_and_mean
from hybridrl.algorithms.reinforce import episode_returns
from hybridrl.algorithms.returns import folded_rewards, reward_to_go
from hybridrl.algorithms.trajectories import EndToEnd


def mean_return(
    mask: Tensor, rewards: Tensor | None = None, token_rewards: Tensor | None = None,
    trajectory_ids: Tensor | None = None, *, gamma: float = 1.0
) -> float:
    """Mean episode return over scorable rows (or trajectories) with trainable tokens, for `MovingBaseline.update`."""
    columns = given(mask=mask, rewards=rewards, token_rewards=token_rewards)
    if trajectory_ids is not None:
        columns = EndToEnd(trajectory_ids).joined(columns)
    mask = columns["mask"]
    folded, valid = folded_rewards(mask, columns.get("rewards"), columns.get("token_rewards"))
    episodes, counted = episode_returns(reward_to_go(folded, mask, gamma), mask & valid[:, None])
    return float(sum(low_and_mean(episodes[counted])))


class MovingBaseline:
    """Exponential average of batch means, read before the present batch is added.

    value <- decay * value + (1 - decay) * batch mean; the first batch sets it. 0 before any batch.
    """

    def __init__(self, decay: float = 0.9):
        self.decay, self.value, self.num_updates = decay, 0.0, 0

    def update(self, batch_mean: float) -> None:
        """Add the mean return of a finished batch."""
        first = self.num_updates == 0
        self.value = batch_mean if first else self.decay * self.value + (1 - self.decay) * batch_mean
        self.num_updates += 1

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must hold."""
        return {"decay": self.decay, "value": self.value, "num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint."""
        self.decay, self.value = float(state["decay"]), float(state["value"])
        self.num_updates = int(state["num_updates"])


class AgentBaselines:
    """One `MovingBaseline` per agent, for self-play where roles have different chances.

    Source: SPIRAL, arXiv:2506.24119.
    """

    def __init__(self, decay: float = 0.9):
        self.decay = decay
        self.agents: dict[int, MovingBaseline] = {}

    def rows(self, agent_ids: Tensor) -> Tensor:
        """[B] float64 baseline of each row's agent: the column `moving_baseline`. 0 for a new agent."""
        values = [self.agents[a].value if a in self.agents else 0.0 for a in agent_ids.tolist()]
        return torch.tensor(values, dtype=torch.float64, device=agent_ids.device)

    def update(self, agent_ids: Tensor, mask: Tensor, rewards: Tensor, token_rewards: Tensor | None = None,
               trajectory_ids: Tensor | None = None, *, gamma: float = 1.0) -> None:
        """Add the mean return of each agent that has a scorable row with trainable tokens.

        Args:
            agent_ids: [B] int64. mask: [B, R] bool. rewards: [B] float, or token_rewards: [B, R] float too.
            trajectory_ids: [B] int64; rows that share one count once.
        """
        check_ids(mask, agent_ids=agent_ids)
        counted = mask.any(dim=1) & rewards.isfinite()
        for agent in agent_ids[counted].unique().tolist():
            rows = counted & (agent_ids == agent)
            by_token, trajectories = (None if x is None else x[rows] for x in (token_rewards, trajectory_ids))
            mean = mean_return(mask[rows], rewards[rows], by_token, trajectories, gamma=gamma)
            self.agents.setdefault(agent, MovingBaseline(self.decay)).update(mean)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        return {"decay": self.decay, "agents": {a: b.state_dict() for a, b in self.agents.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.decay, self.agents = float(state["decay"]), {}
        for agent, saved in state["agents"].items():
            self.agents[int(agent)] = MovingBaseline()
            self.agents[int(agent)].load_state_dict(saved)
