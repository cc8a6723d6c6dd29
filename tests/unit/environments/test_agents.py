"""Agents written with OpenAI's client as environments: what they call becomes exact rows, whatever they do."""

import asyncio
import collections
import json
import math
import os
import random

import pytest
import torch

from hybridrl.batch import lengths, num_rows, padded, rows_of
from hybridrl.config import EnvironmentConfig, RolloutConfig
from hybridrl.controller.player import Player, episode_metrics
from hybridrl.environments.binding import bind
from hybridrl.errors import ConfigError, EpisodeError
from hybridrl.workers.rollout.chat import Chat
from hybridrl.workers.rollout.endpoint.caller import EpisodeCaller
from hybridrl.workers.rollout.endpoint.calls import chat_call
from hybridrl.workers.rollout.episodes import EpisodeRunner
from tests.processes import ended
from tests.unit.environments.chats import chat_tokenizer
from tests.unit.environments.engines import ScriptedEngine
from tests.unit.environments.playing import deadlines_after
from tests.unit.environments.test_endpoint import stuck
from tests.unit.environments.test_episodes import play, sampled_in, scripted

AGENTS = "tests.unit.environments.agents"


@pytest.fixture
def runner():
    """`runner(engine, tokenizer, agent, ...)`: a runner of an agent of `agents.py` that is closed after the test."""
    made = []

    def make(engine, tokenizer, agent="script", rollout=None, options=None, reward="", limits=None, **further):
        rollout = rollout or RolloutConfig(max_prompt_tokens=200, max_response_tokens=400)
        cfg = EnvironmentConfig(name="agent", **(limits or {}), options={
            "function": f"{AGENTS}:{agent}", "options": options or {}, "reward": reward, **further})
        made.append(EpisodeRunner(engine, tokenizer, rollout, cfg))
        return made[-1]

    yield make
    for one in made:
        one.close()


def doing(*names):
    return [{"do": name} for name in names]


def served_by(engine):
    return collections.Counter((tuple(fed), tuple(c.token_ids), tuple(torch.tensor(c.log_probs).tolist()))
                               for fed, c in engine.served)


def ids_of(tokenizer, text):
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def says(tokenizer, *texts):
    """An engine that says these texts one after the other, whatever it is asked."""
    order = iter(texts * 100)
    return ScriptedEngine([1], [tokenizer.eos_token_id], script=lambda prompt, rng: ids_of(tokenizer, next(order)))


# ---- rows


@pytest.mark.parametrize(("template", "kind"), [("thinking", "bytes"), ("merging", "spaces"), (None, "spaces"),
                                                ("chatml", "characters")])
def test_every_token_is_the_one_that_was_sampled_after_what_was_fed(runner, template, kind):
    """Three calls in one conversation, over tokenizers and templates; templates that rewrite split it into rows."""
    tokenizer = chat_tokenizer(kind, template or "chatml")
    engine = scripted(tokenizer)
    batch = play(runner(engine, tokenizer, "talk", options={"turns": 3},
                        limits={"chat_template": template is not None}), 6)
    assert set(batch["reward_error"]) == {None}
    assert collections.Counter(sampled_in(batch)) == served_by(engine)
    assert len(set(batch["trajectory_ids"].tolist())) == 6
    assert sum(map(len, batch["turns"])) == 18
    if template in ("chatml", None):
        assert num_rows(batch) == 6
    # the number of characters that the agent saw, on the last token of the last row
    for trajectory, reward in zip(batch["trajectory_ids"].tolist(), batch["rewards"].tolist(), strict=True):
        rows = [i for i, other in enumerate(batch["trajectory_ids"].tolist()) if other == trajectory]
        placed = [rows_of(batch["token_rewards"])[i] for i in rows]
        assert sum(float(row.sum()) for row in placed) == pytest.approx(reward) == float(placed[-1][-1])


