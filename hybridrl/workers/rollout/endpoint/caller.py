"""Who holds a key: from calls to requests of the rollout engine, and from completions to answers."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from hybridrl.environments.environment import AGENT, Action, Turn
from hybridrl.environments.record import EnvironmentFailure, Reply
from hybridrl.environments.tools.calls import Call as ToolCall
from hybridrl.environments.tools.calls import calls_in, text_before_calls
from hybridrl.workers.rollout.chat import Chat, Continuation
from hybridrl.workers.rollout.conversation import Conversation
from hybridrl.workers.rollout.endpoint.answers import Answer
from hybridrl.workers.rollout.endpoint.calls import ApiError, Call, ChatCall, TextCall
from hybridrl.workers.rollout.endpoint.telling import Piece, Progress, Telling, cut, fewest_tokens, first_stop
from hybridrl.workers.rollout.endpoint.threads import Said, Thread, Threads
from hybridrl.workers.rollout.engine import Completion, Request, RolloutEngine

Say = Callable[[Piece], None]
"""Takes the pieces of answers while they are sampled."""


class _Sampled(NamedTuple):
    """Ids fed, what was sampled after them, its text, the action that the conversation made of it."""

    prompt_ids: list[int]
    completion: Completion
    text: str
    action: Action
    telling: Telling


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

    def sampling(self, call: Call, choice: int = 0) -> tuple[float, int | None]:
        """Temperature and seed of one choice of a call."""
        temperature = self.temperature if call.temperature is None else call.temperature
        return temperature, None if call.seed is None else (call.seed + choice) % 2**63

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

    async def answer_chat(self, call: ChatCall, say: Say | None = None) -> list[Answer]:
        """The answers to a chat call, `call.n` of them; `say` takes their pieces as they come. Raises ApiError."""
        if self.chat is None:
            raise ApiError("The model has no chat template: /v1/completions takes plain prompts.", "messages")
        return await _together(self._replied(call, index, say) for index in range(call.n))

    async def answer_text(self, call: TextCall, say: Say | None = None) -> list[Answer]:
        """The answers to a text call, `call.n` for each prompt; `say` as of `answer_chat`. Raises ApiError."""
        if call.echo:
            return await _together(self._scored(prompt, call) for prompt in call.prompts)
        prompts = [prompt for prompt in call.prompts for _ in range(call.n)]
        return await _together(self._continued(prompt, call, index, say) for index, prompt in enumerate(prompts))

    async def _replied(self, call: ChatCall, index: int, say: Say | None) -> Answer:
        with self.answering(call):
            thread = self.find(call.messages, call.tools)
            try:
                room = thread.conversation.hear(call.messages[len(thread.said):])
            except EnvironmentFailure as failure:  # its template refuses them
                raise ApiError(failure.text, "messages") from None
            sampled = await self._sampled(thread, call, room, self._telling(call, index, say), lambda text: [
                *call.messages, {"role": "assistant", "content": text}])
            calls: list[ToolCall] = []
            text, completion = sampled.text, sampled.completion
            if call.read_calls and completion.finish_reason == "stop":
                schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in call.tools}
                found = calls_in(sampled.action, self.call_format, schemas)
                calls = [one for one in found if isinstance(one, ToolCall)]
                if len(calls) < len(found):  # one that can't be read: the caller gets it as text
                    calls = []
                elif calls:
                    text = text_before_calls(sampled.action, self.call_format)
            text = sampled.telling.finish(completion, text)
            said: dict[str, Any] = {"role": "assistant", "content": text}
            if calls:
                said["tool_calls"] = [{"function": {"name": one.name, "arguments": one.arguments}} for one in calls]
            self.keep(thread, [*call.messages, said], sampled.action)
            return self._counted(Answer(0, sampled.prompt_ids, completion, text, calls))

    async def _continued(self, prompt: str | list[int], call: TextCall, index: int, say: Say | None) -> Answer:
        with self.answering(call):
            thread = self.find(prompt)
            rest: Any = prompt[len(thread.said):]
            room = thread.conversation.feed(self._piece(rest, thread), [{"role": "user", "content": rest}], [])

            def said(text: str) -> Said:
                return prompt + text if isinstance(prompt, str) else thread.conversation.rows[-1].ids

            sampled = await self._sampled(thread, call, room, self._telling(call, index, say), said)
            text = sampled.telling.finish(sampled.completion, sampled.text)
            self.keep(thread, said(text), sampled.action)
            return self._counted(Answer(0, sampled.prompt_ids, sampled.completion, text))

    async def _scored(self, prompt: str | list[int], call: TextCall) -> Answer:
        """Log-probs of a prompt, and the next token if the call asks for one."""
        with self.answering(call):
            ids = self._piece(prompt, None).ids
            self._check(len(ids))
            temperature, seed = self.sampling(call)
            request = Request(ids, 1, temperature, seed, score=call.log_probs)
            completion = await asyncio.wrap_future(self.engine.submit(request))
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

    def _telling(self, call: Call, index: int, say: Say | None) -> Telling:
        reads = isinstance(call, ChatCall) and call.read_calls
        return Telling(self.text.plain, self.text.whole, call.stop, self.call_format if reads else None, say, index)

    async def _sampled(self, thread: Thread, call: Call, room: int, telling: Telling, said: Callable[[str], Said]
                       ) -> _Sampled:
        """Sample a response, and have the conversation take it.

        Of one whose caller hangs up, the conversation takes what was told; `said` is what the caller knows then.
        """
        conversation = thread.conversation
        thread.busy = True
        try:
            ids = conversation.rows[-1].ids
            if room < 1:
                raise self.too_long()
            self._check(len(ids))
            temperature, seed = self.sampling(call, telling.index % call.n)
            most = min(room, self.turn_tokens, call.max_tokens or room)
            completion = await self._sample(Request(ids, most, temperature, seed), telling)
        except asyncio.CancelledError:
            told = self._told(telling, len(ids))
            if told is None:
                conversation.take_back()
            else:
                action = conversation.say(told)
                conversation.answered(Reply([], AGENT, info={"hung_up": True}))
                self.keep(thread, said(telling.told), action)
            raise
        except BaseException:
            conversation.take_back()
            raise
        finally:
            thread.busy = False
        text = self.text.plain(completion.token_ids)
        stop = first_stop(text, call.stop)
        if stop is not None:
            fewest = fewest_tokens(text[:stop[1]], completion.token_ids, self.text.plain)
            completion, text = cut(completion, fewest, len(ids)), text[:stop[0]]
        action = conversation.say(completion)
        conversation.answered(Reply([], AGENT, info={"hung_up": False} if call.stream else {}))
        return _Sampled(ids, completion, text, action, telling)

    async def _sample(self, request: Request, telling: Telling) -> Completion:
        """What the engine samples, until a stop text ends it; pieces of it are told meanwhile."""
        if telling.say is None and not telling.stop:
            completion = await asyncio.wrap_future(self.engine.submit(request))
        else:
            completion = await self._listened(request, telling)
        if completion.finish_reason == "aborted":
            raise ApiError("The engine gave the request up.", status=503, kind="server_error")
        return completion

    async def _listened(self, request: Request, telling: Telling) -> Completion:
        progress, ended = Progress(), False
        future = self.engine.submit(request, progress)
        future.add_done_callback(progress.wake)
        try:
            while not future.done():
                await progress.news()
                latest = progress.latest
                if latest is None or ended or future.done():
                    continue
                ended = telling.hear(latest)
                if ended and self.engine.mixture is None:  # the experts of a response come with its end
                    return replace(latest, finish_reason="stop")
            return future.result()
        finally:
            future.cancel()

    def _told(self, telling: Telling, prompt_tokens: int) -> Completion | None:
        """What was sampled of the text that a caller got of a response before it hung up, if it got any."""
        if telling.heard is None or not telling.told or self.engine.mixture is not None:
            return None
        return cut(telling.heard, fewest_tokens(telling.told, telling.heard.token_ids, self.text.plain), prompt_tokens)

    def _counted(self, answer: Answer) -> Answer:
        self.num_answers += 1
        return replace(answer, number=self.num_answers)


class EpisodeCaller(Caller):
    """The agent of one episode: what it calls is kept as one trajectory.

    Args:
        engine, chat, text, context, call_format, temperature: as of Caller; every call is sampled at this temperature.
        response_tokens: most tokens of a row's response. turn_tokens: most tokens of one response.
        seed_of: seed of sampling by number of call. max_calls: of the episode.
        holds: told of the tokens that the episode holds. turn_timeout_s: longest time between calls.
    """

    def __init__(self, engine: RolloutEngine, chat: Chat, text: Chat, context: int, call_format: str,
                 temperature: float, *, response_tokens: int, turn_tokens: int, seed_of: Any, max_calls: int,
                 holds: Any, turn_timeout_s: float):
        super().__init__(engine, chat, text, context, call_format, temperature)
        self.response_tokens, self.turn_tokens = response_tokens, turn_tokens
        self._seed_of, self._max_calls, self._holds = seed_of, max_calls, holds
        self.threads = Threads(self.begin)
        self.turns: list[Turn] = []
        self.limit = ""
        """Why a call was refused: `max_turns`, `overflow`; empty while none was."""
        self._under_way = 0
        self._turn_timeout_s, self._patience = turn_timeout_s, asyncio.timeout(turn_timeout_s)
        self._numbers = itertools.count()
        self.waited_s, self._since = 0.0, 0.0

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Around the agent's run, which ends when it lets too much time pass without a call.

        Raises EnvironmentFailure then.
        """
        try:
            async with self._patience:
                yield
        except TimeoutError:
            if self._patience.expired():
                raise EnvironmentFailure("timeout", f"run: neither a call nor a result within {self._turn_timeout_s:g} "
                                                    "s") from None
            raise

    def _wait(self, until: float | None) -> None:
        with suppress(RuntimeError):  # the run is over, its last calls are ending
            self._patience.reschedule(until)

    @property
    def finish_reason(self) -> str:
        """How the episode ended, if it did not fail."""
        cut = self.turns and self.turns[-1].action.finish_reason == "length"
        return self.limit or ("length" if cut else "done")

    def find(self, said: Said, tools: Any = ()) -> Thread:
        return self.threads.find(said, tools)

    def sampling(self, call: Call, choice: int = 0) -> tuple[float, int | None]:
        """What training assumes, whatever the call says."""
        return self.temperature, self._seed_of(next(self._numbers))

    @contextmanager
    def answering(self, call: Call) -> Iterator[None]:
        if isinstance(call, TextCall) and call.echo:
            raise ApiError("echo must be false in an episode.", "echo", "unsupported_value")
        if len(self.turns) + self._under_way >= self._max_calls:
            self.limit = self.limit or "max_turns"
            raise ApiError(f"An episode has at most {self._max_calls} calls (environment.max_turns).",
                           code="max_turns")
        loop = asyncio.get_running_loop()
        if not self._under_way:
            self._since = loop.time()
            self._wait(None)
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self.waited_s += loop.time() - self._since
                self._wait(loop.time() + self._turn_timeout_s)

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


async def _together(work: Iterable[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """Answers that are worked on at the same time; the first error ends all of them."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
