"""Well-formed tool calls are read as vLLM's own parsers read them."""

import inspect
import json

import pytest

from hybridrl.environments import Action
from hybridrl.environments.tools.calls import Call, calls_in

pytest.importorskip("vllm")

CALLS = [
    ("search", {"query": 'a <b> "c" é\n1', "top": 3, "deep": {"x": [1, 2.5, None, True], "y": {}}}),
    ("calculator", {"expression": "1+1"}),
]
SCHEMAS = {
    "search": {"type": "object", "properties": {
        "query": {"type": "string"}, "top": {"type": "integer"}, "deep": {"type": "object"}}},
    "calculator": {"type": "object", "properties": {"expression": {"type": "string"}}},
}


def as_json(value):
    return json.dumps(value, ensure_ascii=False)


def as_xml(value):
    return value if isinstance(value, str) else as_json(value)


def hermes(name, arguments):
    return f"<tool_call>\n{as_json({'name': name, 'arguments': arguments})}\n</tool_call>"


def llama3(name, arguments):
    return as_json({"name": name, "parameters": arguments})


def deepseek(name, arguments):
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json(arguments)}<｜tool▁call▁end｜>"


def qwen_xml(name, arguments):
    inside = "".join(f"<parameter={key}>\n{as_xml(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def glm(name, arguments):
    inside = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{as_xml(value)}</arg_value>\n"
                     for key, value in arguments.items())
    return f"<tool_call>{name}\n{inside}</tool_call>"


MARKS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "llama3": ["<|python_tag|>"],
    "deepseek": ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
                 "<｜tool▁sep｜>"],
    "qwen_xml": ["<tool_call>", "</tool_call>"],
    "glm": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
}


class MarksTokenizer:
    """What vLLM's parsers ask of a tokenizer: where the marks are in its vocabulary."""

    def __init__(self, marks):
        self.vocabulary = {mark: i for i, mark in enumerate(marks)}

    def get_vocab(self):
        return self.vocabulary

    def encode(self, text, **options):
        return [self.vocabulary[text]]


def as_vllm_reads(parser, text, marks):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], model="m", tools=tools)
    cls = ToolParserManager.get_tool_parser(parser)
    takes_tools = "tools" in inspect.signature(cls.__init__).parameters
    one = cls(MarksTokenizer(marks), request.tools) if takes_tools else cls(MarksTokenizer(marks))
    return [(call.function.name, json.loads(call.function.arguments))
            for call in one.extract_tool_calls(text, request).tool_calls]


@pytest.mark.parametrize(("write", "parser"), [
    (hermes, "hermes"), (llama3, "llama3_json"), (deepseek, "deepseek_v31"), (qwen_xml, "qwen3_coder"),
    (qwen_xml, "qwen3_xml"), (glm, "glm45"), (glm, "glm47")])
def test_calls_are_read_as_vllm_reads_them(write, parser):
    kind = write.__name__
    calls = [write(*call) for call in CALLS]
    text = "; ".join(calls) if kind == "llama3" else "Let me see.\n" + "\n".join(calls)
    if kind == "deepseek":
        text = f"Let me see.<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>"
    assert calls_in(Action(text), kind, SCHEMAS) == [Call(*call) for call in CALLS]
    assert as_vllm_reads(parser, text, MARKS[kind]) == CALLS
