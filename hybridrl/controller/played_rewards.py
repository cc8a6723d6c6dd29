"""Rewards on top of an environment's: functions, a reward model and a judge score what a trajectory came to."""

import math
from typing import Any

import torch
from tensordict import TensorDict

from hybridrl.batch import num_rows, objects_of, put, require, rows_of, select
from hybridrl.rewards import Rewarder
from hybridrl.rewards.texts import as_messages


def add_rewards(played: TensorDict, rewards: Rewarder) -> TensorDict:
    """The rows of episodes with r = r_environment + sum_i w_i r_i as the reward of each trajectory.

    A trajectory is scored once, by its last row, where `response` is its last action and `prompt` all messages before
    it; a reward model that reads tokens reads those of the row. Columns as `Rewarder` writes them, with the part
    `environment` first; what is added to a reward sits in `token_rewards` on the last token that was sampled. A
    trajectory that a part can't score has reward NaN and the reason; one whose episode failed is not scored.

    `rewards.metrics` gains reward/environment.
    """
    require(played, "trajectory_ids", "turns", "rewards", "token_rewards", "reward_error", "response_ids")
    rows: dict[int, list[int]] = {}
    for row, trajectory in enumerate(played["trajectory_ids"].tolist()):
        rows.setdefault(trajectory, []).append(row)
    errors = objects_of(played, "reward_error")
    whole = {members[-1]: members for members in rows.values() if errors[members[0]] is None}
    if not whole:
        return played
    asked = select(played, list(whole))
    turns = objects_of(played, "turns")
    prompts = objects_of(played, "prompt") if "prompt" in played.keys() else [None] * len(turns)
    talks = [_conversation([turn for row in members for turn in turns[row]], prompts[row])
             for row, members in whole.items()]
    put(asked, "prompt", [messages[:-1] for messages in talks])
    put(asked, "response", [messages[-1]["content"] for messages in talks])
    scored = rewards(asked)
    own = asked["rewards"]
    components = torch.cat([own[:, None], scored["reward_components"]], 1)
    rewards.metrics["reward/environment"] = float(own[~scored["rewards"].isnan()].mean())
    return _spread(played, list(whole.values()), scored, components, ["environment", *rewards.components])


def _conversation(turns: list[dict[str, Any]], prompt: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """All messages of a trajectory, the last of them the last action; an empty one where it never acted."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages += [*turn["observation"], {"role": "assistant", "content": turn["action"]}]
    if not turns or not turns[0]["observation"]:  # it was shown the row's own prompt
        messages = [*(as_messages(prompt) if prompt else []), *messages]
    return messages if turns else [*messages, {"role": "assistant", "content": ""}]


def _spread(played: TensorDict, trajectories: list[list[int]], scored: TensorDict, components: torch.Tensor,
            names: list[str]) -> TensorDict:
    """The rows with what became of their trajectories."""
    totals = played["rewards"].clone()
    errors, reasons = objects_of(played, "reward_error"), objects_of(scored, "reward_error")
    turns = objects_of(played, "turns")
    parts = torch.full((num_rows(played), len(names)), math.nan)
    tokens = [column.clone() for column in rows_of(played["token_rewards"])]
    for i, members in enumerate(trajectories):
        added = scored["rewards"][i]
        for row in members:
            totals[row] += added  # NaN where a part failed
            errors[row] = reasons[i]
            parts[row] = components[i] if errors[row] is None else math.nan
            tokens[row] += math.nan if errors[row] else 0.0
        spoken = [row for row in members if turns[row]]
        if spoken:
            tokens[spoken[-1]][turns[spoken[-1]][-1]["stop"] - 1] += added
    result = played.copy()
    put(result, "rewards", totals)
    put(result, "reward_error", errors)
    put(result, "token_rewards", tokens)
    put(result, "reward_components", parts)
    for k, name in enumerate(names):
        put(result, f"reward/{name}", parts[:, k])
    return result
