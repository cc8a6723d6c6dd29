"""Episodes with slow environments: as they come, against turns in lock-step batches; the last line is JSON.

    python -m benchmarks.episodes [episodes=512] [turns=3] [turn_tokens=12] [repetitions=3]

Each step of an environment waits a log-normal time with mean 0.2 s, in a process of its own. In lock-step all episodes
generate a turn together, then all environments step at the same time and the slowest is waited for. Both sample the
same tokens. Two bounds: `generation_only_seconds`, the turns generated as in lock-step with no waiting between them;
and `longest_wait_seconds`, the longest sum of one episode's waits. `bound_ratio` is seconds over the larger of the two.
`engine_busy_frac` is the share of the time that the engine spends in steps. Medians over repetitions, taken in turn.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.delayed_environment import delays
from hybridrl.config import ClusterConfig, EnvironmentConfig, ModelConfig, PolicyConfig, RolloutConfig
from hybridrl.controller import Cluster, WorkerGroup
from hybridrl.dispatch import to_all
from hybridrl.environments import Task
from hybridrl.workers.policy import PolicyWorker
from hybridrl.workers.rollout.conversation import Conversation
from hybridrl.workers.rollout.engine import Request
from hybridrl.workers.rollout.episodes import EpisodeRunner

DEMO = Path(__file__).resolve().parents[1] / "recipes" / "demo" / "model"
DEFAULTS = {"episodes": 512, "turns": 3, "turn_tokens": 12, "repetitions": 3}


class MeasuredPolicy(PolicyWorker):
    """A policy that times its own episodes."""

    @to_all
    def measure(self, options: dict[str, int], cfg: EnvironmentConfig) -> dict[str, float]:
        """Seconds of both ways of playing the same episodes."""
        self.sync_weights()
        runner = EpisodeRunner(self.rollout, self.tokenizer, self.cfg.rollout, cfg)
        tasks = [Task(seed=seed) for seed in range(options["episodes"])]
        try:
            runner.play(tasks[:64], range(64), 1.0)  # processes, kernels
            rows = [self._once(runner, tasks) for _ in range(options["repetitions"])]
        finally:
            runner.close()
        return {name: statistics.median(row[name] for row in rows) for name in rows[0]}

    def _once(self, runner: EpisodeRunner, tasks: list[Task]) -> dict[str, float]:
        self._forget()
        lock_step, generating, said = lock_step_seconds(runner, tasks)
        self._forget()
        busy = Stopwatch(self.rollout.step)
        self.rollout.step = busy  # type: ignore[method-assign]
        began = time.perf_counter()
        episodes = runner.play(tasks, range(len(tasks)), 1.0)
        seconds = time.perf_counter() - began
        self.rollout.step = busy.function  # type: ignore[method-assign]
        sampled = [conversation.rows[-1].ids for episode in episodes for conversation in episode.conversations.values()]
        if sampled != said:
            raise AssertionError("the two ways of playing sampled different tokens")
        return {"seconds": seconds, "lock_step_seconds": lock_step, "generation_only_seconds": generating,
                "engine_busy_frac": busy.seconds / seconds, "tokens": sum(map(len, sampled))}

    def _forget(self) -> None:
        """Drop cached prefixes: neither way of playing profits from the other."""
        self.rollout.engine.reset_prefix_cache()  # type: ignore[attr-defined]


class Stopwatch:
    """A function that counts the seconds spent in it."""

    def __init__(self, function: Any):
        self.function, self.seconds = function, 0.0

    def __call__(self) -> Any:
        began = time.perf_counter()
        try:
            return self.function()
        finally:
            self.seconds += time.perf_counter() - began


def lock_step_seconds(runner: EpisodeRunner, tasks: list[Task]) -> tuple[float, float, list[list[int]]]:
    """Seconds in all, seconds of generation alone, and the ids of every conversation."""
    def all_of(calls: Sequence[Awaitable[Any]]) -> list[Any]:
        async def gathered() -> list[Any]:
            return await asyncio.gather(*calls)

        return asyncio.run_coroutine_threadsafe(gathered(), runner._loop).result()

    began, generating = time.perf_counter(), 0.0
    sessions = all_of([runner._pool.open() for _ in tasks])
    replies = all_of([session.reset(task) for session, task in zip(sessions, tasks, strict=True)])
    agents = [Conversation(runner.chat, [], runner.context, runner.rollout.max_response_tokens) for _ in tasks]
    turn = 0
    while not replies[0].done:
        for agent, reply in zip(agents, replies, strict=True):
            agent.hear(reply.messages or [])
        started = time.perf_counter()
        completions = runner.engine.generate([
            Request(agent.rows[-1].ids, runner.turn_tokens, 1.0, runner.turn_seed(seed, turn))
            for seed, agent in enumerate(agents)])
        generating += time.perf_counter() - started
        actions = [agent.say(completion) for agent, completion in zip(agents, completions, strict=True)]
        replies = all_of([session.step(action) for session, action in zip(sessions, actions, strict=True)])
        turn += 1
    all_of([session.verify("done") for session in sessions])
    all_of([runner._pool.release(session) for session in sessions])
    return time.perf_counter() - began, generating, [agent.rows[-1].ids for agent in agents]


def random_model(folder: str) -> str:
    """The demo's model with random weights: it has no opinion on when a turn is over."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(DEMO), dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    return folder


def main(words: list[str]) -> None:
    """Run with the options of DEFAULTS, name=value."""
    given = dict(word.split("=", 1) for word in words)
    unknown = given.keys() - DEFAULTS.keys()
    if unknown:
        sys.exit(f"unknown options {sorted(unknown)}; accepted: {', '.join(DEFAULTS)}")
    options = {**DEFAULTS, **{name: int(value) for name, value in given.items()}}
    turns, tokens = options["turns"], options["turn_tokens"]
    environment = EnvironmentConfig(
        name="benchmarks.delayed_environment:Delayed", options={"turns": turns}, max_turns=turns,
        max_turn_tokens=tokens, max_running_episodes=options["episodes"])
    with tempfile.TemporaryDirectory() as folder, Cluster(ClusterConfig(backend="local")) as cluster:
        policy = PolicyConfig(model=ModelConfig(path=random_model(folder)), rollout=RolloutConfig(
            max_prompt_tokens=64, max_response_tokens=turns * (tokens + 32), max_running=options["episodes"]))
        row = WorkerGroup(MeasuredPolicy, cluster.pool(), policy).measure(options, environment)[0]
    row["longest_wait_seconds"] = max(sum(delays(seed, turns)) for seed in range(options["episodes"]))
    row["speedup"] = row["lock_step_seconds"] / row["seconds"]
    row["bound_ratio"] = row["seconds"] / max(row["generation_only_seconds"], row["longest_wait_seconds"])
    row["episodes_per_second"] = options["episodes"] / row["seconds"]
    print(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1:])
