"""Environments for the episodes of one event loop: a process each, or coroutines in the loop itself.

    session = await pool.open()
    reply = await session.reset(task)          # every call has a deadline; a failure is an EnvironmentFailure
    reply = await session.step(action)
    rewards = await session.verify("done")
    await pool.release(session)                # the next episode may use it again; one that failed is dropped
"""

import asyncio
import contextlib
import json
import os
import pickle
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any

from hybridrl import child_process
from hybridrl.environments.agent import DEFAULT_FORMAT, Access, AgentEnvironment
from hybridrl.environments.binding import BoundEnvironment, bind
from hybridrl.environments.environment import Action, Task, Turn
from hybridrl.environments.record import MAX_REPLY_BYTES, EnvironmentFailure, Record, Reply
from hybridrl.environments.worker import HEADER, READY, one_line
from hybridrl.errors import EpisodeError

START_TIMEOUT_S = 60.0
"""Longest start of the server, the import of the environment included; longest fork."""
STOP_TIMEOUT_S = 5.0
"""Time that a server has to end its children."""


class Session(ABC):
    """One environment, one episode at a time. Methods raise EnvironmentFailure; after that it is of no more use."""

    healthy = True
    """Whether it may play another episode."""

    @abstractmethod
    async def reset(self, task: Task) -> Reply:
        """Begin an episode."""

    @abstractmethod
    async def step(self, action: Action) -> Reply:
        """Take an action."""

    @abstractmethod
    async def verify(self, finish_reason: str, turns: Sequence[Turn] = ()) -> dict[str, float]:
        """Rewards of the episode by agent, on top of those of the turns; `turns` are those of `run`."""

    async def run(self, task: Task, access: Access) -> str | None:
        """Let an agent play an episode by calls to the policy, for as long as it takes; what it raised, in one line."""
        raise NotImplementedError("agents run in processes of their own")

    def alive(self) -> bool:
        """Whether it is still there after some idle time."""
        return True

    @abstractmethod
    async def dismiss(self) -> None:
        """Let the environment close."""

    @abstractmethod
    async def close(self) -> None:
        """End it, whatever it is doing."""


