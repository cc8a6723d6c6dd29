"""Tools: schemas, calls as models write them, limits, and an episode with them."""

import json
import os
import signal

import pytest
import torch

from hybridrl.batch import make_batch
from hybridrl.config import EnvironmentConfig, RolloutConfig
from hybridrl.environments import Action, Task, Trajectory, Turn
from hybridrl.environments.binding import bind
from hybridrl.environments.tools import ToolEnvironment
from hybridrl.environments.tools.calculator import calculator
from hybridrl.environments.tools.calling import call
from hybridrl.environments.tools.calls import BadCall, Call, calls_in
from hybridrl.environments.tools.search import Search
from hybridrl.environments.tools.tool import tool_from
from hybridrl.errors import ConfigError
from hybridrl.workers.rollout.episode_rows import episode_batch, tasks_of
from hybridrl.workers.rollout.episodes import EpisodeRunner
from tests.processes import ended, exit_code, wait_for
from tests.unit.environments.chats import chat_tokenizer
from tests.unit.environments.engines import ScriptedEngine

FUNCTIONS = "tests.unit.environments.tool_functions"



def function(name, time_s=20.0, output_chars=200):
    return tool_from(f"{FUNCTIONS}:{name}", time_s, output_chars)


def tool_path(name):
    return f"{FUNCTIONS}:{name}"


# ---- schemas and arguments


def test_the_schema_of_a_function_written_by_hand():
    one = tool_from(tool_path("area"), 1.0, 10)
    assert one.schema == {"type": "function", "function": {
        "name": "area", "description": "Area of a rectangle.", "parameters": {
            "type": "object", "required": ["width"], "properties": {
                "width": {"type": "integer", "description": "how wide"},
                "height": {"type": "number", "description": "how high"},
                "unit": {"type": "string", "enum": ["m", "cm"], "description": "of both"},
                "tags": {"type": "array", "items": {"type": "string"}, "nullable": True, "description": "notes"}}}}}
    assert (one.time_s, one.output_chars) == (1.0, 10)


@pytest.mark.parametrize(("arguments", "said"), [
    ({"width": 2}, []),
    ({"width": 2, "height": 3, "unit": "cm", "tags": ["a"]}, []),
    ({"width": 2, "tags": None}, []),
    ({}, ["width is missing"]),
    ({"width": "2"}, ["width must be integer, got '2'"]),
    ({"width": True}, ["width must be integer, got True"]),
    ({"width": 2, "unit": "km"}, ["unit must be one of 'm', 'cm', got 'km'"]),
    ({"width": 2, "tags": [1]}, ["tags must be array, got [1]"]),
    ({"width": 2, "depth": 1}, ["there is no depth, only width, height, unit, tags"]),
])
def test_arguments_are_checked(arguments, said):
    assert tool_from(tool_path("area"), 1.0, 10).faults(arguments) == said


@pytest.mark.parametrize(("entry", "said"), [
    (tool_path("no_hint"), "a type hint of parameter 'x'"),
    (tool_path("no_docs"), "a docstring"),
    (tool_path("half_docs"), "`y: ...` under `Args:`"),
    (tool_path("positional"), "go by name, not"),
    (tool_path("area_"), "area"),
    ("calculater", "calculator"),
    ("no.such.module:x", "can't import 'no.such.module'"),
    ({"tool": "calculator", "time": 1}, "time_s"),
    ({"tool": "calculator", "time_s": 0}, "time_s"),
    ({"tool": "calculator", "options": {"x": 1}}, "takes no options"),
    ({"tool": "search"}, "missing a required argument: 'corpus'"),
    ({"tool": "search", "options": {"corpus": "/no/such.jsonl"}}, "can't be read"),
    ({"name": "x"}, "under `tool`"),
])
def test_what_is_no_tool_is_refused_with_the_reason(entry, said):
    with pytest.raises(ConfigError) as caught:
        bind("tools", {"tools": [entry], "function": "numeric"})
    assert said in str(caught.value)


@pytest.mark.parametrize(("options", "said"), [
    ({"format": "herms"}, "hermes"), ({"max_calls": 0}, "at least 1"), ({"tools": []}, "at least one tool"),
    ({"tools": ["calculator", "calculator"]}, "two tools"), ({"function": "nothing"}, "nothing")])
def test_options_that_cannot_be_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        bind("tools", {"tools": ["calculator"], "function": "numeric", **options})


# ---- calls as models write them


DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
F1 = Call("f", {"x": 1})


