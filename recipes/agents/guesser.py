"""An agent that plays the guessing game with OpenAI's client: the rules of the environment `guess`, as a program.

The number to find is drawn from the task's seed; the policy names numbers and hears `higher` or `lower`.
"""

import random
import re
from typing import Any

from openai import OpenAI


def play(task, base_url: str, api_key: str, model: str, low: int = 1, high: int = 15, guesses: int = 4) -> float:
    """One game; returns 1 for a hit and 0 for none."""
    hidden = random.Random(task.seed).randint(low, high)
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": f"Guess {low} to {high}."}]
    for _ in range(guesses):
        answer = client.chat.completions.create(model=model, messages=messages).choices[0].message
        numbers = re.findall(r"\d+", answer.content or "")
        guess = int(numbers[-1]) if numbers else None
        if guess == hidden:
            return 1.0
        hint = "no number" if guess is None else "higher" if guess < hidden else "lower"
        messages += [answer, {"role": "user", "content": hint}]
    return 0.0
