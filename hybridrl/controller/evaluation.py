"""Held-out problems, answered on the rollout engine and scored."""

from typing import Any

import torch
from tensordict import TensorDict

from hybridrl.batch import num_rows, repeat
from hybridrl.data import PromptSet, row_seeds

SEED_STEP = -1
"""Step under which evaluation draws its sampling seeds: training steps count from 1, so none is shared."""


def answer(policy: Any, rewards: Any, problems: PromptSet, samples: int, seed: int, limit: int = 0,
           temperature: float | None = None) -> TensorDict:
    """Scored responses, `samples` to each of the first `limit` problems (0: all), rows of a problem together.

    The same problems and seed give the same sampling seeds, whatever training did before.
    """
    count = min(limit, len(problems)) if limit else len(problems)
    batch = repeat(problems.batch(range(count)), samples)
    batch["seeds"] = row_seeds(seed, SEED_STEP, num_rows(batch))
    return rewards(policy.generate(batch, temperature))


def accuracy(batch: TensorDict) -> float:
    """Mean reward of the scored rows; NaN when none could be scored."""
    return float(torch.nanmean(batch["rewards"].double()))
