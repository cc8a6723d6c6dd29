"""Environments behind an OpenEnv server: one WebSocket session for each that runs."""

import asyncio
import contextlib
import importlib.util
import json
import time
from typing import Any
from urllib.parse import urlsplit

from hybridrl.environments.adapters.openenv_server import Server
from hybridrl.environments.environment import Action, AsyncEnvironment, Step, Task
from hybridrl.errors import ConfigError, extra

KEY = "environment.options"
START_TIMEOUT_S = 60.0
"""Longest connecting, the start of the server included."""
FULL = "CAPACITY_REACHED"
"""What a server answers that has no place for another session."""
CAPACITY_PATIENCE_S = 1.0
"""Time that a server has to notice that a session ended before it has no place for another."""
ENDING_S = 5.0
"""Longest end of a server that refuses connections: it closes them first."""
MAX_MESSAGE_BYTES = 4 << 20


class OpenEnv(AsyncEnvironment):
    """Plays the environment of an OpenEnv server; rewards are those of its steps.

    Args:
        url: of a server that runs, http or ws.
        server: `package.module:app` in place of it: what the package's `create_app` made. It is started on loopback,
            one for each engine, and ends with it.
        field: field of the action that takes the response; empty: the response is the action, as a JSON object.
        action: more fields of each action.
        reset: more arguments of the environment's reset, which gets the task's seed.
        show: field of the observation that is shown; empty: all, as JSON.
    """

    def __init__(self, url: str = "", server: str = "", field: str = "message", action: dict[str, Any] | None = None,
                 reset: dict[str, Any] | None = None, show: str = ""):
        self._url, self._app, self._field, self._show = url, server, field, show
        self._action, self._reset = action or {}, reset or {}
        self._socket: Any = None
        self._server: Server | None = None

    @staticmethod
    def check_options(url: str = "", server: str = "", field: str = "message", **_: Any) -> None:
        """Raises ConfigError unless there is one server to play with."""
        if bool(url) == bool(server):
            raise ConfigError(f"{KEY}: environment.name=openenv needs one of url and server, got url={url!r} and "
                              f"server={server!r}.")
        parts = urlsplit(url)
        if url and (parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname):
            raise ConfigError(f"{KEY}.url must be an http or ws address, got {url!r}.")
        with extra("openenv", "environment.name=openenv"):
            import websockets  # noqa: F401

            if server:
                import openenv.core  # noqa: F401
        module, __, name = server.partition(":")
        if server and not (name and _exists(module)):
            raise ConfigError(f"{KEY}.server must be package.module:app of a module that can be imported, got "
                              f"{server!r}.")

    async def reset(self, task: Task) -> str:  # type: ignore[override]
        answer = await self._begun(self._reset | {"seed": task.seed})
        if answer["type"] == "error":
            raise RuntimeError(_said(answer))
        return self._text(answer["data"])

    async def step(self, action: Action) -> Step:  # type: ignore[override]
        try:
            fields = {self._field: str(action)} if self._field else _object(action)
        except (ValueError, RecursionError) as error:
            return Step(f"That is no action: {error}.", info={"refused": 1})
        answer = await self._ask("step", self._action | fields)
        if answer["type"] == "error":
            if answer["data"].get("code") != "VALIDATION_ERROR":
                raise RuntimeError(_said(answer))
            return Step(f"That is no action: {_faults(answer['data'])}", info={"refused": 1})
        data = answer["data"]
        return Step(self._text(data), float(data.get("reward") or 0.0), bool(data.get("done")), {"refused": 0})

    async def close(self) -> None:  # type: ignore[override]
        await self._hang_up()
        if self._server is not None:
            self._server.leave()
        self._server = None

    async def _begun(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The answer to a reset, in the session at hand or a new one: servers close those that were idle for long."""
        from websockets.exceptions import ConnectionClosed

        patience = time.monotonic() + CAPACITY_PATIENCE_S
        while True:
            was_idle = self._socket is not None
            await self._connect()
            try:
                answer = await self._ask("reset", arguments)
                if answer["data"].get("code") != FULL or time.monotonic() > patience:
                    return answer
            except ConnectionClosed:
                if not was_idle:
                    raise
            await self._hang_up()
            await asyncio.sleep(0.1)

    async def _hang_up(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        self._socket = None

    async def _connect(self) -> None:
        if self._socket is not None:
            return
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidStatus

        if self._server is not None and self._server.ended():
            self._server.leave()
            self._server = None
        if self._app and self._server is None:
            self._server = Server.join(self._app)
        url = self._server.url if self._server else self._url
        address = "ws" + url.removeprefix("http").removeprefix("ws").rstrip("/") + "/ws"
        loopback = urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
        try:
            self._socket = await connect(address, open_timeout=START_TIMEOUT_S, max_size=MAX_MESSAGE_BYTES,
                                         ping_interval=None,  # nobody answers while the engine's loop is not running
                                         proxy=None if loopback else True)
        except Exception as error:
            why = await self._ended() if not isinstance(error, InvalidStatus) else ""
            raise ConnectionError(f"no session with the OpenEnv server {self._app or url}: {why or error}") from error

    async def _ended(self) -> str:
        """How the server that this process started ended, if it does soon."""
        patience = time.monotonic() + ENDING_S
        while self._server is not None and not self._server.ended() and time.monotonic() < patience:
            await asyncio.sleep(0.02)
        return self._server.ended() if self._server else ""

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):  # it may have said why
            await self._socket.send(json.dumps({"type": kind, "data": data}))
        return json.loads(await self._socket.recv())

    def _text(self, data: dict[str, Any]) -> str:
        observation = data["observation"]
        return str(observation[self._show]) if self._show else json.dumps(observation, ensure_ascii=False)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _object(response: str) -> dict[str, Any]:
    """The JSON object that a response ends with."""
    text = response.rpartition("</think>")[2].strip().removesuffix("```").rstrip()
    start = text.find("{")
    value = json.loads(text[start:]) if start >= 0 else None
    if not isinstance(value, dict):
        raise ValueError("a JSON object is needed")
    return value


def _said(answer: dict[str, Any]) -> str:
    code, message = answer["data"].get("code"), answer["data"].get("message")
    advice = "; environment.max_running_episodes must be at most what it serves" if code == FULL else ""
    return f"the OpenEnv server answered {code}: {message}{advice}"


def _faults(data: dict[str, Any]) -> str:
    """What a server has against an action, by field."""
    faults = [f"{'.'.join(map(str, fault.get('loc', ())))}: {fault.get('msg')}" for fault in data.get("errors", [])]
    return ("; ".join(faults) or str(data.get("message")))[:500]