def test_what_is_fed_is_what_the_template_writes_of_the_callers_messages(runner):
    tokenizer = chat_tokenizer("bytes")
    engine = says(tokenizer, "one", "two <x>")
    batch = play(runner(engine, tokenizer, "talk"), 1)
    messages = [{"role": "system", "content": "play"}, {"role": "user", "content": "begin None"},
                {"role": "assistant", "content": "one"}, {"role": "user", "content": "turn 0 <|im_end|>"},
                {"role": "assistant", "content": "two <x>"}]
    whole = tokenizer.decode(rows_of(batch["prompt_ids"])[0].tolist() + rows_of(batch["response_ids"])[0].tolist())
    assert whole + "\n" == tokenizer.apply_chat_template(messages, tokenize=False)
    written = rows_of(batch["response_ids"])[0].tolist()
    assert written.count(tokenizer.eos_token_id) == 3  # two responses and the end of the turn between, not its text
    assert [turn["action"] for turn in batch["turns"][0]] == ["one", "two <x>"]
    assert batch["rewards"].tolist() == [len("one") + len("two <x>")]


def test_a_call_that_is_no_continuation_begins_a_row_of_the_same_trajectory(runner):
    """`hello`; another history; then the first conversation goes on: the rows end in the order of their last turns."""
    tokenizer = chat_tokenizer("bytes")
    engine = says(tokenizer, "one", "two", "three")
    batch = play(runner(engine, tokenizer), 1, task=doing("restart"))
    assert [[turn["action"] for turn in turns] for turns in batch["turns"]] == [["two"], ["one", "three"]]
    assert batch["trajectory_ids"].tolist() == [0, 0] and batch["rewards"].tolist() == [2.0, 2.0]
    assert padded(batch["token_rewards"]).sum(1).tolist() == [0.0, 2.0]
    assert "not what you said" in tokenizer.decode(rows_of(batch["prompt_ids"])[0])
    assert collections.Counter(sampled_in(batch)) == served_by(engine)


def test_a_call_that_goes_back_takes_the_tokens_until_there_as_its_prompt(runner):
    """Five calls: three rows; the tokens of a response are the same wherever they are part of a prompt."""
    tokenizer = chat_tokenizer("bytes")
    # tokens that their text would not give back: single letters
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "thenumber"]
    numbers = iter(range(1, 99))
    engine = ScriptedEngine([1], [tokenizer.eos_token_id], script=lambda prompt, rng: [
        *letters, *tokenizer(str(next(numbers)))["input_ids"], tokenizer.eos_token_id])
    assert tokenizer("thenumber")["input_ids"] != letters
    batch = play(runner(engine, tokenizer), 1, task=doing("branch"))
    actions = [[turn["action"][9:] for turn in turns] for turns in batch["turns"]]
    assert actions == [["3"], ["1", "2", "4"], ["5"]]
    prompts = [row.tolist() for row in rows_of(batch["prompt_ids"])]
    main = prompts[1] + rows_of(batch["response_ids"])[1].tolist()
    ends = [len(prompts[1]) + turn["stop"] for turn in batch["turns"][1]]
    assert prompts[0] == main[:ends[0]] and prompts[2] == main[:ends[1]]
    assert collections.Counter(sampled_in(batch)) == served_by(engine)


@pytest.mark.parametrize(("template", "kind"), [("chatml", "bytes"), ("llama", "spaces")])
def test_any_walk_over_conversations_is_exact(runner, template, kind):
    tokenizer = chat_tokenizer(kind, template)
    engine = scripted(tokenizer)
    batch = play(runner(engine, tokenizer, limits={"max_turns": 20}), 20, task=doing("random") * 20)
    assert set(batch["reward_error"]) == {None}
    assert collections.Counter(sampled_in(batch)) == served_by(engine)
    assert len(set(batch["trajectory_ids"].tolist())) == 20
    rewards = dict(zip(batch["trajectory_ids"].tolist(), batch["rewards"].tolist(), strict=True))
    sums = collections.Counter()
    for trajectory, row in zip(batch["trajectory_ids"].tolist(), rows_of(batch["token_rewards"]), strict=True):
        sums[trajectory] += float(row.sum())
    assert sums == rewards and len(set(rewards.values())) == 5