class EnvironmentPool:
    """Sessions with one kind of environment, reused from episode to episode.

    Args:
        name, options: as `bind` takes them.
        turn_timeout_s: longest call of one method, in seconds.
    """

    def __init__(self, name: str, options: dict[str, Any], turn_timeout_s: float):
        self._bound = bind(name, options)
        self.runs_agent = issubclass(self._bound.cls, AgentEnvironment)
        """Whether episodes are runs of an agent, which calls the policy itself."""
        self.call_format = options.get("format", DEFAULT_FORMAT)
        """How the model of such an agent writes tool calls."""
        self._server = None if self._bound.is_async else _Server(name, options)
        self._timeout_s = turn_timeout_s
        self._idle: list[Session] = []

    async def open(self) -> Session:
        """A session that is free, or a new one. Raises EpisodeError when environments can't be started at all."""
        while self._idle:
            session = self._idle.pop()
            if session.alive():
                return session
            await session.close()
        if self._server is None:
            return _LoopSession(self._bound, self._timeout_s)
        return await self._server.fork(self._timeout_s)

    async def release(self, session: Session) -> None:
        """Give a session back; one that failed is ended."""
        if session.healthy:
            self._idle.append(session)
        else:
            await session.close()

    async def close(self) -> None:
        """End all sessions and processes; environments that are idle get to close, the others are killed."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(session.dismiss() for session in idle))
        if self._server is not None:
            await self._server.close()


class _LoopSession(Session):
    """An environment of coroutines in this event loop."""

    def __init__(self, bound: BoundEnvironment, timeout_s: float):
        self._bound, self._timeout_s = bound, timeout_s
        self._environment: Any = None

    async def _call(self, work: Any) -> Any:
        """The result of a method, which is a task of its own: if it ignores being cancelled, it is left behind."""
        self.healthy = False  # until the result is here: a call may be cancelled
        task = asyncio.ensure_future(_outcome(work))
        try:
            done, _ = await asyncio.wait([task], timeout=self._timeout_s)
        finally:
            task.cancel()
        if not done:
            raise EnvironmentFailure("timeout", f"gave no result within {self._timeout_s:g} s")
        result = task.result()
        if isinstance(result, EnvironmentFailure):
            raise result
        self.healthy = True
        return result

    async def reset(self, task: Task) -> Reply:
        async def work() -> Reply:
            if self._environment is None:
                self._environment = self._bound.build()
            self._record = Record(task)
            opened = await self._environment.reset(task)
            return self._record.opened(self._environment, opened, await self._environment.state())

        return await self._call(work())

    async def step(self, action: Action) -> Reply:
        async def work() -> Reply:
            stepped = await self._environment.step(action)
            return self._record.stepped(action, stepped, await self._environment.state())

        return await self._call(work())

    async def verify(self, finish_reason: str, turns: Sequence[Turn] = ()) -> dict[str, float]:
        async def work() -> dict[str, float]:
            return self._record.verified(await self._environment.verify(self._record.ended(finish_reason, turns)))

        return await self._call(work())

    async def dismiss(self) -> None:
        if self._environment is not None:
            with contextlib.suppress(EnvironmentFailure):
                await self._call(self._environment.close())

    async def close(self) -> None:
        await self.dismiss()


async def _outcome(work: Any) -> Any:
    """What a coroutine of an environment returns, or the failure that it came to."""
    try:
        return await work
    except EnvironmentFailure as failure:
        return failure
    except BaseException as error:  # sys.exit would end the loop, a cancellation of its own would pass for ours
        return EnvironmentFailure("raised", one_line(error))


def _close_unused(forked: asyncio.Future) -> None:
    """Close a connection that nobody waits for any more; the process at its other end then ends itself."""
    if not forked.cancelled() and forked.exception() is None:
        forked.result()[0].close()


class _Server:
    """The process that forks environments; started on first use, and again when it dies."""

    def __init__(self, name: str, options: dict[str, Any]):
        self._arguments = (name, json.dumps(options))
        self._lock = asyncio.Lock()
        self._process: Any = None
        self._lifelines: list[int] = []
        self._talks: set[asyncio.Future] = set()

    def _whole(self, talk: Coroutine[Any, Any, Any]) -> asyncio.Future:
        """Talk with the process to the end, even when the asker is cancelled: an answer left over would be taken for
        the next one's."""
        future = asyncio.ensure_future(talk)
        self._talks.add(future)
        future.add_done_callback(self._talks.discard)
        return future

    async def fork(self, timeout_s: float) -> "_ProcessSession":
        """A session in a new process."""
        for attempt in (1, 2):
            forked = self._whole(self._forked())
            try:
                ours, pid, process = await asyncio.shield(forked)
            except asyncio.CancelledError:
                forked.add_done_callback(_close_unused)
                raise
            except (OSError, ValueError) as error:
                if attempt == 2:
                    raise EpisodeError(f"environment processes can't be started: {error!r}.") from error
            else:
                reader, writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 16)
                return _ProcessSession(self, process, pid, reader, writer, timeout_s)
        raise AssertionError("not reached")

    async def _forked(self) -> tuple[socket.socket, int, Any]:
        ours, theirs = socket.socketpair()
        try:
            async with self._lock:
                await self._started()
                try:
                    socket.send_fds(self._control, [b"fork"], [theirs.fileno()])
                    return ours, int(await self._reply()), self._process
                except (OSError, ValueError):  # it died, and is started anew by the next fork
                    self._stop()
                    raise
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    async def end(self, pid: int, server: Any) -> str:
        """Kill a child with all it started; how it had ended."""
        return await asyncio.shield(self._whole(self._ended(pid, server)))

    async def _ended(self, pid: int, server: Any) -> str:
        async with self._lock:
            if server is not self._process:  # its parent died: nobody else knows the process
                child_process.kill_group(pid)
                return "its server died"
            try:
                self._control.send(str(pid).encode())
                return child_process.exit_status(int(await self._reply()))
            except (OSError, ValueError):
                child_process.kill_group(pid)
                return "its server died"

    async def _started(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._stop()
        self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        try:
            self._process, lifeline = child_process.start(
                "hybridrl.environments.worker", [theirs.fileno()], self._arguments)
            self._lifelines.append(lifeline)
        finally:
            theirs.close()
        self._control.setblocking(False)
        try:
            said = await self._reply()
        except OSError as ended:
            said = str(ended).encode()
        if said != READY:
            self._stop()
            raise EpisodeError(f"environment {self._arguments[0]!r} can't start: {said.decode()}")

    async def _reply(self) -> bytes:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(START_TIMEOUT_S):
            message = await loop.sock_recv(self._control, 4096)
        if not message:
            raise ConnectionResetError("the server of environment processes ended")
        return message

    def _stop(self) -> None:
        """End the server and its children; those of one that died go on, for their episodes to finish."""
        if self._process is None:
            return
        process, self._process = self._process, None
        self._control.close()  # on which it ends its children, and itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)

    async def close(self) -> None:
        """End everything; what did not end in time is killed by the kernel when the lifelines close."""
        await asyncio.gather(*self._talks, return_exceptions=True)
        process = self._process
        self._stop()
        for lifeline in self._lifelines:
            os.close(lifeline)
        self._lifelines.clear()
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)


