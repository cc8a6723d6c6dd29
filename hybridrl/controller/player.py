"""Episodes as a stage of a loop: played by the policy's workers, counted and checked here."""

from collections import Counter
from typing import Any

import torch
from tensordict import TensorDict

from hybridrl.batch import num_rows, put, require
from hybridrl.config import EnvironmentConfig
from hybridrl.controller.played_rewards import add_rewards
from hybridrl.environments.binding import bind
from hybridrl.errors import EpisodeError
from hybridrl.rewards import Rewarder


class Player:
    """Plays a batch in an environment: `play(policy, batch)` in place of generating and scoring.

    `rewards` are added to those of the environment, see `add_rewards`. `metrics` describes the last call: as of
    `episode_metrics`, and those of `rewards`.

    Raises ConfigError: an unknown environment or option, an import that fails. Nothing starts before the first call.
    """

    def __init__(self, cfg: EnvironmentConfig, rewards: Rewarder | None = None):
        bind(cfg.name, cfg.options)
        self.cfg, self.rewards = cfg, rewards
        self.metrics: dict[str, float] = {}
        self._played = 0

    def __call__(self, policy: Any, batch: TensorDict, temperature: float | None = None) -> TensorDict:
        """The rows of an episode of each row of `batch` (see `PolicyWorker.play`), scored.

        Raises EpisodeError when fewer than `min_success_frac` of them succeed, or none does.
        """
        episodes = num_rows(batch)
        put(batch, "episode_ids", torch.arange(self._played, self._played + episodes))
        self._played += episodes
        played = policy.play(batch, self.cfg, temperature)
        self.metrics = episode_metrics(played)
        self._check(played, episodes)
        if self.rewards is not None:
            played = add_rewards(played, self.rewards)
            self.metrics |= self.rewards.metrics
        return played

    def _check(self, played: TensorDict, episodes: int) -> None:
        failed = int(self.metrics["episodes/failed"])
        if failed and (episodes - failed < self.cfg.min_success_frac * episodes or failed == episodes):
            kinds = ", ".join(f"{int(count)} {name.partition('failed_')[2]}" for name, count in self.metrics.items()
                              if "failed_" in name)
            first = next(error for error in played["reward_error"] if error)
            raise EpisodeError(f"{failed} of {episodes} episodes failed ({kinds}), environment.min_success_frac="
                               f"{self.cfg.min_success_frac:g} must succeed; the first: {first}")


def episode_metrics(played: TensorDict) -> dict[str, float]:
    """What became of the episodes of a batch.

    `episodes/played` and `episodes/rows` they came to; `episodes/failed`, and of these `episodes/failed_<kind>`, the
    kinds as of `hybridrl.environments.record.FAILURES`; `episodes/<finish reason>`, the others by how they ended;
    `episodes/turns_mean` and `episodes/turn_tokens_mean`, the tokens that were sampled in one, of these;
    `episodes/info/<name>`, the mean over turns of each number that environments report.
    """
    require(played, "episode_ids", "reward_error", "finish_reason", "turns")
    ends: dict[int, tuple[str, str | None]] = {}
    turns: Counter[int] = Counter()
    tokens: list[int] = []
    noted: dict[str, list[float]] = {}
    for episode, reason, error, row in zip(played["episode_ids"].tolist(), played["finish_reason"],
                                           played["reward_error"], played["turns"], strict=True):
        ends[episode] = reason, error
        turns[episode] += len(row)
        for turn in row if error is None else ():
            tokens.append(turn["stop"] - turn["start"])
            for name, value in turn["info"].items():
                if isinstance(value, int | float):
                    noted.setdefault(name, []).append(float(value))
    whole = [episode for episode, (_, error) in ends.items() if error is None]
    metrics: dict[str, float] = {"episodes/played": len(ends), "episodes/rows": num_rows(played),
                                 "episodes/failed": len(ends) - len(whole)}
    kinds = Counter(error.partition(":")[0] for _, error in ends.values() if error is not None)
    reasons = Counter(ends[episode][0] for episode in whole)
    metrics |= {f"episodes/failed_{kind}": count for kind, count in sorted(kinds.items())}
    metrics |= {f"episodes/{reason}": count for reason, count in sorted(reasons.items())}
    if whole:
        metrics["episodes/turns_mean"] = sum(turns[episode] for episode in whole) / len(whole)
        metrics["episodes/turn_tokens_mean"] = sum(tokens) / len(tokens)
    return metrics | {f"episodes/info/{name}": sum(values) / len(values) for name, values in sorted(noted.items())}
