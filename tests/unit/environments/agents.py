"""Agents that call the policy with OpenAI's client, unmodified; and some that misbehave."""

import json
import os
import random
import threading
import time

import openai


def talk(task, base_url, api_key, model, turns=2):
    """`turns` calls in one conversation; returns the number of characters said."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [{"role": "system", "content": "play"}, {"role": "user", "content": f"begin {task.data}"}]
    said = 0
    for turn in range(turns):
        message = client.chat.completions.create(model=model, messages=messages).choices[0].message
        said += len(message.content)
        messages += [message, {"role": "user", "content": f"turn {turn} <|im_end|>"}]
    return said


def script(task, base_url, api_key, model):
    """What the task's data names: {"do": name}."""
    client = openai.OpenAI(max_retries=0)  # where and with what key: from the environment, as anyone would
    return {name: function for name, function in globals().items() if name.startswith("do_")}[
        "do_" + task.data["do"]](client, task)


KEYS = []


def say(client, *contents, **options):
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return client.chat.completions.create(model="any", messages=messages, **options).choices[0].message.content


def do_nothing(client, task):
    return 1.0


def do_raise(client, task):
    say(client, "hello")
    raise ValueError("asked to raise")


def do_hang(client, task):
    say(client, "hello")
    time.sleep(3600)


def do_die(client, task):
    say(client, "hello")
    os._exit(3)


def do_exit(client, task):
    raise SystemExit("asked to exit")


def do_object(client, task):
    say(client, "hello")
    return object()


def do_nan(client, task):
    say(client, "hello")
    return float("nan")


def do_none(client, task):
    say(client, "hello")


def do_text(client, task):
    return "7" + say(client, "hello")[:0]


def do_fine(client, task):
    say(client, "hello")
    return 0.5


def do_endless(client, task):
    while True:
        say(client, "hello")


def do_give_up(client, task):
    """A command-line program's way: end on the first error."""
    try:
        do_endless(client, task)
    except openai.BadRequestError as error:
        raise SystemExit(2) from error


def do_overflow(client, task):
    say(client, "hello")
    say(client, "x" * (task.data.get("size") or 5000))


def do_restart(client, task):
    """A second conversation that is no continuation of the first."""
    first = say(client, "hello")
    say(client, "hello", "not what you said", "and now?")
    say(client, "hello", first, "and now?")
    return 2.0


def do_branch(client, task):
    """Two answers to a second question, the first conversation goes on, and a third attempt at what follows it."""
    first = say(client, "hello")
    second = say(client, "hello", first, "and now?")
    say(client, "hello", first, "or else?")
    say(client, "hello", first, "and now?", second, "so?")
    say(client, "hello", first, "and now?", second, "or so?")
    return 1.0


def do_random(client, task):
    """Any walk over the states of some conversations: go on, go back, begin anew, both at once."""
    rng, states, calls = random.Random(task.seed), [[]], rng_calls(task)
    for number in range(calls):
        state = rng.choice(states)
        text = f"{number} " + "".join(rng.choices(["<|im_end|>", "é", "turn", "<think>", " ", "\n", "7"], k=3)) + "."
        if rng.random() < 0.2:
            thread = threading.Thread(target=say, args=(client, *state, "meanwhile"))
            thread.start()
            states.append([*state, text, say(client, *state, text)])
            thread.join()
        else:
            states.append([*state, text, say(client, *state, text)])
    return calls / 4


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"x": {"type": "integer"}}}}}]


def do_wild(client, task):
    """The same with tools, streams, stop texts, limits, and messages of the past that are changed."""
    rng, states = random.Random(task.seed), [[]]
    for number in range(8):
        state = list(rng.choice(states))
        if state and rng.random() < 0.15:
            place = rng.randrange(len(state))
            state[place] = state[place] | {"content": f"{state[place]['content'] or ''} changed <|im_end|>"}
        for call in state[-1].get("tool_calls", []) if state else []:
            state.append({"role": "tool", "tool_call_id": call["id"], "content": "42"})
        state.append({"role": "user", "content": f"{number} " + "".join(rng.choices("é\ufdd0 \n7<", k=3))})
        states.append([*state, answered(client, state, rng)])
    return 1.0


