"""A process that scores rows, started by `WorkerPool`; it imports the reward functions and little else.

It reads chunks of pickled rows from the controller, which it trusts, and writes [score, error] of each call back as
JSON: the controller unpickles nothing that a reward function made.
"""

import importlib
import json
import os
import pickle
import sys
import traceback
from multiprocessing.connection import Connection

from hybridrl.child_process import die_with
from hybridrl.rewards import binding
from hybridrl.rewards.binding import BoundReward, bind

MAX_ERROR_CHARS = 500
SLOW_PACKAGES = {"math_verify", "reasoning_gym"}
"""Packages behind the reward functions of the same name; their import is no part of the first call's time."""


def main() -> None:
    """Serve the connection whose file descriptor is the second argument until it closes."""
    die_with(int(sys.argv[1]))
    connection = Connection(int(sys.argv[2]))
    try:
        functions = [bind(name, options) for name, options in connection.recv()]
        for package in SLOW_PACKAGES.intersection(function.name for function in functions):
            importlib.import_module(package)
    except Exception as error:  # raised by the controller
        _report(connection, None, _one_line(error))
        return
    _report(connection, None, None)
    while True:
        try:
            rows = connection.recv()
        except (EOFError, ConnectionError):
            return
        for row in rows:
            _score(connection, functions, row)


def _score(connection: Connection, functions: list[BoundReward], row: bytes) -> None:
    """Report each function's score of a pickled row; the first failure ends the row."""
    for function in functions:
        try:
            # Each function gets its own copy, so that none sees what another did to it.
            score, error = function(pickle.loads(row)), None
        except BaseException as raised:  # sys.exit in a reward function is a failure of its row, too
            score, error = None, _one_line(raised)
        _report(connection, score, error)
        if error:
            return


def _report(connection: Connection, score: float | None, error: str | None) -> None:
    try:
        connection.send_bytes(json.dumps([score, error]).encode())
    except ConnectionError:  # the controller is gone
        os._exit(1)


def _one_line(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR_CHARS]
    where = traceback.extract_tb(error.__traceback__)[-1]
    if where.filename == binding.__file__:  # what the function returned is wrong, not a line of it
        return text
    return f"{text} ({os.path.basename(where.filename)}:{where.lineno})"


if __name__ == "__main__":
    main()
