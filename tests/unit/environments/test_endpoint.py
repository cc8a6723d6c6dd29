"""OpenAI's API over a rollout engine: what is answered, in which shape, and what is refused."""

import asyncio
import contextlib
import http.client
import json
import math
import random
import threading
from concurrent.futures import Future

import openai
import pytest
import torch

from hybridrl.workers.rollout.chat import Chat
from hybridrl.workers.rollout.endpoint import server as server_module
from hybridrl.workers.rollout.endpoint.caller import Caller
from hybridrl.workers.rollout.endpoint.calls import ApiError, chat_call, parse, text_call
from hybridrl.workers.rollout.endpoint.server import Server
from hybridrl.workers.rollout.endpoint.telling import PART, Telling, cut, first_stop
from hybridrl.workers.rollout.endpoint.threads import begins, same
from hybridrl.workers.rollout.engine import Completion
from hybridrl.workers.rollout.transformers_engine import TransformersEngine
from tests.models import tiny_model
from tests.processes import wait_for
from tests.unit.environments.chats import KINDS, chat_tokenizer
from tests.unit.environments.engines import ScriptedEngine

CONTEXT = 600


@contextlib.contextmanager
def serving(engine, tokenizer, template=True, call_format="hermes"):
    """(client, server) over an engine that another thread drives."""
    stop = engine.stop_ids
    caller = Caller(engine, Chat(tokenizer, stop) if template else None, Chat(tokenizer, stop, False), CONTEXT,
                    call_format, temperature=1.0)
    server, ready, ended, done = Server(caller.text.whole, "tiny"), threading.Event(), asyncio.Event(), Future()

    async def listen():
        await server.start("127.0.0.1", 0)
        async with server.admitted(caller, "secret"):
            ready.set()
            await ended.wait()
        await server.close()

    loop = asyncio.new_event_loop()
    threads = [threading.Thread(target=loop.run_until_complete, args=(listen(),)),
               threading.Thread(target=engine.drive, args=([done], math.inf))]
    for thread in threads:
        thread.start()
    try:
        assert ready.wait(60)
        with openai.OpenAI(base_url=server.url, api_key="secret", max_retries=0) as client:
            yield client, server
    finally:
        loop.call_soon_threadsafe(ended.set)
        threads[0].join(60)
        done.set_result(None)
        threads[1].join(60)
        loop.close()


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer("bytes")


def ids_of(tokenizer, text):
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


@pytest.fixture(scope="module")
def scripted(tokenizer):
    """`scripted(text)`: what the engine says from now on, to the (client, server, engine) of the module."""
    engine = ScriptedEngine([1], [tokenizer.eos_token_id], script=lambda prompt, rng: said[0])
    said = [[]]

    def say(text, ends=True):
        said[0] = ids_of(tokenizer, text)[:None if ends else -1]
        return client, server, engine

    with serving(engine, tokenizer) as (client, server):
        yield say


def single_bytes(tokenizer, text):
    """A token for each byte of a text, but for `<tool_call>`."""
    if "<tool_call>" in text:
        pieces = text.partition("<tool_call>")
        return [*single_bytes(tokenizer, pieces[0]), *tokenizer(pieces[1])["input_ids"],
                *single_bytes(tokenizer, pieces[2])]
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [tokenizer.convert_tokens_to_ids(byte) for piece, _ in pieces for byte in piece]


def user(text):
    return [{"role": "user", "content": text}]


def weather(name="weather"):
    return {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}


def test_who_is_refused_waits_and_others_go_on(scripted, monkeypatch):
    client, _, engine = scripted("hello")
    monkeypatch.setattr(server_module, "REFUSAL_DELAY_S", 30.0)

    async def ask():
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="secret", max_retries=0) as one:
            refused = asyncio.ensure_future(one.chat.completions.create(model="m", messages=user("hi"), top_p=0.5))
            await asyncio.sleep(0.1)
            answer = await one.chat.completions.create(model="m", messages=user("hi"))
            waits = not refused.done()
            refused.cancel()
            return waits, answer.choices[0].message.content

    assert asyncio.run(ask()) == (True, "hello")


