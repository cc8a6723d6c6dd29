"""Reward functions that tests name by import path."""

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
