"""Episodes on a rollout engine: the engine's loop in this thread, environments in an event loop beside it.

    engine loop (this thread)          event loop (a thread of its own)
    drive: one step of all requests    an episode: reset ─> hear ─> request ─> say ─> step ─> hear ─> ... ─> verify
            ^                                                        │
            └──────────────── submit, a future back ─────────────────┘

An episode that waits for its environment takes nothing from the others: the engine decodes whoever has a request. An
episode stays with its engine, which holds its prefix. With tensor parallelism only the first peer has environments;
its requests are what all peers run.
"""

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hybridrl.config import EnvironmentConfig, RolloutConfig
from hybridrl.environments import Message, Task
from hybridrl.environments.agent import Access
from hybridrl.environments.environment import AGENT
from hybridrl.environments.pool import EnvironmentPool, Session
from hybridrl.environments.record import EnvironmentFailure
from hybridrl.errors import ConfigError
from hybridrl.workers.rollout.admission import Admission
from hybridrl.workers.rollout.chat import Chat
from hybridrl.workers.rollout.conversation import MAX_AGENTS, Conversation
from hybridrl.workers.rollout.endpoint.caller import EpisodeCaller
from hybridrl.workers.rollout.endpoint.server import Server
from hybridrl.workers.rollout.endpoint.threads import Threads
from hybridrl.workers.rollout.engine import Request, RolloutEngine

TURN_SEEDS = 0x9E3779B97F4A7C15
"""Added to an episode's seed from turn to turn."""
LEAST_BODY_BYTES, BYTES_PER_TOKEN = 1 << 20, 64
"""Of an agent's longest call: what can't fit its context is not tokenised, a time during which all others wait."""
STOP_TIMEOUT_S = 30.0
"""Longest wait for cancelled episodes to let their environments go."""


@dataclass(slots=True)
class Episode:
    """What became of an episode: the conversation of each agent, in the order in which they began to act."""

    task: Task
    seed: int | None
    """Of sampling; None draws one."""
    conversations: dict[str, Conversation | Threads] = field(default_factory=dict)
    owed: dict[str, float] = field(default_factory=dict)
    """Rewards of agents that have not acted yet."""
    num_turns: int = 0
    finish_reason: str = ""
    failure: EnvironmentFailure | None = None
    seconds: float = 0.0
    """From its first call of the environment to its end."""
    waited_s: float = 0.0
    """Of these, for the environment."""

    @property
    def num_tokens(self) -> int:
        """Tokens that it wants to stay in the cache."""
        return sum(conversation.num_tokens for conversation in self.conversations.values())