# ---- chat


def test_a_chat_answer(scripted, tokenizer):
    client, _, engine = scripted("hello é")
    answer = client.chat.completions.create(model="anything", messages=user("hi"), logprobs=True)
    prompt, completion = engine.served[-1]
    assert tokenizer.decode(prompt) == tokenizer.apply_chat_template(user("hi"), tokenize=False,
                                                                     add_generation_prompt=True)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello é", "stop")
    assert choice.message.tool_calls is None and answer.object == "chat.completion" and answer.model == "anything"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(completion.token_ids))
    assert answer.usage.total_tokens == len(prompt) + len(completion.token_ids)
    assert [token.logprob for token in choice.logprobs.content] == completion.log_probs
    assert "".join(token.token for token in choice.logprobs.content if "\ufffd" not in token.token).startswith("hello")
    assert choice.logprobs.content[-1].token == "<|im_end|>" and answer.system_fingerprint == "weights-7"


def test_what_the_engine_is_asked_for(scripted):
    client, _, engine = scripted("x" * 200, ends=False)
    asked = []
    add = engine.add
    engine.add = lambda request_id, request: (asked.append(request), add(request_id, request))
    try:
        create = client.chat.completions.create
        assert create(model="m", messages=user("hi"), max_tokens=3).choices[0].finish_reason == "length"
        create(model="m", messages=user("hi"), max_completion_tokens=4, max_tokens=9, temperature=0.25, seed=5)
        create(model="m", messages=user("hi"))
        client.completions.create(model="m", prompt=[1, 2, 3])
    finally:
        engine.add = add
    assert [request.max_tokens for request in asked] == [3, 4, CONTEXT - len(asked[2].prompt_ids), 16]
    assert [request.temperature for request in asked] == [1.0, 0.25, 1.0, 1.0]
    assert [request.seed for request in asked] == [None, 5, None, None] and asked[3].prompt_ids == [1, 2, 3]


def test_messages_of_every_kind_reach_the_template(scripted, tokenizer):
    client, _, engine = scripted("ok")
    arguments = '{"city": "Rome"}'
    client.chat.completions.create(model="m", tools=[weather()], messages=[
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": "a", "content": "rain"}])
    fed = tokenizer.decode(engine.served[-1][0])
    assert '"weather"' in fed and "<|im_start|>system\nbe kind<|im_end|>" in fed
    assert fed.endswith("<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n")


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 2}}</tool_call>'


@pytest.mark.parametrize(("said", "content", "calls"), [
    (CALL, None, 1), ("let me see " + CALL + CALL, "let me see ", 2), ("no call", "no call", 0),
    ("broken <tool_call>{", "broken <tool_call>{", 0), (CALL + "<tool_call>[1]</tool_call>", None, 0),
    (f"<think>{CALL}</think>never mind", f"<think>{CALL}</think>never mind", 0)])
def test_tool_calls(scripted, said, content, calls):
    client = scripted(said)[0]
    choice = client.chat.completions.create(model="m", messages=user("Rome?"), tools=[weather()]).choices[0]
    found = choice.message.tool_calls or []
    assert len(found) == calls and choice.finish_reason == ("tool_calls" if calls else "stop")
    assert choice.message.content == (content if calls or content else said)
    assert len({call.id for call in found}) == calls
    for call in found:
        assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Rome", "days": 2}


@pytest.mark.parametrize("options", [{"tool_choice": "none", "tools": [weather()]}, {}, {"tools": []}])
def test_calls_are_not_read_where_there_are_no_tools_to_call(scripted, options):
    choice = scripted(CALL)[0].chat.completions.create(model="m", messages=user("Rome?"), **options).choices[0]
    assert choice.message.content == CALL and choice.message.tool_calls is None


