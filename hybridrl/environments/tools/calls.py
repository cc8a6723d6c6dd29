"""Tool calls in a response, in the formats that models are trained on.

    hermes    <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>       Hermes, Qwen2.5, Qwen3
    qwen_xml  <tool_call><function=f><parameter=x>1</parameter></function></tool_call>      Qwen3-Coder, Qwen3.5
    llama3    {"name": "f", "parameters": {"x": 1}}; {...}                      Llama 3.1 to 3.3, the whole response
    deepseek  <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>       DeepSeek V3.1; V3 and R1 with
              <｜tool▁call▁begin｜>function<｜tool▁sep｜>f and a json fence
    glm       <tool_call>f <arg_key>x</arg_key><arg_value>1</arg_value></tool_call>      GLM-4.5 to 4.7

What is meant as a call and is none comes back as BadCall: the model is told what is wrong with it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybridrl.environments.environment import Action


@dataclass(frozen=True, slots=True)
class Call:
    """A call that could be read; `arguments` are not checked yet."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadCall:
    """A call that could not be read."""

    error: str


Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the parameters by the names of tools."""


def calls_in(action: Action, kind: str, schemas: Schemas) -> list[Call | BadCall]:
    """The calls of a response in a format of FORMATS, in order; what comes before `</think>` has none."""
    # Marks may be special tokens, which only the raw text has; Llama's format has none and fills the response.
    text = str(action) if kind == "llama3" else action.raw
    return [_whole(call) for call in FORMATS[kind](text.rpartition("</think>")[2], schemas)]


def _whole(call: Call | BadCall) -> Call | BadCall:
    """The call, unless its texts have half a character: JSON can spell those, and nothing can carry them on."""
    try:
        json.dumps(asdict(call), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return BadCall("it is no valid Unicode text")
    except RecursionError:
        return BadCall("it is nested too deeply")
    return call


def _hermes(text: str, schemas: Schemas) -> list[Call | BadCall]:
    calls: list[Call | BadCall] = []
    for found in re.finditer(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", text, re.DOTALL):
        # The token that ended the turn may follow a call that was not closed.
        calls.append(_from_json(found[1].strip(), "arguments", whole=bool(found[2])))
    return calls


def _llama3(text: str, schemas: Schemas) -> list[Call | BadCall]:
    rest = text.strip().removeprefix("<|python_tag|>").strip()
    calls: list[Call | BadCall] = []
    while re.match(r'\{\s*"(name|type|function|parameters)"', rest):
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError) as error:
            return [*calls, BadCall(f"it is no valid JSON: {error}")]
        calls.append(_from_object(value, "parameters"))
        rest = rest[end:].lstrip(" \n;")
    return calls


def _deepseek(text: str, schemas: Schemas) -> list[Call | BadCall]:
    begin, sep, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    calls: list[Call | BadCall] = []
    for piece in text.split(begin)[1:]:
        head, separated, body = piece.partition(sep)
        if not separated:
            calls.append(BadCall(f"it has no {sep} between the name and the arguments"))
            continue
        closed, name = end in body, head.strip()
        body = body.partition(end)[0].strip()
        if name == "function" and (fenced := re.match(r"(\S+)\s*```json\s*(.*?)\s*(```|\Z)", body, re.DOTALL)):
            name, body = fenced[1], fenced[2]
        value = _json(body, closed)
        calls.append(value if isinstance(value, BadCall) else _from_object({"name": name, "arguments": value},
                                                                           "arguments"))
    return calls


def _qwen_xml(text: str, schemas: Schemas) -> list[Call | BadCall]:
    calls: list[Call | BadCall] = []
    for found in re.finditer(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", text, re.DOTALL):
        function = re.search(r"<function=([^>]*)>(.*?)</function>", found[1], re.DOTALL)
        if function is None:
            calls.append(BadCall("it needs <function=name>...</function>"))
            continue
        name, body = function[1].strip(), function[2]
        pairs = re.findall(r"<parameter=([^>]*)>(.*?)</parameter>", body, re.DOTALL)
        if len(pairs) != body.count("<parameter="):
            calls.append(BadCall("each <parameter=name> needs its </parameter>"))
        else:
            # The template writes values on lines of their own.
            calls.append(_from_texts(name, [(key, re.sub(r"^\n|\n$", "", value)) for key, value in pairs], schemas))
    return calls


def _glm(text: str, schemas: Schemas) -> list[Call | BadCall]:
    calls: list[Call | BadCall] = []
    for found in re.finditer(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", text, re.DOTALL):
        name = found[1].partition("<arg_key>")[0].strip()
        pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", found[1], re.DOTALL)
        if not found[2]:
            calls.append(BadCall("</tool_call> is missing"))
        elif len(pairs) != found[1].count("<arg_key>") or len(pairs) != found[1].count("<arg_value>"):
            calls.append(BadCall("each <arg_key>name</arg_key> needs one <arg_value>value</arg_value>"))
        else:
            calls.append(_from_texts(name, pairs, schemas))
    return calls


FORMATS: dict[str, Callable[[str, Schemas], list[Call | BadCall]]] = {
    "hermes": _hermes, "qwen_xml": _qwen_xml, "llama3": _llama3, "deepseek": _deepseek, "glm": _glm}
"""Formats by name."""


MARKS: dict[str, str] = {"hermes": "<tool_call>", "qwen_xml": "<tool_call>", "llama3": "", "glm": "<tool_call>",
                         "deepseek": "<｜tool▁call"}
"""How the first call of a response begins; nothing else is in one of llama3."""


def text_before_calls(action: Action, kind: str) -> str:
    """What a response with calls says before the first of them."""
    mark = MARKS[kind]
    text = str(action) if not mark or mark in action else action.raw
    thoughts, end, rest = text.rpartition("</think>")
    return thoughts + end + (rest.partition(mark)[0] if mark else "")


def text_so_far(text: str, raw: str, kind: str) -> str:
    """What of a response that goes on is certain to come before its first call, if it has one.

    Args:
        text, raw: all of it so far, without and with special tokens.
    """
    mark = MARKS[kind]
    thoughts, end, rest = (raw if mark in raw and mark not in text else text).rpartition("</think>")
    if not mark:  # a response is a call or text
        begins = rest.lstrip()
        rest = "" if not begins or begins[0] == "{" or "<|python_tag|>".startswith(begins[:14]) else rest
    elif mark in rest:
        rest = rest.partition(mark)[0]
    else:
        rest = without_beginning_of(rest, [mark])
    return thoughts + end + rest


def without_beginning_of(text: str, marks: Sequence[str]) -> str:
    """A text without what it ends on that may go on to be one of the marks."""
    longest = max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
    return text[:len(text) - longest]


def _from_texts(name: str, pairs: list[tuple[str, str]], schemas: Schemas) -> Call:
    properties = schemas.get(name, {}).get("properties", {})
    return Call(name, {key.strip(): _typed(value, properties.get(key.strip(), {})) for key, value in pairs})


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """A value that is written without quotes if it is a text."""
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _from_json(text: str, key: str, whole: bool) -> Call | BadCall:
    value = _json(text, whole)
    return value if isinstance(value, BadCall) else _from_object(value, key)


def _json(text: str, whole: bool) -> Any:
    try:
        return json.loads(text) if whole else json.JSONDecoder().raw_decode(text)[0]
    except (ValueError, RecursionError) as error:
        return BadCall(f"it is no valid JSON: {error}")


def _from_object(value: Any, key: str) -> Call | BadCall:
    """From `{"name": ..., key: {...}}`; either of `arguments` and `parameters` is read."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return BadCall(f'it must be an object with "name" and "{key}", got {json.dumps(value)[:80]}')
    arguments: Any = next((value[k] for k in (key, "arguments", "parameters") if k in value), {})
    if not isinstance(arguments, dict):
        return BadCall(f'"{key}" must be an object, got {json.dumps(arguments)[:80]}')
    return Call(value["name"], arguments)