@pytest.mark.parametrize("template", ["chatml", "thinking", "merging", None])
def test_tools_streams_stop_texts_and_a_changed_past_are_exact_too(runner, template):
    """Each turn is what the engine sampled after what is before it in its row, up to the end of a stop text."""
    tokenizer = chat_tokenizer("bytes", template or "chatml")
    engine = scripted(tokenizer)
    words = engine.tokens

    def calls_or_anything(prompt, rng):
        if rng.random() < 0.3:
            call = {"name": "f", "arguments": {"x": rng.randint(1, 9)}}
            return ids_of(tokenizer, f"so <tool_call>{json.dumps(call)}</tool_call>")
        return [*rng.choices(words, k=rng.randint(0, 12)), tokenizer.eos_token_id][:rng.randint(1, 20)]

    engine.script = calls_or_anything
    one = runner(engine, tokenizer, rollout=RolloutConfig(max_prompt_tokens=1000, max_response_tokens=2000),
                 limits={"max_turns": 20, "chat_template": template is not None})
    batch = play(one, 6, task=doing("wild") * 6)
    assert set(batch["reward_error"]) == {None} and batch["rewards"].tolist() == [1.0] * num_rows(batch)
    left, cut = [(tuple(fed), tuple(c.token_ids), tuple(torch.tensor(c.log_probs).tolist()))
                 for fed, c in engine.asked], 0
    for fed, ids, log_probs in sampled_in(batch):
        (place, *_) = (i for i, served in enumerate(left)
                       if served[0] == fed and (served[1][:len(ids)], served[2][:len(ids)]) == (ids, log_probs))
        cut += left.pop(place)[1] != ids
    assert not left and 0 < cut < 24 and len(engine.asked) == 48


def test_calls_at_the_same_time_are_rows_of_their_own(runner):
    tokenizer = chat_tokenizer("bytes")
    engine = scripted(tokenizer)
    batch = play(runner(engine, tokenizer), 3, task=doing("parallel") * 3)
    assert num_rows(batch) == 12 and set(batch["reward_error"]) == {None}
    assert collections.Counter(sampled_in(batch)) == served_by(engine)


def test_text_calls_go_on_with_their_row(runner):
    tokenizer = chat_tokenizer("bytes")
    engine = says(tokenizer, " upon", " a time")
    batch = play(runner(engine, tokenizer, reward="exact"), 1, task=doing("text_calls"), answer=["24"])
    assert num_rows(batch) == 1 and batch["rewards"].tolist() == [1.0]
    assert tokenizer.decode(rows_of(batch["prompt_ids"])[0]) == "once"
    assert batch["response"][0] == " upon and a time"


def test_tool_calls_go_there_and_back_without_a_new_row(runner):
    """The example's agent: a call, its result, an answer; and a call that can't be read is the answer."""
    tokenizer = chat_tokenizer("bytes")
    call = 'so <tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
    engine = says(tokenizer, call, "it is 42")
    one = EpisodeRunner(engine, tokenizer, RolloutConfig(max_prompt_tokens=300, max_response_tokens=400),
                        EnvironmentConfig(name="agent", options={"function": "recipes.agents.calculator:solve",
                                                                 "reward": "numeric"}))
    try:
        batch = play(one, 1, prompt=["6*7?"], answer=["42"])
        assert [turn["action"] for turn in batch["turns"][0]] == [call, "it is 42"] and num_rows(batch) == 1
        assert batch["turns"][0][1]["observation"] == [
            {"role": "tool", "tool_call_id": "call_1_0", "content": "42"}]
        assert batch["rewards"].tolist() == [1.0]
        engine.script = lambda ids, rng: [*tokenizer("<tool_call>{42", add_special_tokens=False)["input_ids"],
                                          tokenizer.eos_token_id]
        batch = play(one, 1, prompt=["6*7?"], answer=["42"])
        assert [len(turns) for turns in batch["turns"]] == [1] and batch["rewards"].tolist() == [1.0]
    finally:
        one.close()