def test_a_response_that_was_cut_has_no_calls(scripted):
    choice = scripted(CALL)[0].chat.completions.create(model="m", messages=user("Rome?"), tools=[weather()],
                                                       max_tokens=5).choices[0]
    assert choice.finish_reason == "length" and choice.message.tool_calls is None


@pytest.mark.parametrize(("stop", "text", "kept"), [
    ("lo", "hel", "hello"), (["zz", " w", "lo w"], "hel", "hello w"), ("h", "", "h"),
    (["nothing"], "hello wörld", None),
    ("ö", "hello w", "hello wö")])
def test_stop_texts_cut_the_text_and_the_tokens_after_it(scripted, tokenizer, stop, text, kept):
    client, _, _ = scripted("hello wörld")
    answer = client.chat.completions.create(model="m", messages=user("hi"), stop=stop, logprobs=True)
    assert answer.choices[0].message.content == text and answer.choices[0].finish_reason == "stop"
    expected = len(ids_of(tokenizer, "hello wörld")) if kept is None else next(
        n for n in range(1, 99) if kept in tokenizer.decode(ids_of(tokenizer, "hello wörld")[:n]))
    assert answer.usage.completion_tokens == expected == len(answer.choices[0].logprobs.content)


# ---- streams


def test_a_stream_comes_to_the_same_answer(scripted):
    client = scripted("see " + CALL)[0]
    options = dict(model="m", messages=user("Rome?"), tools=[weather()])
    whole = client.chat.completions.create(**options)
    with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
        final = stream.get_final_completion()
    message, expected = final.choices[0].message, whole.choices[0].message
    assert message.content == expected.content == "see " and final.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls[0].function.name == "weather"
    assert message.tool_calls[0].function.arguments == expected.tool_calls[0].function.arguments
    assert final.usage == whole.usage
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and all(chunk.usage is None for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    text = list(client.completions.create(model="m", prompt="once", stream=True,
                                          stream_options={"include_usage": True}))
    assert text[0].choices[0].text == "see " + CALL[:12] or text[0].choices[0].text.startswith("see ")
    assert text[-1].usage.completion_tokens > 0 and not text[-1].choices


def test_a_stream_ends_with_done(scripted):
    _, server, _ = scripted("hi")
    status, body = post(server, "chat/completions", {"messages": user("hi"), "stream": True})
    events = body.decode().split("\n\n")
    assert status == 200 and events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])


@contextlib.contextmanager
def stuck(engine, tokens):
    """Requests go on forever; of each the first tokens are told."""
    add = engine.add

    def add_stuck(request_id, request):
        add(request_id, request)
        engine.running[request_id][0] = 10**9

    def tell():
        for request_id, (_, _, done) in engine.running.items():
            engine.progressed(request_id, done.token_ids[:tokens], done.log_probs[:tokens])

    engine.add, engine.before_step = add_stuck, tell
    try:
        yield
    finally:
        engine.add, engine.before_step = add, lambda: None


@pytest.mark.parametrize(("said", "tokens", "options", "text"), [
    ("123456789", 4, {}, "1234"), ("12é4", 3, {}, "12"), ("1234lo", 5, {"stop": "lo"}, "1234"),
    ("12<tool_call>{}", 3, {"tools": [weather()]}, "12"), ("12{", 3, {"tools": [weather()]}, "12{")])
