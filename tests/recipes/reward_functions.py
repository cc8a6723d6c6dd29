"""Reward functions that tests name by import path."""

import itertools
import math
import time
from pathlib import Path


def digits(response):
    """Share of digits in the response: a reward that varies between the samples of an untrained model."""
    return sum(character.isdigit() for character in response) / max(1, len(response))


def gated(response, prompt, gate):
    """`digits`, but while the file `hold` in the folder `gate` names this prompt it waits, and has written `held`."""
    if _holds(gate, prompt):
        (Path(gate) / "held").touch()
    while _holds(gate, prompt):
        time.sleep(0.02)
    return digits(response)


def _holds(gate, prompt):
    try:
        return (Path(gate) / "hold").read_text() == prompt
    except FileNotFoundError:
        return False


def short_answers(response):
    """1 for a response that ends on a character between 0 and k, else 1/4; fails on responses with a vowel."""
    if set(response) & set("aeiou"):
        raise ValueError("a vowel")
    return 1.0 if "0" <= response[-1:] <= "k" else 0.25


_calls = itertools.count()


def every_second(response):
    """Fails on every second call of its process."""
    if next(_calls) % 2:
        raise ValueError("the second call")
    return 1.0


def troubled(response):
    """`digits`, but by the response it may raise, return NaN or text, or never return."""
    match sum(map(ord, response)) % 8:
        case 0:
            raise ZeroDivisionError("no such thing")
        case 1:
            return math.nan
        case 2:
            return "seven"
        case 3:
            while True:
                time.sleep(1)
    return digits(response)


def broken(response):
    """Fails on every row."""
    raise LookupError("no grader here")
