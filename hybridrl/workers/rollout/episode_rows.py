"""From rows of a batch to the tasks of episodes, and from episodes to rows that training takes."""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence

from tensordict import TensorDict

from hybridrl.batch import num_rows, objects_of, put, rows_of, select
from hybridrl.environments import Task
from hybridrl.environments.environment import AGENT
from hybridrl.workers.rollout.conversation import MAX_AGENTS, Row
from hybridrl.workers.rollout.episodes import Episode
from hybridrl.workers.routing import Mixture, experts_column


def tasks_of(batch: TensorDict, seed: int) -> list[Task]:
    """The task of each row. Its seed is the row's own (`task["seed"]`) or made of `group_ids`, equal for equal ones."""
    rows = num_rows(batch)
    columns = {name: objects_of(batch, name) if name in batch.keys() else [None] * rows
               for name in ("prompt", "answer", "task")}
    groups = batch["group_ids"].tolist() if "group_ids" in batch.keys() else range(rows)
    return [Task(prompt, answer, data, _own_seed(data, (seed << 32) + group)) for prompt, answer, data, group in
            zip(columns["prompt"], columns["answer"], columns["task"], groups, strict=True)]


def _own_seed(data: object, default: int) -> int:
    own = data.get("seed") if isinstance(data, Mapping) else None
    return own if isinstance(own, int) and own >= 0 else default


def episode_batch(batch: TensorDict, episodes: Sequence[Episode], decode: Callable[[list[int]], str],
                  mixture: Mixture | None = None) -> TensorDict:
    """The rows of all episodes, in order; every episode has at least one.

    Args:
        batch: row i is what episode i was about, with `episode_ids`; its columns are repeated.
        decode: token ids to text without special tokens.
        mixture: of the experts that completions carry.
    """
    written = [(i, k, agent, reward, row) for i, episode in enumerate(episodes)
               for k, (agent, reward, rows) in enumerate(_trajectories(batch, i, episode)) for row in rows]
    sources, rows = [i for i, *_ in written], [row for *_, row in written]
    numbers = batch["episode_ids"].tolist()
    failures = [episodes[i].failure for i in sources]
    played = select(batch, sources)
    columns = {
        "prompt_ids": [row.prompt_ids for row in rows],
        "response_ids": [row.response_ids for row in rows],
        "response_mask": [row.mask for row in rows],
        "rollout_log_probs": [row.log_probs for row in rows],
        "weight_versions": [row.versions for row in rows],
        "response": [decode(row.response_ids) for row in rows],
        "finish_reason": [episodes[i].finish_reason for i in sources],
        "episode_ids": [numbers[i] for i in sources],
        "trajectory_ids": [numbers[i] * MAX_AGENTS + k for i, k, *_ in written],
        "agent_ids": [zlib.crc32(agent.encode()) for _, _, agent, *_ in written],
        "agent": [agent for _, _, agent, *_ in written],
        "turns": [row.turns for row in rows],
        "rewards": [math.nan if failure else reward
                    for failure, (*_, reward, _) in zip(failures, written, strict=True)],
        "token_rewards": [[math.nan] * len(row.response_ids) if failure else row.token_rewards
                          for failure, row in zip(failures, rows, strict=True)],
        "reward_error": [str(failure) if failure else None for failure in failures],
    }
    for name, column in columns.items():
        put(played, name, column)
    if mixture is not None:
        put(played, "routed_experts", experts_column(mixture, played, [row.experts for row in rows]))
    return played


def _trajectories(batch: TensorDict, i: int, episode: Episode) -> list[tuple[str, float, list[Row]]]:
    """Agent, reward and rows of each trajectory. An episode that failed before it had any has one without response."""
    found = [(agent, conversation.reward, [row for row in conversation.rows if row.turns] or conversation.rows[:1])
             for agent, conversation in episode.conversations.items()]
    found = [trajectory for trajectory in found if trajectory[2]]  # none where the template refused what it was shown
    if not found:
        prompt = rows_of(batch["prompt_ids"])[i].tolist() if "prompt_ids" in batch.keys() else []
        return [(AGENT, math.nan, [Row(prompt)])]
    return found