def test_a_stream_comes_while_it_is_sampled_and_ends_with_its_reader(scripted, tokenizer, said, tokens, options, text):
    """The engine says some tokens of a response that never ends: their text arrives, but for what isn't certain."""
    client, _, engine = scripted("x")
    ids = single_bytes(tokenizer, said)
    engine.script, script = lambda prompt, rng: [*ids, tokenizer.eos_token_id], engine.script
    try:
        with stuck(engine, tokens):
            stream = client.with_options(timeout=60).chat.completions.create(
                model="m", messages=user("hi"), stream=True, logprobs=True, **options)
            got, known = "", []
            for chunk in stream:
                got += chunk.choices[0].delta.content or ""
                if chunk.choices[0].logprobs:
                    known += [token.logprob for token in chunk.choices[0].logprobs.content]
                if got == text:
                    break
            assert len(known) <= tokens and known == next(iter(engine.running.values()))[2].log_probs[:len(known)]
            stream.close()
            wait_for(lambda: not engine.running, "the engine lets go of the request")
    finally:
        engine.script = script


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_told_bit_by_bit_is_the_text(kind):
    """Random tokens in random portions: what was told always begins the text, and never holds the mark of a call."""
    tokenizer = chat_tokenizer(kind)
    chat, rng = Chat(tokenizer, [tokenizer.eos_token_id]), random.Random(kind)
    some = [token for text in ("<tool_call>", "{<tool", "é漢", "guess <", "stop")
            for token in tokenizer(text)["input_ids"]]
    for _ in range(100):
        ids = rng.choices([*range(len(tokenizer)), *some * 8], k=rng.randint(1, 20))
        completion = Completion(ids, [-float(i) for i in range(len(ids))], [3] * len(ids), "stop")
        pieces = []
        telling = Telling(chat.plain, chat.whole, ["st", "oé"], rng.choice(["hermes", "llama3", None]), pieces.append)
        told, ended = 0, False
        while told < len(ids) - 1 and not ended:
            told = rng.randint(told + 1, len(ids) - 1)
            ended = telling.hear(cut(completion, told, 0))
        text = chat.plain(ids[:told]) if ended else chat.plain(ids)
        if ended:
            start, _ = first_stop(text, telling.stop)
            text = text[:start]
        before, marked, _ = text.partition("<tool_call>" if telling.call_format == "hermes" else "no mark")
        assert text.startswith(telling.told) or PART in text
        assert not marked or "</think>" in text or len(telling.told) <= len(before)
        said = telling.finish(cut(completion, told, 0) if ended else completion, text)
        assert said == "".join(piece.text for piece in pieces) and (said == text or PART in text)
        tokens = [token for piece in pieces for token in piece.token_ids]
        assert tokens == ids[:told] if ended else tokens == ids
        assert [p for piece in pieces for p in piece.log_probs] == completion.log_probs[:len(tokens)]


# ---- several answers


def test_several_answers_to_one_prompt(real):
    client, _, _, _ = real
    options = dict(model="m", max_tokens=6, seed=3)
    one = [client.chat.completions.create(messages=user("1+1="), **options | {"seed": 3 + i}) for i in range(3)]
    answer = client.chat.completions.create(messages=user("1+1="), n=3, **options)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == [o.choices[0].message.content for o in one]
    assert answer.usage.prompt_tokens == one[0].usage.prompt_tokens
    assert answer.usage.completion_tokens == sum(o.usage.completion_tokens for o in one)
    text = client.completions.create(prompt=["1", "2"], n=2, **options)
    alone = [client.completions.create(prompt=prompt, **options | {"seed": seed})
             for prompt in ("1", "2") for seed in (3, 4)]
    assert [c.text for c in text.choices] == [a.choices[0].text for a in alone]
    assert text.usage.prompt_tokens == alone[0].usage.prompt_tokens + alone[2].usage.prompt_tokens
    for create, streamed, own in (
            (client.chat.completions.create, answer, {"messages": user("1+1="), "n": 3}),
            (client.completions.create, text, {"prompt": ["1", "2"], "n": 2})):
        said = [""] * len(streamed.choices)
        for chunk in create(stream=True, stream_options={"include_usage": True}, **options, **own):
            for choice in chunk.choices:
                said[choice.index] += (choice.delta.content or "") if hasattr(choice, "delta") else choice.text
        assert said == [c.message.content if hasattr(c, "message") else c.text for c in streamed.choices]
        assert chunk.usage == streamed.usage


