"""A frozen model behind OpenAI's API, for whoever has the key."""

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from pathlib import Path

from hybridrl.config import ServeConfig
from hybridrl.dispatch import to_all
from hybridrl.models import load_tokenizer
from hybridrl.workers.base import Worker, WorkerContext
from hybridrl.workers.rollout.chat import Chat
from hybridrl.workers.rollout.endpoint.caller import Caller
from hybridrl.workers.rollout.endpoint.server import Server
from hybridrl.workers.rollout.frozen import frozen_engine

STOP_TIMEOUT_S = 10.0
"""Longest wait for calls to end when serving stops."""


class ServedWorker(Worker):
    """The engine in this thread, the server in an event loop beside it.

    Raises ModelError when the folder can't be used.
    """

    def __init__(self, context: WorkerContext, cfg: ServeConfig):
        super().__init__(context)
        self.cfg, rollout = cfg, cfg.policy.rollout
        tokenizer = load_tokenizer(cfg.policy.model)
        self.engine = frozen_engine(cfg.policy.model, rollout, tokenizer, self.device, cfg.seed)
        text = Chat(tokenizer, self.engine.stop_ids, chat_template=False)
        chat = Chat(tokenizer, self.engine.stop_ids, True, cfg.template_options) if tokenizer.chat_template else None
        self._caller = Caller(self.engine, chat, text, rollout.context, cfg.call_format, rollout.temperature)
        self._server = Server(text.whole, cfg.model_name or Path(cfg.policy.model.path).name)

    @to_all
    def serve(self) -> None:
        """Print where and with what key as a line of JSON, and answer calls until the process is interrupted.

        Raises OSError when the address can't be listened on.
        """
        loop, ended = asyncio.new_event_loop(), asyncio.Event()
        done: Future[None] = Future()
        thread = threading.Thread(target=lambda: loop.run_until_complete(self._listen(ended, done)), daemon=True)
        thread.start()
        try:
            with _ended_by_interrupt(done):
                self.engine.drive([done])
            done.result()
        finally:
            if thread.is_alive():
                loop.call_soon_threadsafe(ended.set)
            thread.join(STOP_TIMEOUT_S)

    async def _listen(self, ended: asyncio.Event, done: Future[None]) -> None:
        try:
            await self._server.start(self.cfg.host, self.cfg.port)
            async with self._server.admitted(self._caller, self.cfg.api_key) as key:
                access = {"base_url": self._server.url, "api_key": key, "model": self._server.model}
                print(json.dumps(access), flush=True)
                await ended.wait()
        except BaseException as error:  # raised by `serve`
            with suppress(InvalidStateError):  # interrupted before
                done.set_exception(error)
        finally:
            await self._server.close()

    def close(self) -> None:
        self.engine.close()


@contextmanager
def _ended_by_interrupt(done: Future[None]) -> Iterator[None]:
    """Inside, the first Ctrl-C ends `done`, so that the engine finishes its step; a second one interrupts at once.

    Also where a script started this process in the background, which leaves SIGINT ignored. In another than the main
    thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def end(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        with suppress(InvalidStateError):
            done.set_exception(KeyboardInterrupt())

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
