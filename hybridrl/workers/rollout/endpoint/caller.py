"""Who holds a key: from calls to requests of the rollout engine, and from completions to answers."""

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hybridrl.environments.environment import AGENT, Action, Turn
from hybridrl.environments.record import EnvironmentFailure, Reply
from hybridrl.environments.tools.calls import Call as ToolCall
from hybridrl.environments.tools.calls import calls_in, text_before_calls
from hybridrl.workers.rollout.chat import Chat, Continuation
from hybridrl.workers.rollout.conversation import Conversation
from hybridrl.workers.rollout.endpoint.answers import Answer
from hybridrl.workers.rollout.endpoint.calls import ApiError, Call, ChatCall, TextCall
from hybridrl.workers.rollout.endpoint.threads import Said, Thread, Threads
from hybridrl.workers.rollout.engine import Completion, Request, RolloutEngine


class Caller:
    """Answers calls on a rollout engine and forgets them: each is a conversation of its own.

    Args:
        engine: asked to sample.
        chat: renders messages; None where the tokenizer has no chat template.
        text: tokenises prompts of text calls: a Chat without template.
        context: most tokens of prompt and response together.
        call_format: how the model writes tool calls.
        temperature: of calls that name none.
    """

    def __init__(self, engine: RolloutEngine, chat: Chat | None, text: Chat, context: int, call_format: str,
                 temperature: float):
        self.engine, self.chat, self.text, self.context = engine, chat, text, context
        self.call_format, self.temperature = call_format, temperature
        self.response_tokens = self.turn_tokens = context
        self.num_answers = 0

    # ---- what a caller with a memory does otherwise

    def find(self, said: Said, tools: Any = ()) -> Thread:
        """The conversation that a call goes on with."""
        return Thread("", self.begin(tools))

    def sampling(self, call: Call) -> tuple[float, int | None]:
        """Temperature and seed of a call."""
        return self.temperature if call.temperature is None else call.temperature, call.seed

    @contextmanager
    def answering(self, call: Call) -> Iterator[None]:
        """Around the work on one answer. Raises ApiError when there is to be none."""
        yield

    def keep(self, thread: Thread, said: Said, action: Action) -> None:
        """Remember a response."""

    def too_long(self) -> ApiError:
        """The error for a prompt that leaves no room for a response."""
        return ApiError(f"The prompt leaves no room for a response in a context of {self.context} tokens, of which "
                        f"{self.response_tokens} are for all responses and what comes between them.",
                        code="context_length_exceeded")

    def too_large(self, max_bytes: int) -> ApiError:
        """The error for a call that is not read."""
        return ApiError(f"The body must have at most {max_bytes} bytes.", code="request_too_large", status=413)

    # ---- calls

    def begin(self, tools: Any) -> Conversation:
        """An empty conversation."""
        return Conversation(self.chat or self.text, tools, self.context, self.response_tokens)

    async def answer_chat(self, call: ChatCall) -> Answer:
        """The answer to a chat call. Raises ApiError."""
        if self.chat is None:
            raise ApiError("The model has no chat template: /v1/completions takes plain prompts.", "messages")
        with self.answering(call):
            thread = self.find(call.messages, call.tools)
            new = call.messages[len(thread.said):]
            try:
                room = thread.conversation.hear(new)
            except EnvironmentFailure as failure:  # its template refuses them
                raise ApiError(failure.text, "messages") from None
            prompt_ids, completion, text, action = await self._sampled(thread, call, room)
            calls: list[ToolCall] = []
            if call.read_calls and completion.finish_reason == "stop":
                schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in call.tools}
                found = calls_in(action, self.call_format, schemas)
                calls = [one for one in found if isinstance(one, ToolCall)]
                if len(calls) < len(found):  # one that can't be read: the caller gets it as text
                    calls = []
                elif calls:
                    text = text_before_calls(action, self.call_format)
            said: dict[str, Any] = {"role": "assistant", "content": text}
            if calls:
                said["tool_calls"] = [{"function": {"name": one.name, "arguments": one.arguments}} for one in calls]
            self.keep(thread, [*call.messages, said], action)
            return self._counted(Answer(0, prompt_ids, completion, text, calls))

    async def answer_text(self, call: TextCall) -> list[Answer]:
        """The answers to a text call, one a prompt. Raises ApiError."""
        work = self._scored if call.echo else self._continued
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(work(prompt, call)) for prompt in call.prompts]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _continued(self, prompt: str | list[int], call: TextCall) -> Answer:
        with self.answering(call):
            thread = self.find(prompt)
            rest: Any = prompt[len(thread.said):]
            room = thread.conversation.feed(self._piece(rest, thread), [{"role": "user", "content": rest}], [])
            prompt_ids, completion, text, action = await self._sampled(thread, call, room)
            said = prompt + text if isinstance(prompt, str) else thread.conversation.rows[-1].ids
            self.keep(thread, said, action)
            return self._counted(Answer(0, prompt_ids, completion, text))

    async def _scored(self, prompt: str | list[int], call: TextCall) -> Answer:
        """Log-probs of a prompt, and the next token if the call asks for one."""
        with self.answering(call):
            ids = self._piece(prompt, None).ids
            self._check(len(ids))
            temperature, seed = self.sampling(call)
            completion = await self._sample(Request(ids, 1, temperature, seed, score=call.log_probs))
            scores = completion.prompt_scores
            if not call.max_tokens:
                completion = replace(completion, token_ids=[], log_probs=[], versions=[], finish_reason="length")
            return self._counted(Answer(0, ids, completion, self.text.plain(completion.token_ids), scores=scores))

    def _piece(self, prompt: str | list[int], thread: Thread | None) -> Continuation:
        """Ids of a prompt, or of what comes after that of a thread. Text may spell control tokens here."""
        if isinstance(prompt, list):
            vocabulary = len(self.text.tokenizer)
            if not all(0 <= token < vocabulary for token in prompt):
                raise ApiError(f"prompt must have token ids from 0 to {vocabulary - 1}.", "prompt")
            return Continuation(prompt, "", False)
        message = {"role": "user", "content": prompt}
        if thread is None or not thread.conversation.rows:
            return self.text.opening([message], ())
        return self.text.following("", [], [message], ())

    def _check(self, tokens: int) -> None:
        if not tokens:
            raise ApiError("The prompt has no tokens.", "prompt")
        if tokens >= self.context:
            raise self.too_long()

    async def _sampled(self, thread: Thread, call: Call, room: int) -> tuple[list[int], Completion, str, Action]:
        """Ids fed, what was sampled after them, its text, and the action that the conversation made of it."""
        conversation = thread.conversation
        thread.busy = True
        try:
            ids = conversation.rows[-1].ids
            if room < 1:
                raise self.too_long()
            self._check(len(ids))
            temperature, seed = self.sampling(call)
            most = min(room, self.turn_tokens, call.max_tokens or room)
            completion = await self._sample(Request(ids, most, temperature, seed))
        except BaseException:
            conversation.take_back()
            raise
        finally:
            thread.busy = False
        completion, text = self._stopped(completion, call.stop, len(ids))
        action = conversation.say(completion)
        conversation.answered(Reply([], AGENT))
        return ids, completion, text, action

    async def _sample(self, request: Request) -> Completion:
        completion = await asyncio.wrap_future(self.engine.submit(request))
        if completion.finish_reason == "aborted":
            raise ApiError("The engine gave the request up.", status=503, kind="server_error")
        return completion

    def _stopped(self, completion: Completion, stop: tuple[str, ...], prompt_tokens: int) -> tuple[Completion, str]:
        """What was sampled until the first stop text was complete, and the text before it."""
        ids, text = completion.token_ids, self.text.plain(completion.token_ids)
        places = [place for place in (text.find(one) for one in stop) if place >= 0]
        if not places:
            return completion, text
        first = min(places)
        ends = first + min(len(one) for one in stop if text.startswith(one, first))
        low, high = 1, len(ids)
        while low < high:  # fewest tokens whose text has it all; a part of a character's bytes is another one
            middle = (low + high) // 2
            whole = self.text.plain(ids[:middle])[:ends] == text[:ends]
            low, high = (low, middle) if whole else (middle + 1, high)
        experts = None if completion.experts is None else completion.experts[:prompt_tokens + low - 1]
        kept = Completion(ids[:low], completion.log_probs[:low], completion.versions[:low], "stop", experts)
        return kept, text[:first]

    def _counted(self, answer: Answer) -> Answer:
        self.num_answers += 1
        return replace(answer, number=self.num_answers)