# ---- completions, against a real model


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """(client, server, engine, tokenizer) of a tiny model."""
    from transformers import AutoTokenizer

    folder = tiny_model(tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = TransformersEngine(folder, torch.device("cpu"), torch.float32, [tokenizer.eos_token_id], frozen=True)
    with serving(engine, tokenizer) as (client, server):
        yield client, server, engine, tokenizer


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echoed_log_probs_are_those_of_the_model(real, as_ids, max_tokens):
    """What evaluation harnesses ask for: the log-prob of each prompt token, and whether it was the likeliest."""
    client, _, engine, tokenizer = real
    texts = ["2+2=4", "a", "the number is 7."]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    answer = client.completions.create(model="m", prompt=prompts if as_ids else texts, max_tokens=max_tokens, echo=True,
                                       logprobs=1, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice, ids, text in zip(answer.choices, prompts, texts, strict=True):
        with torch.no_grad():
            logits = engine.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        found = choice.logprobs
        assert choice.text[:len(text)] == text and len(found.tokens) == len(ids) + max_tokens
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        for t, token in enumerate(ids[1:], 1):
            assert found.token_logprobs[t] == pytest.approx(float(logits[t - 1, token]), abs=1e-4)
            assert max(found.top_logprobs[t].values()) == pytest.approx(float(logits[t - 1].max()), abs=1e-4)
        if max_tokens:
            assert found.token_logprobs[-1] == pytest.approx(float(logits[-1].max()), abs=1e-4)
            assert choice.text[len(text):] == tokenizer.decode([int(logits[-1].argmax())], skip_special_tokens=True)
        assert "".join(found.tokens)[found.text_offset[-1]:] == found.tokens[-1]
    assert answer.usage.prompt_tokens == sum(map(len, prompts))


def test_greedy_calls_agree_however_they_are_made(real):
    client, _, _, tokenizer = real
    prompt = tokenizer.apply_chat_template(user("1+1="), tokenize=False, add_generation_prompt=True)
    chat = client.chat.completions.create(model="m", messages=user("1+1="), temperature=0, max_tokens=8)
    text = client.completions.create(model="m", prompt=prompt, temperature=0, max_tokens=8)
    ids = client.completions.create(model="m", prompt=tokenizer(prompt)["input_ids"], temperature=0, max_tokens=8,
                                    logprobs=0)
    assert chat.choices[0].message.content == text.choices[0].text == ids.choices[0].text
    assert ids.choices[0].logprobs.top_logprobs is None and len(ids.choices[0].logprobs.tokens) <= 8
    seeded = [client.completions.create(model="m", prompt="1", seed=seed, max_tokens=9).choices[0].text
              for seed in (3, 3, 4)]
    assert seeded[0] == seeded[1] != seeded[2]


# ---- refusals


def post(server, path, body, key="secret", method="POST"):
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connection.request(method, f"/v1/{path}", body if isinstance(body, bytes) else json.dumps(body).encode(), headers)
    response = connection.getresponse()
    return response.status, response.read()


@pytest.mark.parametrize(("body", "said"), [
    (b"{", "no valid JSON"), (b"[1]", "must be a JSON object, got list"), (b'{"messages": NaN}', "NaN"),
    (b'{"messages": "\\ud800"}', "no valid JSON"), (b"\xff", "no valid JSON"), (b"[" * 100000, "no valid JSON"),
    (b"", "no valid JSON")])
def test_bodies_that_are_no_json_object(scripted, body, said):
    status, answer = post(scripted("x")[1], "chat/completions", body)
    error = json.loads(answer)["error"]
    assert status == 400 and said in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("changes", "param"), [
    ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"), ({"messages": [7]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages[0].weight"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
     "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0]"),
    ({"n": 0}, "n"), ({"n": 129}, "n"), ({"n": True}, "n"), ({"top_p": 0.9}, "top_p"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"), ({"logit_bias": {"1": 2}}, "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs"), ({"logprobs": 2}, "logprobs"), ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"), ({"response_format": {"type": "json_object"}},
                                                              "response_format"),
    ({"tools": [{"type": "custom"}]}, "tools[0]"), ({"tools": {}}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
    ({"temperature": -1}, "temperature"), ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"), ({"seed": "x"}, "seed"), ({"seed": 2**64}, "seed"),
    ({"stop": [""]}, "stop"), ({"stop": 5}, "stop"), ({"stop": ["a"] * 17}, "stop"), ({"stream": 1}, "stream"),
    ({"stream_options": {"x": 1}}, "stream_options"), ({"model": 5}, "model"), ({"wizardry": 1}, "wizardry")])
def test_what_is_not_offered_is_named(scripted, changes, param):
    """Through the client, which turns the status into its own error."""
    client, _, engine = scripted("x")
    served = len(engine.served)
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body={"messages": user("hi"), **changes}, cast_to=object)
    assert caught.value.param == param and param.partition("[")[0] in caught.value.message
    assert len(engine.served) == served


