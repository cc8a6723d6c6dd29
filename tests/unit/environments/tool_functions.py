"""Functions that tests hand to the policy as tools; some misbehave."""

import os
import subprocess
import sys
import time
from typing import Literal


def area(width: int, height: float = 1.5, unit: Literal["m", "cm"] = "m", tags: list[str] | None = None) -> str:
    """
    Area of a rectangle.

    Args:
        width: how wide
        height: how high
        unit: of both
        tags: notes
    """
    return f"{width * height} {unit}2"


def no_hint(x):
    """
    No hint.

    Args:
        x: a number
    """


def no_docs(x: int) -> int:
    return x


def half_docs(x: int, y: int) -> int:
    """
    Documents x only.

    Args:
        x: a number
    """
    return x + y


def positional(*xs: int) -> int:
    """Adds numbers."""
    return sum(xs)


def raises(text: str) -> str:
    """
    Raises.

    Args:
        text: what to say
    """
    raise RuntimeError(text)


def dies() -> str:
    """Ends its process."""
    os._exit(3)


def long() -> str:
    """Says a lot."""
    return "x" * 1000


def endless() -> str:
    """Says what json can hold without end."""
    return "\udc80" * 50_000_000


def hangs(file: str) -> str:
    """
    Starts a daemon that leaves its session, and hangs.

    Args:
        file: gets the process ids
    """
    daemon = ("import os, time\nif os.fork(): os._exit(0)\nos.setsid()\n"
              f"open({file!r}, 'a').write(f'{{os.getpid()}} ')\ntime.sleep(600)")
    subprocess.run([sys.executable, "-c", daemon])
    while not os.path.exists(file) or not open(file).read():
        time.sleep(0.01)
    with open(file, "a") as opened:
        opened.write(f"{os.getpid()} ")
    time.sleep(600)
    return ""


def leaves(file: str) -> str:
    """
    Starts a daemon that leaves its session, and returns.

    Args:
        file: gets the process id
    """
    subprocess.Popen([sys.executable, "-c", f"import os, time\nopen({file!r}, 'a').write(f'{{os.getpid()}} ')\n"
                      "time.sleep(600)"], start_new_session=True)
    while not os.path.exists(file) or not open(file).read():
        time.sleep(0.01)
    return os.getcwd()