def test_a_game_as_a_program_is_the_game_as_an_environment(runner):
    """The example's guessing game against the environment `guess`: the same rows, token for token."""
    tokenizer = chat_tokenizer("bytes")
    batches = []
    for name, options in (("agent", {"function": "recipes.agents.guesser:play"}), ("guess", {"high": 15})):
        engine = ScriptedEngine([1], [tokenizer.eos_token_id], script=lambda prompt, rng: ids_of(
            tokenizer, str(rng.randint(1, 15)) if rng.random() < 0.9 else "none"))
        one = EpisodeRunner(engine, tokenizer, RolloutConfig(max_prompt_tokens=200, max_response_tokens=400),
                            EnvironmentConfig(name=name, options=options))
        try:
            batches.append(play(one, 24))
        finally:
            one.close()
    ours, theirs = batches
    assert set(theirs["rewards"].tolist()) == {0.0, 1.0} and len(set(map(len, theirs["turns"]))) > 2
    for name in ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "weight_versions",
                 "token_rewards"):
        assert ours[name].values().tolist() == theirs[name].values().tolist(), name
    for name in ("rewards", "group_ids", "trajectory_ids", "episode_ids", "agent_ids"):
        assert ours[name].tolist() == theirs[name].tolist(), name
    assert list(ours["response"]) == list(theirs["response"])
    assert list(ours["finish_reason"]) == list(theirs["finish_reason"])


def test_a_class_is_built_once_and_may_be_a_coroutine(runner):
    tokenizer = chat_tokenizer("bytes")
    batch = play(runner(scripted(tokenizer), tokenizer, "Stateful", options={"reward": 0.25},
                        limits={"max_running_episodes": 1}), 3)
    assert batch["rewards"].tolist() == [0.25] * 3


def test_a_key_is_good_for_its_own_episode_only(runner):
    """One process plays the episodes one after the other; the second tries the first one's key."""
    tokenizer = chat_tokenizer("bytes")
    batch = play(runner(scripted(tokenizer), tokenizer, limits={"max_running_episodes": 1}), 2,
                 task=doing("reuse", "reuse"))
    assert batch["rewards"].tolist() == [0.0, pytest.approx(4.01)] and num_rows(batch) == 2


# ---- rewards, ends


def test_what_is_returned_and_what_is_rewarded(runner):
    tokenizer = chat_tokenizer("bytes")
    one = runner(says(tokenizer, "say 5"), tokenizer, reward="numeric")
    batch = play(one, 4, task=doing("fine", "none", "text", "text"), answer=["5", "5", "7", "5"])
    assert batch["rewards"].tolist() == [1.5, 1.0, 1.0, 0.0]
    assert set(batch["finish_reason"]) == {"done"}