@pytest.mark.parametrize(("kind", "text", "expected"), [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>', [F1]),
    ("hermes", 'a <tool_call>{"name":"f","arguments":{"x":1}}</tool_call>\n<tool_call>{"name":"g"}</tool_call>',
     [F1, Call("g", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}<|im_end|>', [F1]),
    ("hermes", '<think><tool_call>{"name": "g"}</tool_call></think> done', []),
    ("hermes", "The answer is 4.", []),
    ("llama3", '{"name": "f", "parameters": {"x": 1}}', [F1]),
    ("llama3", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"x": 1}}; {"name": "g"}',
     [F1, Call("g", {})]),
    ("llama3", 'The answer is {"name": "f"}', []),
    ("llama3", '{"answer": 4}', []),
    ("deepseek", DEEPSEEK.format('f<｜tool▁sep｜>{"x": 1}'), [F1]),
    ("deepseek", DEEPSEEK.format('function<｜tool▁sep｜>f\n```json\n{"x": 1}\n```'), [F1]),
    ("glm", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", [F1]),
    ("glm", "<tool_call>f<arg_key>s</arg_key><arg_value>1</arg_value></tool_call>", [Call("f", {"s": "1"})]),
    ("qwen_xml", "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=s>\n\n a\n</parameter>\n"
     "</function>\n</tool_call><|im_end|>", [Call("f", {"x": 1, "s": "\n a"})]),
    ("qwen_xml", "<tool_call><function=g></function></tool_call> <tool_call><function=f><parameter=x>1</parameter>"
     "</function>", [Call("g", {}), F1]),
    ("glm", "<tool_call>g</tool_call><tool_call>f<arg_key>x</arg_key><arg_value>a b</arg_value></tool_call>",
     [Call("g", {}), Call("f", {"x": "a b"})]),
])
def test_calls_are_read(kind, text, expected):
    schemas = {"f": {"properties": {"x": {"type": "integer"}, "s": {"type": "string"}}}}
    assert calls_in(Action(text), kind, schemas) == expected


@pytest.mark.parametrize(("kind", "text", "said"), [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>', "no valid JSON"),
    ("hermes", '<tool_call>{"name": "f", "argum', "no valid JSON"),
    ("hermes", '<tool_call>{"name": "f"} and more</tool_call>', "no valid JSON"),
    ("hermes", "<tool_call>[1]</tool_call>", 'object with "name" and "arguments", got [1]'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', '"arguments" must be an object'),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "no valid JSON"),
    ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>', "no valid Unicode"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 900 + "]" * 900 + "}}</tool_call>", "too deeply"),
    ("llama3", '{"name": "f", "parameters": {"x": 1}', "no valid JSON"),
    ("llama3", '{"name": "f", "parameters": {"x\\udcff": 1}}', "no valid Unicode"),
    ("llama3", '{"name": 3}', 'object with "name" and "parameters"'),
    ("deepseek", DEEPSEEK.format('f{"x": 1}'), "<｜tool▁sep｜>"),
    ("deepseek", DEEPSEEK.format("f<｜tool▁sep｜>x = 1"), "no valid JSON"),
    ("qwen_xml", "<tool_call><function=f><parameter=x>1", "it needs <function=name>"),
    ("qwen_xml", "<tool_call><function=f><parameter=x>1</function></tool_call>", "needs its </parameter>"),
    ("qwen_xml", '<tool_call>{"name": "f"}</tool_call>', "it needs <function=name>"),
    ("glm", "<tool_call>f<arg_key>x</arg_key>", "</tool_call> is missing"),
    ("glm", "<tool_call>f<arg_key>x</arg_key></tool_call>", "needs one <arg_value>"),
])
def test_broken_calls_say_what_is_wrong(kind, text, said):
    (one,) = calls_in(Action(text), kind, {})
    assert isinstance(one, BadCall)
    assert said in one.error


def test_marks_that_are_special_tokens_are_read_from_the_raw_text():
    raw = DEEPSEEK.format('f<｜tool▁sep｜>{"x": 1}')
    assert calls_in(Action('f{"x": 1}', raw=raw), "deepseek", {}) == [F1]


# ---- calls under limits


def test_a_result_an_error_and_a_death_are_told():
    assert call(function("area"), {"width": 2}) == (True, "3.0 m2")
    assert call(function("raises"), {"text": "no"}) == (False, "raises failed: RuntimeError('no')")
    assert call(function("dies"), {}) == (False, "dies ended without a result.")


def test_long_results_are_cut_and_say_so():
    assert call(function("long", output_chars=10), {}) == (True, "x" * 10 + "\n[cut: 990 more characters]")
    assert call(function("endless", output_chars=3), {}) == (True, "???\n[cut: 49999997 more characters]")


def test_a_tool_out_of_time_is_killed_with_what_left_its_session(tmp_path):
    pids = tmp_path / "pids"
    told = call(function("hangs", time_s=6.0), {"file": str(pids)})
    assert told == (False, "hangs took longer than 6 s and was ended.")
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2 and ended(*started, within_s=0)


def test_nothing_that_a_tool_started_outlives_it_nor_its_folder(tmp_path):
    ok, folder = call(function("leaves"), {"file": str(tmp_path / "pids")})
    assert ok and ended(int((tmp_path / "pids").read_text()), within_s=0) and not os.path.exists(folder)


def test_the_word_to_stop_that_comes_as_the_tool_ends_stops_no_cleaning_up(tmp_path, monkeypatch):
    """Just before the supervisor stops listening to it."""
    install, came = signal.signal, []

    def late(number, handler):
        if (number, handler) == (signal.SIGTERM, signal.SIG_IGN) and not came:
            came.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        return install(number, handler)

    monkeypatch.setattr(signal, "signal", late)
    ok, folder = call(function("leaves"), {"file": str(tmp_path / "pids")})
    assert ok and ended(int((tmp_path / "pids").read_text()), within_s=0) and not os.path.exists(folder)


def test_a_tool_ends_with_the_process_that_called_it(tmp_path):
    pids = tmp_path / "pids"
    caller = os.fork()
    if caller == 0:
        try:
            call(function("hangs", time_s=60.0), {"file": str(pids)})
        finally:
            os._exit(0)
    try:
        wait_for(lambda: pids.exists() and pids.read_text().count(" ") == 2, "the tool and its daemon start")
    finally:
        os.kill(caller, signal.SIGKILL)
        assert exit_code(caller) == -signal.SIGKILL
    assert ended(*map(int, pids.read_text().split()))


# ---- calculator and search


@pytest.mark.parametrize(("expression", "result"), [
    ("(3 + 4) * 12", "84"), ("7 / 2", "3.5"), ("6 / 3", "2"), ("-7 // 2", "-4"), ("-7 % 3", "2"), ("2 ** 10", "1024"),
    ("0.1 + 0.2", "0.3"), ("sqrt(2)", "1.41421356237"), ("max(1, 2.5)", "2.5"), ("2 ** -1", "0.5"), (" 1e3 ", "1000"),
    ("2 ** 4095", str(2 ** 4095)), ("1 ** 10 ** 9", "1"), ("(-1) ** 10 ** 9", "1"), ("round(2.567, 1)", "2.6"),
    ("round(2.5)", "2")])
def test_the_calculator_computes(expression, result):
    assert calculator(expression) == result


@pytest.mark.parametrize(("expression", "said"), [
    ("1 / 0", "division by zero"), ("0 ** -1", "division by zero"), ("9 ** 9 ** 9", "too large"),
    ("2 ** 5000", "too large"), ("1e308 * 10", "too large"), ("1e999", "too large"), ("9e99 ** 9e99", "too large"),
    ("(-1) ** 0.5", "no real number"), ("sqrt(-1)", "math domain error"), ("1 +", "no arithmetic"), ("", "no arithm"),
    ("7 ^ 2", "** is the power"), ("__import__('os')", "are allowed"), ("'a' * 9", "are allowed"),
    ("(1).real", "are allowed"), ("[1] * 3", "are allowed"), ("True + 1", "are allowed"), ("sqrt(x=1)", "no named"),
    ("round(1, 2, 3)", "round"), ("(" * 400 + "1" + ")" * 400, "at most 500"), ("-" * 499 + "(", "no arithmetic"),
    ("exp(1000)", "too large"), ("round(15, -10 ** 20)", "at most 300"), ("2 ** 4096", "too large"),
    ("max(1)", "iter")])
def test_the_calculator_refuses(expression, said):
    with pytest.raises(ValueError) as caught:
        calculator(expression)
    assert said in str(caught.value)


def test_search_ranks_by_words(tmp_path):
    corpus = tmp_path / "texts.jsonl"
    texts = [{"text": "the red fox"}, {"title": "Blue", "text": "the blue whale whale"}, {"text": "the red red whale"}]
    corpus.write_text("\n".join(map(json.dumps, texts)))
    assert Search(str(corpus), top=2)("Whale?") == "[1] Blue: the blue whale whale\n\n[2] the red red whale"
    assert Search(str(corpus), top=1)("red") == "[1] the red red whale"
    assert Search(str(corpus))("green") == "Nothing was found."
    plain = tmp_path / "texts.txt"
    plain.write_text("one fox\n\ntwo\nwhales\n \n")
    assert Search(str(plain))("whales") == "[1] two\nwhales"


def test_the_score_of_search_by_hand(tmp_path):
    """idf = ln(1 + 1.5 / 1.5) = ln 2 for a word in one of two documents; lengths 1 and 3, mean 2."""
    corpus = tmp_path / "texts.txt"
    corpus.write_text("a\n\nb b c")
    score = Search(str(corpus))._score({"b", "x"}, 1)
    assert score == pytest.approx(0.6931472 * 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * 1.5)), rel=1e-6)


