"""Environments of verifiers 0.1: their examples, their turns, their rubric.

The environment's own rollout runs; where it asks a model, it waits for the policy's turn. Source:
github.com/PrimeIntellect-ai/verifiers.
"""

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

from hybridrl.environments.environment import Action, Environment, Message, Step, Task, Trajectory
from hybridrl.environments.tools.calls import FORMATS, Call, calls_in
from hybridrl.errors import ConfigError, extra, unknown
from hybridrl.importing import imported

KEY = "environment.options"


class Verifiers(Environment):
    """Plays an example of the environment's dataset; the reward is the rubric's, at the end.

    The example is that of the row's `number` (`data.source=none`, from 1, over and over), or drawn from the task's
    seed where the row has none. A reward function that raises costs the episode, which verifiers would score 0.

    Args:
        id: name of an installed verifiers environment, or `package.module:function` that makes one.
        arguments: keyword arguments of its `load_environment`, or of the function.
        split: `train` or `eval`, the dataset of the examples.
        format: how the model writes tool calls, a name of `hybridrl.environments.tools.calls.FORMATS`; needed by
            environments with tools.
    """

    def __init__(self, id: str, arguments: dict[str, Any] | None = None, split: str = "train", format: str = ""):
        import datasets

        datasets.disable_progress_bars()
        with _handlers_kept():
            self._environment = _maker(id)(**(arguments or {}))
        if self._environment.message_type != "chat":
            raise ValueError(f"{id} has message_type {self._environment.message_type!r}, must be 'chat'.")
        self._environment.get_model_response = self._respond
        self._examples = getattr(self._environment, "get_dataset" if split == "train" else "get_eval_dataset")()
        self._format, self._loop = format, asyncio.new_event_loop()
        self._rollout: Any = None

    @staticmethod
    def check_options(id: str, arguments: dict[str, Any] | None = None, split: str = "train",
                      format: str = "") -> None:
        """Raises ConfigError when there is no such environment or option. The environment is not made."""
        _maker(id)
        if split not in ("train", "eval"):
            raise ConfigError(f"{KEY}.split must be train or eval, got {split!r}.")
        if format and format not in FORMATS:
            raise ConfigError(f"{KEY}.format: " + unknown("format of tool calls", format, FORMATS))

    def reset(self, task: Task) -> list[Message]:
        self._cancel()
        row, count = task.data if isinstance(task.data, dict) else {}, len(self._examples)
        drawn = random.Random(task.seed).randrange(count)
        self._number = (int(row["number"]) - 1) % count if "number" in row else drawn
        self._seen: list[Message] = []
        example = dict(self._examples[self._number])
        self._rollout = self._loop.create_task(self._environment.rollout(example, None, "policy"))
        if not self._asks():
            raise RuntimeError(f"the environment ended before the first turn: {self._final().get('stop_condition')}")
        self.tools = list(self._state.get("oai_tools") or ())
        if self.tools and not self._format:
            raise ValueError(f"{KEY}.format must say how the model writes calls of the environment's tools.")
        return self._new()

    def step(self, action: Action) -> Step:
        said = {"role": "assistant", "content": str(action)} | self._calls(action)
        self._seen.append(said)
        self._answer.set_result(_completion(said, action.finish_reason))
        if self._asks():
            return Step(self._new())
        return Step(done=True, info={"stop": str(self._final().get("stop_condition"))})

    def state(self) -> dict[str, int]:
        return {"example": self._number}

    def verify(self, trajectory: Trajectory) -> float:
        if not self._rollout.done():  # the episode was cut: to the environment, its prompt is too long
            import verifiers

            self._answer.set_exception(verifiers.OverlongPromptError())
            if self._asks():
                raise RuntimeError("the environment asks for another turn after the context's end")
        state = self._final()
        with _errors() as errors:
            self._run(self._environment.rubric.score_rollout(state, contextlib.nullcontext()))
        if errors:
            raise RuntimeError(errors[0])
        return float(state["reward"])

    def close(self) -> None:
        self._cancel()
        self._run(self._environment._teardown())
        self._loop.close()

    async def _respond(self, state: Any, prompt: Any, *_: Any, **__: Any) -> Any:
        """Takes the place of the environment's call of a model."""
        self._state, self._prompt, self._answer = state, prompt, self._loop.create_future()
        self._asked.set_result(None)
        return await self._answer

    def _asks(self) -> bool:
        """Let the rollout go on until it asks for a response (true) or ends."""
        self._asked = self._loop.create_future()
        self._run(asyncio.wait([self._rollout, self._asked], return_when=asyncio.FIRST_COMPLETED))
        return not self._rollout.done()

    def _final(self) -> Any:
        """The state of the rollout that is over. Raises what it failed of."""
        state = self._rollout.result()
        if state.get("error") is not None:
            raise state["error"]
        return state

    def _new(self) -> list[Message]:
        """The messages of the request that are not in the conversation yet."""
        messages = [{name: value for name, value in message.items() if value is not None} for message in self._prompt]
        known, self._seen = self._seen, messages
        if [_key(message) for message in messages[:len(known)]] != [_key(message) for message in known]:
            raise RuntimeError("the environment rewrote the conversation; an episode can only go on with it")
        return messages[len(known):]

    def _calls(self, action: Action) -> dict[str, Any]:
        """The tool calls of a response; one that can't be read is the environment's to refuse."""
        if not self.tools:
            return {}
        schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in self.tools}
        read = [(call.name, json.dumps(call.arguments)) if isinstance(call, Call) else ("", call.error)
                for call in calls_in(action, self._format, schemas)]
        calls = [{"id": f"call_{len(self._seen)}_{i}", "type": "function",
                  "function": {"name": name, "arguments": arguments}} for i, (name, arguments) in enumerate(read)]
        return {"tool_calls": calls} if calls else {}

    def _cancel(self) -> None:
        if self._rollout is not None and not self._rollout.done():
            self._rollout.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                self._run(self._rollout)

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)


def _maker(id: str) -> Any:
    """The function that makes an environment."""
    os.environ.setdefault("VF_LOG_LEVEL", "WARNING")
    with extra("verifiers", "environment.name=verifiers"):
        import verifiers  # noqa: F401
    # A name is found as verifiers.load_environment finds it.
    path = id if ":" in id else id.replace("-", "_").split("/")[-1] + ":load_environment"
    return imported(path, f"{KEY}.id", "verifiers environment")


def _key(message: Message) -> tuple[str, Any]:
    return message["role"], message.get("content")


def _completion(message: Message, finish_reason: str) -> Any:
    from openai.types.chat import ChatCompletion

    choice = {"index": 0, "message": message, "finish_reason": "length" if finish_reason == "length" else "stop"}
    return ChatCompletion.model_validate(
        {"id": "response", "created": 0, "model": "policy", "object": "chat.completion", "choices": [choice]})


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Environments of verifiers install handlers of signals when they are made."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _errors() -> Iterator[list[str]]:
    """What verifiers logs as errors: exceptions of reward functions, which it scores 0."""
    found: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("verifiers")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