def test_limits_end_an_episode_without_failing_it(runner):
    tokenizer = chat_tokenizer("bytes")
    one = runner(says(tokenizer, "5"), tokenizer, reward="numeric", limits={"max_turns": 3})
    batch = play(one, 2, task=doing("endless", "overflow"), answer=["5", "5"])
    assert set(batch["reward_error"]) == {None}
    assert [reason for reason, _ in zip(batch["finish_reason"], batch["turns"], strict=True)] == [
        "max_turns"] * 3 + ["overflow"]
    assert batch["rewards"].tolist() == [1.0] * 4
    tokenised = []
    one.chat.opening = lambda *args: (tokenised.append(args), Chat.opening(one.chat, *args))[1]
    batch = play(one, 1, task=[{"do": "overflow", "size": 1 << 20}], answer=["5"])  # too long to be read at all
    assert list(batch["finish_reason"]) == ["overflow"] and batch["rewards"].tolist() == [1.0] and len(tokenised) == 1
    batch = play(one, 1, task=doing("give_up"), answer=["5"])
    assert list(batch["finish_reason"]) == ["max_turns"] * 3 and batch["rewards"].tolist() == [1.0] * 3
    unrewarded = play(runner(says(tokenizer, "5"), tokenizer, limits={"max_turns": 3}), 1, task=doing("endless"))
    assert unrewarded["rewards"].tolist() == [0.0] * 3
    cut = ScriptedEngine([5], [tokenizer.eos_token_id], script=lambda ids, rng: [5] * 50)
    batch = play(runner(cut, tokenizer, limits={"max_turn_tokens": 4}), 1, task=doing("fine"))
    assert list(batch["finish_reason"]) == ["length"] and lengths(batch["response_ids"]).tolist() == [4]


# ---- faults


def test_each_fault_costs_its_own_episode_and_is_counted(runner):
    tokenizer = chat_tokenizer("bytes")
    faults = {"raise": "raised", "hang": "timeout", "die": "died", "exit": "raised", "object": "invalid",
              "nan": "invalid", "none": "invalid", "text": "invalid", "nothing": "invalid"}
    one = runner(scripted(tokenizer), tokenizer, limits={"episode_timeout_s": 4.0})
    tasks = doing(*faults, *["fine"] * 5)
    deadlines_after(one, episodes=len(tasks) - 1)
    batch = play(one, len(tasks), task=tasks)
    assert num_rows(batch) == len(tasks)
    kinds = [str(error).partition(":")[0] for error in batch["reward_error"]]
    assert kinds == [*faults.values(), *["None"] * 5], list(batch["reward_error"])
    assert [math.isnan(reward) for reward in batch["rewards"].tolist()] == [True] * len(faults) + [False] * 5
    assert "asked to raise (agents.py" in batch["reward_error"][0]
    assert "made" not in batch["reward_error"][-1 - 5] and "got no response" in batch["reward_error"][len(faults) - 1]
    assert episode_metrics(batch)["episodes/failed_invalid"] == 5
    pids = {session._pid for session in one._pool._idle}
    one.close()
    assert pids and ended(*pids)


def test_faults_among_many_episodes_are_all_accounted_for(runner):
    """Random walks over conversations, every tenth episode with a fault, on an engine that is asked out of order."""
    tokenizer = chat_tokenizer("bytes")
    rng = random.Random(1)
    faults = {"raise": "raised", "exit": "raised", "die": "died", "object": "invalid", "nothing": "invalid"}
    tasks = doing(*["random"] * 90, *2 * list(faults))
    rng.shuffle(tasks)
    engine = scripted(tokenizer)
    one = runner(engine, tokenizer, limits={"max_running_episodes": 16, "max_turns": 20})
    batch = play(one, 100, task=tasks)
    found = {}
    for episode, error in zip(batch["episode_ids"].tolist(), batch["reward_error"], strict=True):
        assert found.setdefault(episode, error) == error
    assert [str(found[i]).partition(":")[0] for i in range(100)] == [faults.get(task["do"], "None") for task in tasks]
    assert collections.Counter(sampled_in(batch)) == served_by(engine)
    assert not one._server._callers and not one._server._tasks and not engine.running


def test_who_hangs_up_ends_the_request_and_may_ask_again(runner):
    """The second call is never answered: it is cancelled in the engine when the agent leaves, and leaves no tokens."""
    tokenizer = chat_tokenizer("bytes")
    engine = scripted(tokenizer)
    add = engine.add

    def never_slow(request_id, request):
        add(request_id, request)
        if "slow" in tokenizer.decode(list(request.prompt_ids)):
            engine.running[request_id][0] = 10**9

    engine.add = never_slow
    batch = play(runner(engine, tokenizer), 1, task=doing("leave"))
    assert batch["rewards"].tolist() == [3.0] and num_rows(batch) == 1
    assert collections.Counter(sampled_in(batch)) == served_by(engine)
    engine.generate([])
    assert not engine.running