def answered(client, messages, rng):
    """The message that a call gives, as a stream or whole."""
    options = {"stop": rng.choices("e7<\nh", k=2), "tools": TOOLS, "max_tokens": rng.randint(1, 9), "temperature": 0.5}
    options = {name: value for name, value in options.items() if rng.random() < 0.4}
    if rng.random() < 0.5:
        message = client.chat.completions.create(model="any", messages=messages, **options).choices[0].message
        return {"content": None} | message.model_dump(exclude_none=True)
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(
        model="any", messages=messages, stream=True, **options)]
    message = {"role": "assistant", "content": "".join(delta.content or "" for delta in deltas)}
    calls = [call.model_dump(exclude={"index"}) for delta in deltas for call in delta.tool_calls or []]
    return message | ({"tool_calls": calls} if calls else {})


def rng_calls(task):
    """How many calls `do_random` makes, those beside others left out."""
    return 1 + task.seed % 5


def do_parallel(client, task):
    """Calls at the same time."""
    threads = [threading.Thread(target=say, args=(client, f"number {i % 2}")) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1.0


def do_leave(client, task):
    """Hang up in the middle of a call."""
    say(client, "hello")
    try:
        say(client.with_options(timeout=0.2), "slow")
    except openai.APITimeoutError:
        return 3.0


def do_break(client, task):
    """Close a stream that has said enough, and go on from what it said."""
    messages, said = [{"role": "user", "content": "hello"}], ""
    with client.chat.completions.create(model="any", messages=messages, stream=True) as stream:
        for chunk in stream:
            said += chunk.choices[0].delta.content or ""
            if len(said) >= task.data["enough"]:
                break
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "done?"}]
    client.chat.completions.create(model="any", messages=messages)
    return float(len(said))


def do_choose(client, task):
    """Two answers at a time, twice; it goes on from the second."""
    messages, said = [{"role": "user", "content": "hello"}], 0
    for _ in range(2):
        answer = client.chat.completions.create(model="any", messages=messages, n=2)
        said += sum(len(choice.message.content) for choice in answer.choices)
        messages += [answer.choices[1].message, {"role": "user", "content": "more"}]
    return float(said)


def do_reuse(client, task):
    """Come back with the key of the episode before."""
    say(client, "hello")
    before, KEYS[:] = KEYS[:], [client.api_key]
    if not before:
        return 0.0
    try:
        say(client.with_options(api_key=before[0]), "hello again")
    except openai.AuthenticationError as error:
        return 4.01 if error.code == "invalid_api_key" else -1.0


def do_text_calls(client, task):
    prompt = "once"
    for _ in range(2):
        prompt += client.completions.create(model="any", prompt=prompt, max_tokens=8).choices[0].text + " and"
    return json.dumps(len(prompt))


def digits(base_url, api_key):
    """Two calls in one conversation; the reward is the share of digits in what was said."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages, said = [{"role": "user", "content": "0?"}], ""
    for _ in range(2):
        message = client.chat.completions.create(model="any", messages=messages).choices[0].message
        said += message.content
        messages += [message, {"role": "user", "content": "+"}]
    return sum(character.isdigit() for character in said) / max(len(said), 1)


class Stateful:
    """An agent that is a class, with a coroutine."""

    def __init__(self, reward: float = 1.0):
        self.reward, self.count = reward, 0

    async def __call__(self, task, **access):
        async with openai.AsyncOpenAI(base_url=access["base_url"], api_key=access["api_key"]) as client:
            await client.chat.completions.create(model=access["model"], messages=[{"role": "user", "content": "hi"}])
        self.count += 1
        return self.reward


def where():
    """Where the process finds OpenAI's API."""
    return json.dumps([os.environ.get(name) for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "NO_PROXY", "no_proxy")])