class EpisodeRunner:
    """Plays episodes of one environment on one engine. Its event loop and environments stay from call to call.

    Args:
        engine: asked to sample; driven by `play`.
        tokenizer: of the model. stop_ids: those of the engine.
        rollout: limits of tokens, and the temperature.
        cfg: the environment and its limits.
    Raises:
        ConfigError: the environment can't be bound. ModelError: a chat template is missing.
    """

    def __init__(self, engine: RolloutEngine, tokenizer: Any, rollout: RolloutConfig, cfg: EnvironmentConfig):
        self.engine, self.rollout, self.cfg = engine, rollout, cfg
        self.chat = Chat(tokenizer, engine.stop_ids, cfg.chat_template, cfg.template_options)
        self.context = rollout.context
        self.turn_tokens = cfg.max_turn_tokens or rollout.max_response_tokens
        self._pool = EnvironmentPool(cfg.name, cfg.options, cfg.turn_timeout_s)
        if self._pool.runs_agent and cfg.system_prompt:
            raise ConfigError(f"environment.system_prompt must be empty for environment {cfg.name!r}, whose agent "
                              "brings its own messages.")
        self.text = Chat(tokenizer, engine.stop_ids, chat_template=False)
        self._server: Server | None = None
        self._serving = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        self._thread.start()
        self.metrics: dict[str, float] = {}

    def play(self, tasks: Sequence[Task], seeds: Sequence[int | None], temperature: float) -> list[Episode]:
        """Play an episode of each task; returns them in order. On a peer that does not lead: an empty list.

        An environment's failure ends its episode alone. Raises EpisodeError when no environment can be started, and
        whatever the engine raises.
        """
        if not self.engine.leads:
            self.engine.drive([])
            return []
        episodes = [Episode(task, seed) for task, seed in zip(tasks, seeds, strict=True)]
        whole = asyncio.run_coroutine_threadsafe(self._all(episodes, temperature), self._loop)
        try:
            self.engine.drive([whole])
        except BaseException:
            whole.cancel()
            self._settle()
            raise
        whole.result()
        return episodes

    def _settle(self) -> None:
        """Wait until cancelled episodes have let their environments go."""
        async def others() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            if tasks:
                await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)

        with contextlib.suppress(concurrent.futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(others(), self._loop).result(2 * STOP_TIMEOUT_S)

    def close(self) -> None:
        """End all environments and the event loop."""
        if self._loop.is_closed():
            return
        with contextlib.suppress(concurrent.futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(self._ended(), self._loop).result(STOP_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()

    # ---- in the event loop

    async def _ended(self) -> None:
        await self._pool.close()
        if self._server is not None:
            await self._server.close()

    async def _all(self, episodes: list[Episode], temperature: float) -> None:
        admission = Admission(self.cfg.max_running_episodes, self.engine.cache_tokens,
                              min(self.context, self.rollout.max_prompt_tokens + self.turn_tokens))
        try:
            async with asyncio.TaskGroup() as group:
                for episode in episodes:
                    group.create_task(self._one(episode, admission, temperature))
        except BaseExceptionGroup as errors:  # any one of them ended all others
            raise errors.exceptions[0] from None
        waits = [episode.waited_s for episode in episodes]
        self.metrics = {"time/longest_environment_wait": max(waits, default=0.0),
                        "time/longest_episode": max((episode.seconds for episode in episodes), default=0.0),
                        "memory/most_running_episodes": admission.largest}

    async def _one(self, episode: Episode, admission: Admission, temperature: float) -> None:
        async with admission.place(id(episode)):
            session = await self._pool.open()
            began = time.monotonic()
            try:
                play = self._calls if self._pool.runs_agent else self._turns
                async with asyncio.timeout(self.cfg.episode_timeout_s) as limit:
                    await play(episode, session, admission, temperature)
            except EnvironmentFailure as failure:
                episode.failure = failure
            except TimeoutError:
                if not limit.expired():
                    raise
                episode.failure = EnvironmentFailure(
                    "timeout", f"the episode took longer than {self.cfg.episode_timeout_s:g} s")
            finally:
                await self._pool.release(session)
            if episode.failure is not None:
                episode.finish_reason = "failed"
            episode.seconds = time.monotonic() - began

    async def _turns(self, episode: Episode, session: Session, admission: Admission, temperature: float) -> None:
        """Play to the end and take all rewards; raises EnvironmentFailure."""
        reply = await self._waited(episode, session.reset(episode.task))
        tools, messages = reply.tools, self._first(reply.messages, episode.task)
        conversations: dict[str, Conversation] = {}
        while not episode.finish_reason:
            agent = conversations.get(reply.agent)
            if agent is None:
                if len(conversations) == MAX_AGENTS:
                    raise EnvironmentFailure("invalid", f"an episode has at most {MAX_AGENTS} agents")
                agent = Conversation(self.chat, tools, self.context, self.rollout.max_response_tokens)
                conversations[reply.agent] = episode.conversations[reply.agent] = agent
                messages = self._with_system(messages)
                agent.earn(episode.owed.pop(reply.agent, 0.0))
            room = agent.hear(messages)
            admission.holds(id(episode), episode.num_tokens)
            if not agent.num_tokens:
                raise EnvironmentFailure("invalid", "the first observation has no tokens: there is nothing to go on")
            if room < 1:
                if not episode.num_turns:
                    raise EnvironmentFailure("overflow", f"the first observation has {agent.num_tokens} tokens, the "
                                                         f"context {self.context}")
                episode.finish_reason = "overflow"
                break
            seed = self.turn_seed(episode.seed, episode.num_turns)
            request = Request(agent.rows[-1].ids, min(room, self.turn_tokens), temperature, seed)
            completion = await asyncio.wrap_future(self.engine.submit(request))
            if completion.finish_reason == "aborted":
                raise EnvironmentFailure("aborted", "the engine gave a turn up")
            actor, action = agent, agent.say(completion)
            episode.num_turns += 1
            reply = await self._waited(episode, session.step(action))
            actor.answered(reply)
            self._pay(episode, reply.rewards)
            messages = reply.messages or []
            if reply.done:
                episode.finish_reason = "length" if completion.finish_reason == "length" else "done"
            elif episode.num_turns == self.cfg.max_turns:
                episode.finish_reason = "max_turns"
        self._pay(episode, await self._waited(episode, session.verify(episode.finish_reason)))

    async def _calls(self, episode: Episode, session: Session, admission: Admission, temperature: float) -> None:
        """Let an agent play by calls over HTTP, and take its reward; raises EnvironmentFailure."""
        def holds(threads: Threads) -> None:
            episode.conversations[AGENT], episode.num_turns = threads, episode.num_turns + 1
            admission.holds(id(episode), episode.num_tokens)

        caller = EpisodeCaller(
            self.engine, self.chat, self.text, self.context, self._pool.call_format, temperature,
            response_tokens=self.rollout.max_response_tokens, turn_tokens=self.turn_tokens,
            seed_of=partial(self.turn_seed, episode.seed), max_calls=self.cfg.max_turns, holds=holds,
            turn_timeout_s=self.cfg.turn_timeout_s)
        server = await self._served()
        began = time.monotonic()
        try:
            async with caller.watched(), server.admitted(caller) as key:
                error = await session.run(episode.task, Access(server.url, key, server.model))
        finally:
            episode.waited_s += time.monotonic() - began - caller.waited_s
        if error is not None and not caller.limit:
            raise EnvironmentFailure("raised", f"run: {error}")
        if not caller.turns:
            raise EnvironmentFailure("overflow" if caller.limit == "overflow" else "invalid",
                                     "run: the agent got no response" + (f" ({error})" if error else ""))
        episode.finish_reason = caller.finish_reason
        self._pay(episode, await self._waited(episode, session.verify(episode.finish_reason, caller.turns)))

    async def _served(self) -> Server:
        """The server that agents call, started by the first of them."""
        async with self._serving:
            if self._server is None:
                self._server = Server(self.chat.whole, "policy", max(LEAST_BODY_BYTES, BYTES_PER_TOKEN * self.context))
                await self._server.start("127.0.0.1", 0)
        return self._server

    @staticmethod
    async def _waited(episode: Episode, call: Any) -> Any:
        began = time.monotonic()
        try:
            return await call
        finally:
            episode.waited_s += time.monotonic() - began

    @staticmethod
    def _pay(episode: Episode, rewards: dict[str, float]) -> None:
        for name, reward in rewards.items():
            if name in episode.conversations:
                episode.conversations[name].earn(reward)
            else:
                episode.owed[name] = episode.owed.get(name, 0.0) + reward

    @staticmethod
    def turn_seed(seed: int | None, turn: int) -> int | None:
        """Seed of sampling turn number `turn`; that of the first is the episode's."""
        return None if seed is None else (seed + turn * TURN_SEEDS) % 2**63

    @staticmethod
    def _first(messages: list[Message] | None, task: Task) -> list[Message]:
        """The first observation; the row's prompt where the environment leaves it to that."""
        if messages is not None:
            return messages
        return [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else list(task.prompt or [])

    def _with_system(self, messages: list[Message]) -> list[Message]:
        if self.cfg.system_prompt and not (messages and messages[0]["role"] == "system"):
            return [{"role": "system", "content": self.cfg.system_prompt}, *messages]
        return messages