def test_a_stream_that_is_closed_ends_its_response_there(runner):
    """The engine says three tokens of eight and no more: they are a turn of the row."""
    tokenizer = chat_tokenizer("bytes")
    engine = says(tokenizer, "12345678", "yes")
    ids = [tokenizer.convert_tokens_to_ids(digit) for digit in "12345678"]
    engine.script = lambda prompt, rng: [*ids, tokenizer.eos_token_id]
    with stuck(engine, 3):
        one = runner(engine, tokenizer, reward="exact", limits={"episode_timeout_s": 120.0})
        asked, add = [], engine.add

        def add_second(request_id, request):
            asked.append(list(request.prompt_ids))
            add(request_id, request)
            if len(asked) == 2:
                engine.running[request_id][0] = 1

        engine.add = add_second
        batch = play(one, 1, task=[{"do": "break", "enough": 3}], answer=["x"])
        engine.add = add
    [prompt], [response] = rows_of(batch["prompt_ids"]), rows_of(batch["response_ids"])
    first, second = batch["turns"][0]
    assert batch["rewards"].tolist() == [3.0] and first["info"] == {"hung_up": True} and second["info"] == {}
    assert response[first["start"]:first["stop"]].tolist() == ids[:3] and first["action"] == "123"
    assert asked[1] == prompt.tolist() + response[:second["start"]].tolist()
    mask = rows_of(batch["response_mask"])[0]
    assert mask.nonzero().squeeze(1).tolist() == [*range(3), *range(second["start"], second["stop"])]
    assert not engine.running and episode_metrics(batch)["episodes/info/hung_up"] == 1.0


def test_answers_to_one_call_are_rows_of_their_own(runner):
    tokenizer = chat_tokenizer("bytes")
    engine = scripted(tokenizer)
    batch = play(runner(engine, tokenizer), 4, task=doing("choose") * 4)
    assert set(batch["reward_error"]) == {None} and len(set(batch["trajectory_ids"].tolist())) == 4
    assert collections.Counter(sampled_in(batch)) == served_by(engine) and len(engine.served) == 16
    assert num_rows(batch) == 12 and sorted(map(len, batch["turns"])) == [1] * 8 + [2] * 4
    limited = play(runner(engine, tokenizer, limits={"max_turns": 3}), 1, task=doing("choose"))
    assert list(limited["finish_reason"]) == ["max_turns"] * 2 and num_rows(limited) == 2


def test_an_agent_that_makes_no_call_for_too_long_is_a_timeout(runner):
    tokenizer = chat_tokenizer("bytes")
    batch = play(runner(scripted(tokenizer), tokenizer, limits={"turn_timeout_s": 2.0}), 1, task=doing("hang"))
    assert list(batch["reward_error"]) == ["timeout: run: neither a call nor a result within 2 s"]


def test_a_call_may_take_as_long_as_the_engine_needs():
    """The clock of `turn_timeout_s` stands while a call is under way, and starts anew after the last of them."""
    async def deadlines():
        caller = EpisodeCaller(ScriptedEngine([1], [2]), None, None, 9, "hermes", 1.0, response_tokens=9, turn_tokens=9,
                               seed_of=None, max_calls=9, holds=None, turn_timeout_s=1000.0)
        call = chat_call({"messages": [{"role": "user", "content": "hi"}]})
        async with caller.watched():
            began = caller._patience.when()
            with caller.answering(call):
                with caller.answering(call):
                    pass
                during = caller._patience.when()
            return began, during, caller._patience.when()

    began, during, after = asyncio.run(deadlines())
    assert during is None and after >= began


