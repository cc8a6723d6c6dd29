"""Calls of OpenAI's API as they arrive: read, checked, and put into one form. Whatever is not offered is refused.

A parameter is refused when its value asks for something that would not happen; with its neutral value it is accepted.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridrl.environments import Message

MAX_TEXTS = 16
"""Most stop texts of a call."""
MAX_CHOICES = 128
"""Most answers to one prompt."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "top_p": (1,), "presence_penalty": (0,), "frequency_penalty": (0,),
    "top_logprobs": (0,), "logit_bias": ({},), "parallel_tool_calls": (True,), "suffix": ("",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],), "tool_choice": ("auto", "none"), "functions": ([],), "top_k": (-1, 0), "min_p": (0,),
    "repetition_penalty": (1,)}
"""Parameters that are understood, and the values of them that are accepted."""
_FORCES = (": the model would not sample from the policy's whole distribution, whose log-probs are those that training "
           "computes")
REASONS = dict.fromkeys(("tool_choice", "response_format", "top_p", "top_k", "min_p", "logit_bias"), _FORCES)
"""Why other values are not accepted, where it isn't plain."""
IGNORED = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier")
"""Parameters without any effect on the answer."""
ROLES = ("system", "developer", "user", "assistant", "tool")


class ApiError(Exception):
    """A call that is refused, in the shape of OpenAI's errors."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400,
                 kind: str = "invalid_request_error"):
        super().__init__(message)
        self.message, self.param, self.code, self.status, self.kind = message, param, code, status, kind

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that goes with the status."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class Call:
    """What chat and text calls have in common; None: not said."""

    model: str
    n: int
    max_tokens: int | None
    temperature: float | None
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    stream_usage: bool


@dataclass(frozen=True, slots=True)
class ChatCall(Call):
    """A call of `/v1/chat/completions`. Messages have texts as contents, and arguments of tool calls as objects."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    read_calls: bool
    """Whether tool calls in the response are read as such."""
    log_probs: bool


