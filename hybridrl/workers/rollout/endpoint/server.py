"""An HTTP server in an event loop that answers whoever has a key.

    POST /v1/chat/completions    POST /v1/completions    GET /v1/models

A caller that hangs up ends its request in the engine, and so does a key that is withdrawn.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from aiohttp import web

from hybridrl.workers.rollout.endpoint.answers import (
    Answer,
    ChatEvents,
    Decode,
    TextEvents,
    chat_answer,
    text_answer,
)
from hybridrl.workers.rollout.endpoint.caller import Caller, Say
from hybridrl.workers.rollout.endpoint.calls import ApiError, chat_call, parse, text_call
from hybridrl.workers.rollout.endpoint.telling import Piece

MAX_BODY_BYTES = 16 << 20
"""Longest call, where nothing else is said."""
REFUSAL_DELAY_S = 0.01
"""A refusal takes this long: an agent that asks again and again must not take the event loop from the others."""

END_TIMEOUT_S = 5.0
"""Longest wait for calls that are cancelled."""


class Server:
    """OpenAI's API for some callers.

    Args:
        decode: token ids to text, with special tokens.
        model: the one name that `/v1/models` lists; calls may name any.
        max_body_bytes: longest call.
    """

    def __init__(self, decode: Decode, model: str, max_body_bytes: int = MAX_BODY_BYTES):
        self.model, self.url, self.max_body_bytes = model, "", max_body_bytes
        self._decode, self._created = decode, int(time.time())
        self._callers: dict[str, Caller] = {}
        self._tasks: dict[str, dict[asyncio.Task, web.Request]] = {}
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen; `url` says where. Port 0 takes any free one. Raises OSError when the port is taken."""
        app = web.Application(client_max_size=self.max_body_bytes, middlewares=[self._in_shape])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._text)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._models)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, handle_signals=False,
                                     shutdown_timeout=END_TIMEOUT_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        self.url = f"http://{host}:{self._runner.addresses[0][1]}/v1"

    @asynccontextmanager
    async def admitted(self, caller: Caller, key: str = "") -> AsyncIterator[str]:
        """A key that is good meanwhile, a new secret one unless it is given; its calls end with it."""
        key = key or secrets.token_urlsafe(24)
        self._callers[key], self._tasks[key] = caller, {}
        try:
            yield key
        finally:
            del self._callers[key]
            tasks = self._tasks.pop(key)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=END_TIMEOUT_S)

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    # ---- routes

    @web.middleware
    async def _in_shape(self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
                        ) -> web.StreamResponse:
        """Who calls, and errors as OpenAI writes them."""
        try:
            key = self._key(request)
            caller = self._callers[key]
            task = asyncio.current_task()
            assert task is not None, "handlers run in tasks"
            left = [other for other, call in self._tasks[key].items() if _hung_up(call)]
            self._tasks[key][task] = request
            try:
                if left:  # this call may go on from what they were told
                    await asyncio.wait(left, timeout=END_TIMEOUT_S)
                return await handler(request)
            finally:
                if key in self._tasks:
                    self._tasks[key].pop(task, None)
        except web.HTTPRequestEntityTooLarge:
            error = caller.too_large(self.max_body_bytes)
        except web.HTTPException as found:
            error = ApiError(f"{request.method} {request.path} is not offered here: {found.reason}.",
                             status=found.status)
        except Exception as found:
            error = _as_refusal(found)
        await asyncio.sleep(REFUSAL_DELAY_S)
        return web.json_response(error.body, status=error.status)

    def _key(self, request: web.Request) -> str:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or key not in self._callers:
            raise ApiError("The API key is unknown, or its episode is over.", code="invalid_api_key", status=401)
        return key

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        call, caller = chat_call(parse(await request.read())), self._callers[self._key(request)]
        chat_id = f"chatcmpl-{secrets.token_hex(12)}"
        if call.stream:
            return await _streamed(request, ChatEvents(call, self._decode, chat_id), partial(caller.answer_chat, call))
        return web.json_response(chat_answer(call, await caller.answer_chat(call), self._decode, chat_id))

    async def _text(self, request: web.Request) -> web.StreamResponse:
        call, caller = text_call(parse(await request.read())), self._callers[self._key(request)]
        text_id = f"cmpl-{secrets.token_hex(12)}"
        if call.stream:
            return await _streamed(request, TextEvents(call, self._decode, text_id), partial(caller.answer_text, call))
        return web.json_response(text_answer(call, await caller.answer_text(call), self._decode, text_id))

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self.model, "object": "model", "created": self._created, "owned_by": "hybridrl"}
        if "model" not in request.match_info:
            return web.json_response({"object": "list", "data": [model]})
        if request.match_info["model"] != self.model:
            raise ApiError(f"There is no model {request.match_info['model'][:80]!r}, only {self.model!r}.", "model",
                           "model_not_found", 404)
        return web.json_response(model)


def _hung_up(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _as_refusal(error: BaseException) -> ApiError:
    """Also of what the engine raises, which ends the run, and of a mistake of ours: no call is left hanging."""
    if isinstance(error, ApiError):
        return error
    return ApiError(f"{type(error).__name__}: {error}", status=500, kind="server_error")


async def _streamed(request: web.Request, events: ChatEvents | TextEvents,
                    answer: Callable[[Say], Coroutine[Any, Any, list[Answer]]]) -> web.StreamResponse:
    """Server-sent events while an answer is sampled, which ends when its caller hangs up.

    What goes wrong before the first of them is raised, and has a status of its own; later it is an event.
    """
    pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
    answering = asyncio.ensure_future(answer(pieces.put_nowait))
    answering.add_done_callback(lambda _: pieces.put_nowait(None))
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        piece = await pieces.get()
        if piece is None:
            answering.result()
        await response.prepare(request)
        await _send(response, *events.opening())
        while piece is not None:
            await _send(response, events.piece(piece))
            piece = await pieces.get()
        error = answering.exception()
        if error is None:
            await _send(response, *events.closing(answering.result()))
        else:
            await _send(response, _as_refusal(error).body)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
    except ConnectionError:  # the caller hung up
        pass
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
    return response


async def _send(response: web.StreamResponse, *events: dict[str, Any]) -> None:
    await response.write(b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events))