def test_a_call_in_flight_ends_with_its_episode(runner):
    tokenizer = chat_tokenizer("bytes")
    engine = scripted(tokenizer)
    add = engine.add

    def never(request_id, request):
        add(request_id, request)
        engine.running[request_id][0] = 10**9

    engine.add = never
    one = runner(engine, tokenizer, limits={"episode_timeout_s": 2.0})
    batch = play(one, 2, task=doing("fine", "fine"))
    assert [error.partition(":")[0] for error in batch["reward_error"]] == ["timeout"] * 2
    engine.generate([])
    assert not engine.running and not one._server._callers and not one._server._tasks


def test_too_many_failures_are_one_clear_error(runner):
    tokenizer = chat_tokenizer("bytes")
    one = runner(scripted(tokenizer), tokenizer)

    class Policy:
        def play(self, batch, cfg, temperature=None):
            return play(one, num_rows(batch), task=list(batch["task"]))

    from hybridrl.batch import make_batch
    with pytest.raises(EpisodeError, match=r"3 of 3 episodes failed \(3 invalid\).*the first: invalid: run: the agent "
                                           "got no response"):
        Player(one.cfg)(Policy(), make_batch(task=doing("nothing") * 3))


# ---- options


@pytest.mark.parametrize(("options", "said"), [
    ({}, "environment 'agent' needs 'function'"),
    ({"function": "solve"}, "Unknown agent 'solve'. Choices: package.module:name"),
    ({"function": "no.such:thing"}, "can't import 'no.such'"),
    ({"function": f"{AGENTS}:tolk"}, "Unknown agent in module .* 'tolk'. Did you mean talk"),
    ({"function": f"{AGENTS}:KEYS"}, "must be a function or a class, got list"),
    ({"function": f"{AGENTS}:talk", "options": {"turn": 2}}, "Unknown option of agent .* 'turn'. Did you mean turns"),
    ({"function": f"{AGENTS}:talk", "options": {"model": "x"}}, "Unknown option of agent"),
    ({"function": f"{AGENTS}:say"}, "agent .* needs 'client'"),
    ({"function": f"{AGENTS}:Stateful", "options": {"rewards": 1}}, "can't be built with options"),
    ({"function": "collections:OrderedDict"}, "needs a method __call__"),
    ({"function": f"{AGENTS}:talk", "format": "hermit"}, "Unknown format of tool calls 'hermit'. Did you mean hermes"),
    ({"function": f"{AGENTS}:talk", "reward": "numerical"}, "Unknown reward function 'numerical'"),
    ({"function": f"{AGENTS}:talk", "reward_options": {"a": 1}}, "must be empty without a reward function")])
def test_options_that_do_not_fit_are_refused_before_anything_starts(options, said):
    with pytest.raises(ConfigError, match=said):
        bind("agent", options)


def test_a_system_prompt_is_the_agents_own_business(runner):
    with pytest.raises(ConfigError, match="system_prompt must be empty for environment 'agent'"):
        runner(scripted(tokenizer := chat_tokenizer("bytes")), tokenizer, limits={"system_prompt": "hi"})


def test_the_processes_environment_names_the_policy():
    from hybridrl.environments.agent import Access, AgentEnvironment
    from hybridrl.environments.environment import Task

    kept = dict(os.environ)
    try:
        os.environ.pop("no_proxy", None)
        os.environ["NO_PROXY"] = "example.org"
        environment = AgentEnvironment(f"{AGENTS}:where")
        environment.run(Task(), Access("http://127.0.0.1:1/v1", "secret", "policy"))
        assert environment._returned == json.dumps(
            ["http://127.0.0.1:1/v1", "secret", "example.org,127.0.0.1", "127.0.0.1"])
    finally:
        os.environ.clear()
        os.environ.update(kept)
