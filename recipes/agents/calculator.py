"""An agent with a calculator, written with OpenAI's client and nothing of this library.

It asks, runs the calculations that the model calls for, shows their results, and returns the text of the last answer:

    python -m recipes.agent environment.name=agent \
        'environment.options={function: "recipes.agents.calculator:solve", reward: numeric}' ...
"""

import json
from typing import Any

from openai import OpenAI

from hybridrl.environments.tools.calculator import calculator

TOOLS: Any = [{"type": "function", "function": {
    "name": "calculator", "description": "Work out an arithmetic expression.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}}}]


def solve(task, base_url: str, api_key: str, model: str, rounds: int = 4) -> str:
    """Answer the task's question in at most `rounds` responses; returns the last one."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    for left in reversed(range(rounds)):
        message: Any = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, tool_choice="auto" if left else "none").choices[0].message
        if not message.tool_calls:
            break
        messages.append(message)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculated(call.function.arguments)})
    return message.content or ""


def calculated(arguments: str) -> str:
    """The value of a call's expression, or what is wrong with it."""
    try:
        return str(calculator(json.loads(arguments)["expression"]))
    except Exception as error:  # whatever a model may write
        return f"error: {error}"