@pytest.mark.parametrize(("name", "text", "said"), [
    ("a.jsonl", '{"text": "x"}\n{"txt": 1}', "line 2"), ("a.jsonl", "nonsense", "line 1"), ("a.jsonl", "[]", "line 1"),
    ("a.txt", "\n \n", "no documents")])
def test_search_refuses_what_is_no_corpus(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        Search(str(tmp_path / name))


# ---- episodes


def environment(**options):
    made = ToolEnvironment(**{"tools": ["calculator"], "function": "numeric", **options})
    made.reset(Task(answer="84"))
    return made


def asks(expression, name="calculator"):
    return Action(f'<tool_call>{json.dumps({"name": name, "arguments": {"expression": expression}})}</tool_call>')


def test_every_call_of_a_response_is_answered_in_order():
    step = environment().step(Action(asks("2 * 3") + asks("1 / 0") + asks("1", "weather") +
                                     "<tool_call>{</tool_call>" +
                                     '<tool_call>{"name": "calculator", "arguments": {"x": 1}}</tool_call>'))
    assert not step.done and dict(step.info) == {"calls": 5, "failed_calls": 4}
    assert {message["role"] for message in step.observation} == {"tool"}
    first, second, third, fourth, fifth = [message["content"] for message in step.observation]
    assert (first, second) == ("6", "calculator failed: division by zero")
    assert third == "There is no tool 'weather', only calculator."
    assert fourth.startswith("The tool call was not understood: it is no valid JSON")
    assert fifth == "Wrong arguments of calculator: expression is missing; there is no x, only expression."


def test_a_call_after_the_last_ends_the_episode_without_an_answer():
    made = environment(max_calls=1)
    step = made.step(Action(asks("1") + asks("2")))
    assert [message["content"] for message in step.observation] == [
        "1", "This call was not run: no calls are left.\n[That was the last call: answer now.]"]
    step = made.step(asks("84"))
    assert step.done
    trajectory = Trajectory(Task(answer="84"), [Turn("agent", [], Action("84"), {}, {})])
    assert made.verify(trajectory) == 0.0


def test_two_turns_with_a_tool_in_processes():
    tokenizer = chat_tokenizer("bytes")

    def script(prompt, rng):
        text = "84" if "tool\n84" in tokenizer.decode(prompt) else asks("(3 + 4) * 12")
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    engine = ScriptedEngine(range(len(tokenizer)), [tokenizer.eos_token_id], script=script)
    one = EpisodeRunner(engine, tokenizer, RolloutConfig(max_prompt_tokens=2000, max_response_tokens=2000),
                        EnvironmentConfig(name="tools", options={"tools": ["calculator"], "function": "numeric"}))
    try:
        batch = make_batch(group_ids=torch.arange(2), seeds=torch.arange(2), episode_ids=torch.arange(2),
                           prompt=["(3 + 4) * 12?"] * 2, answer=["84", "85"])
        played = episode_batch(batch, one.play(tasks_of(batch, 3), [0, 1], 1.0), one.chat.plain)
    finally:
        one.close()
    assert list(played["reward_error"]) == [None, None]
    assert played["rewards"].tolist() == [1.0, 0.0]
    turns = list(played["turns"])[0]
    assert [turn["action"] for turn in turns] == [asks("(3 + 4) * 12"), "84"]
    assert turns[1]["observation"] == [{"role": "tool", "name": "calculator", "content": "84"}]
    assert "Compute an arithmetic expression." in tokenizer.decode(played["prompt_ids"][0])
