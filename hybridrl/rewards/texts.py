"""What a learned scorer reads of a row: its prompt as text or as chat messages, and templates filled with both."""

import math
import re
from typing import Any

Prompt = str | list[dict[str, Any]]


def as_messages(prompt: Prompt) -> list[dict[str, Any]]:
    """A prompt as chat messages: a text is the user's turn."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def as_text(prompt: Prompt) -> str:
    """A prompt as text: of several chat messages, each behind its role."""
    messages = as_messages(prompt)
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def fill(template: str, **parts: str) -> str:
    """The template with each `{name}` replaced by that part; other braces stay, and so do braces in the parts."""
    return re.sub(r"\{(" + "|".join(parts) + r")\}", lambda match: parts[match[1]], template)


def verdict_of(text: str, pattern: str, words: dict[str, float]) -> float | None:
    """The score in a judge's answer, by the last match of a pattern with one group; None without one.

    Args:
        words: score of each verdict in lower case; empty: the group is a finite number.
    """
    found = re.findall(pattern, text)
    if not found:
        return None
    if words:
        return words.get(found[-1].lower())
    try:
        score = float(found[-1])
    except ValueError:
        return None
    return score if math.isfinite(score) else None