class EpisodeCaller(Caller):
    """The agent of one episode: what it calls is kept as one trajectory.

    Args:
        engine, chat, text, context, call_format, temperature: as of Caller; every call is sampled at this temperature.
        response_tokens: most tokens of a row's response. turn_tokens: most tokens of one response.
        seed_of: seed of sampling by number of call. max_calls: of the episode.
        holds: told of the tokens that the episode holds.
    """

    def __init__(self, engine: RolloutEngine, chat: Chat, text: Chat, context: int, call_format: str,
                 temperature: float, *, response_tokens: int, turn_tokens: int, seed_of: Any, max_calls: int,
                 holds: Any):
        super().__init__(engine, chat, text, context, call_format, temperature)
        self.response_tokens, self.turn_tokens = response_tokens, turn_tokens
        self._seed_of, self._max_calls, self._holds = seed_of, max_calls, holds
        self.threads = Threads(self.begin)
        self.turns: list[Turn] = []
        self.limit = ""
        """Why a call was refused: `max_turns`, `overflow`; empty while none was."""
        self._begun = self._under_way = 0
        self._numbers = itertools.count()
        self.waited_s, self._since = 0.0, 0.0

    @property
    def finish_reason(self) -> str:
        """How the episode ended, if it did not fail."""
        cut = self.turns and self.turns[-1].action.finish_reason == "length"
        return self.limit or ("length" if cut else "done")

    def find(self, said: Said, tools: Any = ()) -> Thread:
        return self.threads.find(said, tools)

    def sampling(self, call: Call) -> tuple[float, int | None]:
        """What training assumes, whatever the call says."""
        return self.temperature, self._seed_of(next(self._numbers))

    @contextmanager
    def answering(self, call: Call) -> Iterator[None]:
        if isinstance(call, TextCall) and call.echo:
            raise ApiError("echo must be false in an episode.", "echo", "unsupported_value")
        if self._begun == self._max_calls:
            self.limit = self.limit or "max_turns"
            raise ApiError(f"An episode has at most {self._max_calls} calls (environment.max_turns).",
                           code="max_turns")
        self._begun += 1
        loop = asyncio.get_running_loop()
        if not self._under_way:
            self._since = loop.time()
        self._under_way += 1
        try:
            yield
        except BaseException:
            self._begun -= 1
            raise
        finally:
            self._under_way -= 1
            if not self._under_way:
                self.waited_s += loop.time() - self._since

    def keep(self, thread: Thread, said: Said, action: Action) -> None:
        self.threads.spoke(thread, said)
        heard = thread.conversation.rows[-1].turns[-1]["observation"]
        self.turns.append(Turn(AGENT, heard, action, {}, {}))
        self._holds(self.threads)

    def too_long(self) -> ApiError:
        self.limit = self.limit or "overflow"
        return super().too_long()

    def too_large(self, max_bytes: int) -> ApiError:
        return self.too_long()  # what an episode may send is bounded by its context