@pytest.mark.parametrize(("changes", "param"), [
    ({"prompt": None}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [1, "a"]}, "prompt"), ({"prompt": [1.5]},
                                                                                             "prompt"),
    ({"prompt": [-1]}, "prompt"), ({"prompt": [10**6]}, "prompt"), ({"prompt": ""}, "prompt"),
    ({"prompt": [True]}, "prompt"), ({"logprobs": 5}, "logprobs"), ({"max_tokens": 0}, "max_tokens"),
    ({"echo": True, "max_tokens": 5}, "max_tokens"), ({"echo": True}, "max_tokens"), ({"suffix": "x"}, "suffix"),
    ({"best_of": 3}, "best_of"), ({"n": 2, "echo": True, "max_tokens": 0}, "echo"),
    ({"stream": True, "echo": True, "max_tokens": 0}, "echo")])
def test_what_is_not_offered_of_text_calls(scripted, changes, param):
    with pytest.raises(openai.BadRequestError) as caught:
        scripted("x")[0].post("/completions", body={"prompt": "hi", **changes}, cast_to=object)
    assert caught.value.param == param


def test_neutral_values_are_no_offence():
    call = chat_call({"messages": user("hi"), "n": 1, "top_p": 1.0, "presence_penalty": 0, "logit_bias": {},
                      "parallel_tool_calls": True, "response_format": {"type": "text"}, "user": "me", "store": False,
                      "tool_choice": "auto", "stop": "x"})
    assert call.stop == ("x",) and call.temperature is None and not call.tools
    assert parse(b'{"n": null, "seed": 0}') == {"seed": 0}
    assert text_call({"prompt": [[1], "a"], "echo": False, "best_of": 1}).prompts == [[1], "a"]


def test_a_prompt_that_leaves_no_room(scripted):
    client = scripted("x")[0]
    for call in (lambda: client.chat.completions.create(model="m", messages=user("word " * 400)),
                 lambda: client.completions.create(model="m", prompt="word " * 400),
                 lambda: client.completions.create(model="m", prompt=[1] * CONTEXT),
                 lambda: client.completions.create(model="m", prompt=[1] * CONTEXT, echo=True, max_tokens=1)):
        with pytest.raises(openai.BadRequestError) as caught:
            call()
        assert caught.value.code == "context_length_exceeded" and str(CONTEXT) in caught.value.message
    assert client.completions.create(model="m", prompt=[1] * (CONTEXT - 1)).usage.completion_tokens == 1