@dataclass(frozen=True, slots=True)
class TextCall(Call):
    """A call of `/v1/completions`; a prompt is a text or token ids."""

    prompts: list[str | list[int]]
    echo: bool
    log_probs: bool
    top: bool
    """Whether echoed log-probs come with those of the likeliest tokens."""


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object of a call. Raises ApiError."""
    try:
        value = json.loads(body, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # also text that is no Unicode
        raise ApiError(f"The body is no valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ApiError(f"The body must be a JSON object, got {type(value).__name__}.")
    return {key: item for key, item in value.items() if item is not None}


def chat_call(given: dict[str, Any]) -> ChatCall:
    """Read a call of `/v1/chat/completions`. Raises ApiError."""
    rest = dict(given)
    messages = rest.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "a list of at least one message", messages)
    longest = _integer(rest, "max_completion_tokens", 1)
    common = _common(rest, least=1)
    if longest is not None:
        common["max_tokens"] = min(longest, common["max_tokens"] or longest)
    tools = _tools(rest.pop("tools", []))
    log_probs = _flag(rest, "logprobs")
    read_calls = bool(tools) and rest.get("tool_choice") != "none"
    _refuse_others(rest)
    return ChatCall(messages=[_message(message, f"messages[{i}]") for i, message in enumerate(messages)], tools=tools,
                    read_calls=read_calls, log_probs=log_probs, **common)


def text_call(given: dict[str, Any]) -> TextCall:
    """Read a call of `/v1/completions`. Raises ApiError."""
    rest = dict(given)
    prompts = _prompts(rest.pop("prompt", None))
    echo = _flag(rest, "echo")
    log_probs = _integer(rest, "logprobs", 0, most=1)
    common = _common(rest, least=0 if echo else 1)
    _refuse_others(rest)
    if echo and (common["max_tokens"] is None or common["max_tokens"] > 1):
        raise _wrong("max_tokens", "0 or 1 with echo", common["max_tokens"])
    if echo and (common["stream"] or common["n"] > 1):
        raise _wrong("echo", "false with stream or n", True)
    if common["max_tokens"] is None:
        common["max_tokens"] = 16  # as OpenAI's
    return TextCall(prompts=prompts, echo=echo, log_probs=log_probs is not None, top=log_probs == 1, **common)


def _common(rest: dict[str, Any], least: int) -> dict[str, Any]:
    model, stop = rest.pop("model", ""), rest.pop("stop", [])
    if not isinstance(model, str):
        raise _wrong("model", "a text", model)
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > MAX_TEXTS or not all(isinstance(text, str) and text for text in stop):
        raise _wrong("stop", f"a text or at most {MAX_TEXTS} texts, none of them empty", stop)
    options = rest.pop("stream_options", {})
    if not isinstance(options, dict) or set(options) - {"include_usage", "include_obfuscation"}:
        raise _wrong("stream_options", "an object with include_usage", options)
    return {"model": model, "n": _integer(rest, "n", 1, MAX_CHOICES) or 1,
            "max_tokens": _integer(rest, "max_tokens", least), "temperature": _temperature(rest),
            "seed": _integer(rest, "seed", -2**63, most=2**63 - 1), "stop": tuple(stop),
            "stream": _flag(rest, "stream"), "stream_usage": options.get("include_usage") is True}


def _refuse_others(rest: dict[str, Any]) -> None:
    for name, value in rest.items():
        if name in NEUTRAL:
            accepted = NEUTRAL[name]
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted):
                raise ApiError(f"{name} must be {' or '.join(map(json.dumps, accepted))} here, got "
                               f"{json.dumps(value)[:80]}{REASONS.get(name, '')}.", name, "unsupported_value")
        elif name not in IGNORED:
            raise ApiError(f"The parameter {name[:80]!r} is not offered here.", name[:80], "unsupported_parameter")


def _message(given: Any, where: str) -> Message:
    """A message in the one form: its content is a text, arguments of calls are objects, nothing else is left."""
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        raise _wrong(where, f"an object whose role is one of {', '.join(ROLES)}", given)
    role, rest = given["role"], {key: value for key, value in given.items() if value not in (None, [], "", {})}
    message: Message = {"role": "system" if role == "developer" else role, "content": _text(rest, f"{where}.content")}
    calls = rest.pop("tool_calls", [])
    if calls and role != "assistant":
        raise _wrong(f"{where}.tool_calls", "in messages of the assistant only", calls)
    if calls:
        message["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    if "content" not in given and not calls:
        raise ApiError(f"{where} needs a content.", f"{where}.content")
    for name in ("name", "tool_call_id"):
        if name in rest:
            message[name] = rest.pop(name)
            if not isinstance(message[name], str):
                raise _wrong(f"{where}.{name}", "a text", message[name])
    for name in rest:
        if name not in ("role", "content"):
            raise ApiError(f"{where}.{name[:80]} is not offered here.", f"{where}.{name[:80]}", "unsupported_parameter")
    return message


def _text(message: Mapping[str, Any], where: str) -> str:
    content = message.get("content", "")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(
            isinstance(part, dict) and part.get("type") in ("text", "refusal") for part in parts):
        raise _wrong(where, "a text or a list of parts of type text", content)
    texts = [part.get("text", part.get("refusal")) for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise _wrong(where, "made of texts", content)
    return "".join(texts)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    made = []
    for i, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(f"{where}[{i}]", "an object with function.name and function.arguments", call)
        arguments = function.get("arguments") or "{}"
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise _wrong(f"{where}[{i}].function.arguments", "a JSON object as text", function.get("arguments"))
        made.append({"id": str(call.get("id", "")), "type": "function",
                     "function": {"name": function["name"], "arguments": arguments}})
    return made


def _tools(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise _wrong("tools", "a list", given)
    for i, tool in enumerate(given):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(f"tools[{i}]", "an object with type 'function' and function.name", tool)
        if not isinstance(function.get("parameters", {}), dict):
            raise _wrong(f"tools[{i}].function.parameters", "a JSON schema", function["parameters"])
    return given


def _prompts(prompt: Any) -> list[str | list[int]]:
    prompts = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
    if not isinstance(prompts, list) or not prompts or not all(
            isinstance(one, str) or _is_ids(one) for one in prompts):
        raise _wrong("prompt", "a text, token ids, or a list of such", prompt)
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _integer(rest: dict[str, Any], name: str, least: int, most: float = math.inf) -> int | None:
    value = rest.pop(name, None)
    if value is not None and (type(value) is not int or not least <= value <= most):
        limit = f"at least {least}" if most == math.inf else f"from {least} to {most}"
        raise _wrong(name, f"a whole number, {limit}", value)
    return value


def _temperature(rest: dict[str, Any]) -> float | None:
    value = rest.pop("temperature", None)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 2):
        raise _wrong("temperature", "a number from 0 to 2", value)
    return value


def _flag(rest: dict[str, Any], name: str) -> bool:
    value = rest.pop(name, False)
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def _wrong(param: str, accepted: str, got: Any) -> ApiError:
    return ApiError(f"{param} must be {accepted}, got {json.dumps(got)[:80]}.", param)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
