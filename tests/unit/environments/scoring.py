"""Reward functions that tests name by import path; they run in reward processes."""


def shown(prompt, response):
    """Hundreds: messages before the response. Ones: its length."""
    assert all(message["role"] in ("user", "assistant") for message in prompt)
    return 100 * len(prompt) + len(response)
