"""The processes that environments run in, started by `EnvironmentPool`.

One server imports the environment once and forks a child for every environment object: a fork takes about a
millisecond, and a child that hangs or dies costs its own episode only. Children end through the server, which is
their parent, so that a process id is never taken for another's.

A child reads pickled requests from the pool, which it trusts, and answers with JSON: the pool unpickles nothing that
an environment made.
"""

import contextlib
import json
import os
import pickle
import random
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from hybridrl.child_process import die_with, kill_group
from hybridrl.environments.binding import BoundEnvironment, bind
from hybridrl.environments.record import EnvironmentFailure, Record

HEADER = struct.Struct("!I")
"""Before each message: its length in bytes."""
READY = b"ready"
MAX_ERROR_CHARS = 500
CLOSE_GRACE_S = 1.0
"""Time that environments have to close before their processes are killed."""


def main() -> None:
    """Serve the pool: `worker LIFELINE DESCRIPTOR NAME OPTIONS`."""
    lifeline, pool = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    die_with(lifeline)
    try:
        bound = bind(sys.argv[3], json.loads(sys.argv[4]))
    except Exception as error:  # raised by the pool
        pool.send(one_line(error).encode())
        return
    pool.send(READY)
    children: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(pool, 64, 1)
        if descriptors:
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                pool.close()
                _serve(bound, descriptors[0], lifeline)
                os._exit(0)
            with contextlib.suppress(OSError):  # it may be through with that already
                os.setpgid(pid, pid)
            os.close(descriptors[0])
            children.add(pid)
            pool.send(str(pid).encode())
        elif message:
            children.discard(int(message))
            pool.send(str(_end(int(message))).encode())
        else:
            _end_all(children)
            return


def _end(pid: int) -> int:
    """Kill a child with its group and reap it; its exit code, negative for a signal.

    A child that has ended by itself keeps its own: until it is reaped, its id belongs to nobody else.
    """
    kill_group(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _end_all(children: set[int]) -> None:
    patience = time.monotonic() + CLOSE_GRACE_S
    while children and time.monotonic() < patience:
        for pid in list(children):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                _end(pid)
                children.discard(pid)
        time.sleep(0.002)
    for pid in children:
        _end(pid)


def _serve(bound: BoundEnvironment, descriptor: int, lifeline: int) -> None:
    """Play one episode after another with one environment object until the pool closes the connection."""
    die_with(lifeline)
    connection = socket.socket(fileno=descriptor)
    player, this = _Player(bound), os.getpid()
    try:
        while (request := read(connection)) is not None:
            answer = _answer(player, request)
            if os.getpid() != this:  # a fork that the environment let come back: the call has an answer already
                os._exit(1)
            send(connection, answer)
        player.close()
    except ConnectionError:  # the pool is gone
        return


class _Player:
    """An environment object, built by the first request, and the episode that it is in."""

    def __init__(self, bound: BoundEnvironment):
        self._bound = bound
        self._environment: Any = None

    def __call__(self, method: str, argument: Any) -> bytes:
        if self._environment is None:
            self._environment = self._bound.build()
        environment = self._environment
        if method == "reset":
            seed_everything(argument.seed)
            self._record = Record(argument)
            opened = environment.reset(argument)
            return self._record.opened(environment, opened, environment.state()).to_json()
        if method == "step":
            stepped = environment.step(argument)
            return self._record.stepped(argument, stepped, environment.state()).to_json()
        if method == "run":
            task, access = argument
            seed_everything(task.seed)
            self._record = Record(task)
            return json.dumps(_error_of(environment.run, task, access)).encode()
        return json.dumps(self._record.verified(environment.verify(self._record.ended(*argument)))).encode()

    def close(self) -> None:
        if self._environment is not None:
            with contextlib.suppress(Exception):
                self._environment.close()


def _answer(player: _Player, request: bytes) -> bytes:
    """A tag and the result of a request, or the failure that it came to: `+` with JSON, `-` with [kind, text]."""
    try:
        return b"+" + player(*pickle.loads(request))
    except EnvironmentFailure as failure:
        return b"-" + json.dumps([failure.kind, failure.text[:MAX_ERROR_CHARS]]).encode()
    except BaseException as error:  # sys.exit in an environment is a failure of its episode, too
        return b"-" + json.dumps(["raised", one_line(error)]).encode()


def _error_of(function: Callable[..., None], *arguments: Any) -> str | None:
    """What a function raised, in one line."""
    try:
        function(*arguments)
    except (Exception, SystemExit) as error:  # of whoever wrote it
        return one_line(error)
    return None


def seed_everything(seed: int) -> None:
    """Seed the generators that an environment might draw from without asking."""
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def one_line(error: BaseException) -> str:
    """Type, message and place of an error."""
    try:
        text = " ".join(f"{type(error).__name__}: {error}".split())
    except Exception:  # its message is the environment's code
        text = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return text[:MAX_ERROR_CHARS] + where


def send(connection: socket.socket, message: bytes) -> None:
    """Send one message."""
    connection.sendall(HEADER.pack(len(message)) + message)


def read(connection: socket.socket) -> bytes | None:
    """The next message, or None when the other side closed."""
    header = _exactly(connection, HEADER.size)
    return None if header is None else _exactly(connection, HEADER.unpack(header)[0])


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


if __name__ == "__main__":
    main()