class _ProcessSession(Session):
    """An environment in a process of its own."""

    def __init__(self, server: _Server, parent: Any, pid: int, reader: asyncio.StreamReader,
                 writer: asyncio.StreamWriter, timeout_s: float):
        self._server, self._parent, self._pid = server, parent, pid
        self._reader, self._writer, self._timeout_s = reader, writer, timeout_s

    async def reset(self, task: Task) -> Reply:
        return Reply(**await self._call("reset", task, self._timeout_s))

    async def step(self, action: Action) -> Reply:
        return Reply(**await self._call("step", action, self._timeout_s))

    async def verify(self, finish_reason: str, turns: Sequence[Turn] = ()) -> dict[str, float]:
        return await self._call("verify", (finish_reason, turns), self._timeout_s)

    async def run(self, task: Task, access: Access) -> str | None:
        return await self._call("run", (task, access), None)

    async def _call(self, method: str, argument: Any, timeout_s: float | None) -> Any:
        self.healthy = False  # until the answer is here: a call may be cancelled
        try:
            message = pickle.dumps((method, argument))
        except Exception as error:  # pickling runs methods of whatever the row holds
            raise EnvironmentFailure("invalid", f"the row can't be sent to another process: {error!r}") from error
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(HEADER.pack(len(message)) + message)
                await self._writer.drain()
                size = HEADER.unpack(await self._reader.readexactly(HEADER.size))[0]
                if size > MAX_REPLY_BYTES + 1:
                    raise EnvironmentFailure("invalid", f"{method} answered with {size} bytes")
                answer = await self._reader.readexactly(size)
        except TimeoutError:
            raise EnvironmentFailure("timeout", f"{method} gave no result within {timeout_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await self._server.end(self._pid, self._parent)
            self._pid = 0
            raise EnvironmentFailure("died", f"{method} ended its process ({status})") from None
        if answer[:1] == b"-":
            kind, text = json.loads(answer[1:])
            raise EnvironmentFailure(kind, f"{method}: {text}")
        self.healthy = True
        return json.loads(answer[1:])

    def alive(self) -> bool:
        return not self._reader.at_eof()

    async def dismiss(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def close(self) -> None:
        self._writer.close()
        if self._pid:
            await self._server.end(self._pid, self._parent)
            self._pid = 0