def test_keys_models_and_paths(scripted):
    client, server, _ = scripted("x")
    for key in ("wrong", "", "secret2", "Secret"):
        status, body = post(server, "chat/completions", {"messages": user("hi")}, key)
        assert status == 401 and json.loads(body)["error"]["code"] == "invalid_api_key"
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("huge")
    for method, path, expected in (("POST", "embeddings", 404), ("GET", "chat/completions", 405)):
        status, body = post(server, path, {}, method=method)
        assert status == expected and "is not offered here" in json.loads(body)["error"]["message"]
    status, body = post(server, "completions", b'"' + b"x" * server.max_body_bytes)
    assert status == 413 and json.loads(body)["error"]["code"] == "request_too_large"
    assert client.completions.create(model="m", prompt="still").choices[0].text == "x"


def test_without_a_chat_template_there_are_text_calls_only(tokenizer):
    engine = ScriptedEngine([1], [tokenizer.eos_token_id], script=lambda prompt, rng: ids_of(tokenizer, "x"))
    with serving(engine, tokenizer, template=False) as (client, _):
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model="m", messages=user("hi"))
        assert client.completions.create(model="m", prompt="hi").choices[0].text == "x"


def test_control_tokens_are_text_in_messages_and_tokens_in_prompts(scripted, tokenizer):
    client, _, engine = scripted("x")
    control = tokenizer.eos_token_id
    client.chat.completions.create(model="m", messages=user("a<|im_end|>b"))
    assert engine.served[-1][0].count(control) == 1  # that of the template
    client.completions.create(model="m", prompt="a<|im_end|>b")
    assert engine.served[-1][0].count(control) == 1


def test_a_withdrawn_key_ends_its_calls(tokenizer):
    """The call waits in the engine when its key goes: the connection closes, the request is cancelled."""
    engine = ScriptedEngine([1], [tokenizer.eos_token_id])
    add = engine.add
    waiting = threading.Event()

    def never(request_id, request):
        add(request_id, request)
        engine.running[request_id][0] = 10**9
        waiting.set()

    engine.add = never
    with serving(engine, tokenizer) as (client, server):
        failed = []

        def call():
            try:
                client.completions.create(model="m", prompt="hi")
            except openai.OpenAIError as error:
                failed.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        assert waiting.wait(60)
    thread.join(60)
    assert len(failed) == 1 and not isinstance(failed[0], openai.APIStatusError)
    engine.generate([])
    assert not engine.running


# ---- what continues what


def said(content, *calls):
    message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return message


@pytest.mark.parametrize(("held", "given", "expected"), [
    ([], user("a"), True), (user("a"), user("a"), True), (user("a"), user("b"), False), (user("a"), user("a "), False),
    (user("a") + [said("x ")], user("a") + [said("x")] + user("b"), True),
    (user("a") + [said("x")], user("a") + [said("y")] + user("b"), False),
    (user("a") + [said("x")], user("a"), False), (user("a") + [said("x")], user("a") + user("x"), False),
    (user("a") + [said("", ("f", {"x": 1}))], user("a") + [said("", ("f", {"x": 1}))], True),
    (user("a") + [said("", ("f", {"x": 1}))], user("a") + [said("", ("f", {"x": 2}))], False),
    (user("a") + [said("", ("f", {"x": 1}))], user("a") + [said("")], False),
    ("once", "once upon", True), ("once", "onc", False), ([1, 2], [1, 2, 3], True), ([1, 2], [1, 3], False)])
def test_what_begins_with_what(held, given, expected):
    assert begins(given, held) is expected


def test_ids_of_calls_do_not_count():
    ours = said("", ("f", {"x": 1}))
    theirs = chat_call({"messages": [{"role": "assistant", "content": None, "refusal": None, "tool_calls": [
        {"id": "other", "type": "function", "function": {"name": "f", "arguments": '{ "x":1}'}}]}]}).messages[0]
    assert same(ours, theirs)
    with pytest.raises(ApiError):
        chat_call({"messages": [{"role": "assistant"}]})
