"""Episodes over the engine loop, with real environment processes and an engine that samples what its seed says."""

import asyncio
import collections
import io
import json
import random
import threading

import pytest
import torch
from rich.console import Console

from hybridrl.batch import FINISH_REASONS, lengths, make_batch, num_rows, padded, put, rows_of
from hybridrl.config import EnvironmentConfig, RolloutConfig
from hybridrl.controller.samples import samples_of
from hybridrl.environments import AsyncEnvironment
from hybridrl.environments.record import FAILURES
from hybridrl.errors import DeadlineError, EpisodeError
from hybridrl.samples import read_samples
from hybridrl.show import show, texts_of
from hybridrl.workers.rollout.admission import Admission
from hybridrl.workers.rollout.episode_rows import episode_batch, tasks_of
from hybridrl.workers.rollout.episodes import EpisodeRunner
from tests.processes import ended
from tests.unit.environments.chats import KINDS, TEMPLATES, chat_tokenizer
from tests.unit.environments.engines import ScriptedEngine
from tests.unit.environments.playing import deadlines_after

HERE = "tests.unit.environments.test_episodes"
GAMES = "tests.unit.environments.games"
FAULTY = "tests.unit.environments.misbehaving"


@pytest.fixture
def runner():
    """`runner(engine, tokenizer, name, ...)`: a runner that is closed after the test."""
    made = []

    def make(engine, tokenizer, name, rollout=None, **options):
        rollout = rollout or RolloutConfig(max_prompt_tokens=200, max_response_tokens=400)
        made.append(EpisodeRunner(engine, tokenizer, rollout, EnvironmentConfig(name=name, **options)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def scripted(tokenizer, **options):
    ids = [i for i in range(len(tokenizer)) if i != tokenizer.eos_token_id]
    control = [i for i in ids if i in tokenizer.added_tokens_decoder]
    return ScriptedEngine(ids + 10 * control, [tokenizer.eos_token_id], **options)


def play(one, rows, **columns):
    batch = make_batch(group_ids=torch.arange(rows), seeds=torch.arange(rows) + 100,
                       episode_ids=torch.arange(rows), **columns)
    return episode_batch(batch, one.play(tasks_of(batch, 3), batch["seeds"].tolist(), 1.0), one.chat.plain)


def sampled_in(batch):
    """(ids before, ids, log-probs) of every turn in the rows; checks the columns of all other tokens."""
    columns = [rows_of(batch[name]) for name in ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs",
                                                 "weight_versions")]
    found = []
    for prompt, ids, mask, log_probs, versions, turns in zip(*columns, list(batch["turns"]), strict=True):
        expected = torch.zeros(len(ids), dtype=torch.bool)
        for turn in turns:
            here = slice(turn["start"], turn["stop"])
            expected[here] = True
            found.append((tuple(prompt.tolist() + ids[:turn["start"]].tolist()), tuple(ids[here].tolist()),
                          tuple(log_probs[here].tolist())))
        assert mask.tolist() == expected.tolist()
        assert (versions == torch.where(mask, 7, -1)).all() and (log_probs[~mask] == 0).all()
    return found


# ---- invariant 4: a sampled token never changes


@pytest.mark.parametrize("template", [*TEMPLATES, None])
def test_every_token_is_the_one_that_was_sampled_after_what_was_fed(runner, template):
    for kind in KINDS:
        tokenizer = chat_tokenizer(kind, template or "chatml")
        engine = scripted(tokenizer)
        one = runner(engine, tokenizer, f"{GAMES}:Chatter", options={"agents": 2}, chat_template=template is not None)
        batch = play(one, 40)
        assert set(batch["reward_error"]) == {None}
        served = [(tuple(fed), tuple(c.token_ids), tuple(torch.tensor(c.log_probs).tolist()))
                  for fed, c in engine.served]
        assert collections.Counter(sampled_in(batch)) == collections.Counter(served)
        rewritten = num_rows(batch) > len(set(batch["trajectory_ids"].tolist()))
        assert rewritten == (template in ("thinking", "llama", "merging"))


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_fed_is_what_the_template_writes(runner, template):
    """Rendered anew from the messages, turn by turn, and compared as text: control tokens and all."""
    tokenizer = chat_tokenizer("bytes", template)
    engine = scripted(tokenizer)
    batch = play(runner(engine, tokenizer, f"{GAMES}:Chatter", system_prompt="guess"), 40)
    messages = {}
    fed = 0
    for trajectory, prompt, ids, turns in zip(batch["trajectory_ids"].tolist(), rows_of(batch["prompt_ids"]),
                                              rows_of(batch["response_ids"]), list(batch["turns"]), strict=True):
        held = messages.setdefault(trajectory, [])
        for turn in turns:
            before = prompt.tolist() + ids[:turn["start"]].tolist()
            held += turn["observation"]
            assert tokenizer.decode(before) == tokenizer.apply_chat_template(held, tokenize=False,
                                                                             add_generation_prompt=True)
            said = [token for token in ids[turn["start"]:turn["stop"]].tolist() if token != tokenizer.eos_token_id]
            held.append({"role": "assistant", "content": tokenizer.decode(said)})
            fed += 1
    assert fed == len(engine.served) > 60
    assert all(held[0] == {"role": "system", "content": "guess"} for held in messages.values())


def test_rewards_of_turns_tokens_and_verify_add_up(runner):
    tokenizer = chat_tokenizer("bytes", "thinking")
    batch = play(runner(scripted(tokenizer), tokenizer, f"{GAMES}:Chatter", options={"agents": 3}), 60)
    assert set(map(len, batch["turns"])) >= {1, 2}
    sums = padded(batch["token_rewards"]).sum(1)
    totals, turns = collections.Counter(), collections.Counter()
    for trajectory, total, row in zip(batch["trajectory_ids"].tolist(), sums.tolist(), batch["turns"], strict=True):
        totals[trajectory] += total
        turns[trajectory] += sum(turn["reward"] for turn in row)
    for trajectory, reward in zip(batch["trajectory_ids"].tolist(), batch["rewards"].tolist(), strict=True):
        assert totals[trajectory] == pytest.approx(reward, abs=1e-5) == turns[trajectory]
    masked = padded(batch["token_rewards"])[~padded(batch["response_mask"])]
    assert (masked == 0).all()


def test_each_agent_has_rows_of_its_own(runner):
    tokenizer = chat_tokenizer("bytes")
    batch = play(runner(scripted(tokenizer), tokenizer, f"{GAMES}:Duel"), 10)
    assert list(batch["agent"]) == ["odd", "even"] * 10
    assert batch["group_ids"].tolist() == [i for i in range(10) for _ in range(2)]
    assert len(set(batch["trajectory_ids"].tolist())) == 20
    sizes = padded(batch["response_mask"]).sum(1).view(10, 2)
    expected = (sizes[:, 0] - sizes[:, 1]).sign()
    assert torch.equal(batch["rewards"].view(10, 2), torch.stack([expected, -expected], 1).float())
    for row in range(0, 20, 2):
        odd, even = (tokenizer.decode(rows_of(batch["prompt_ids"])[i]) for i in (row, row + 1))
        assert "odd begins" in odd and "odd begins" not in even and "odd said" in even


def test_rewards_of_an_agent_that_has_not_acted_yet_wait_for_it(runner):
    tokenizer = chat_tokenizer("bytes")
    batch = play(runner(scripted(tokenizer), tokenizer, f"{GAMES}:Early"), 3)
    assert list(batch["agent"]) == ["white", "black"] * 3 and batch["rewards"].tolist() == [1.0, 2.5] * 3
    assert padded(batch["token_rewards"]).sum(1).tolist() == [1.0, 2.5] * 3
    assert [[turn["reward"] for turn in turns] for turns in batch["turns"]] == [[1.0], [2.5]] * 3


# ---- how episodes end


def test_reasons_to_end(runner):
    tokenizer = chat_tokenizer("bytes")
    engine = scripted(tokenizer, longest=5, stop_frac=1.0)
    tasks = [{"turns": 1}, {"turns": 99}]
    batch = play(runner(engine, tokenizer, f"{FAULTY}:Scripted", max_turns=3), 2, task=tasks)
    assert list(batch["finish_reason"]) == ["done", "max_turns"]
    assert batch["rewards"].tolist() == [0.5 + 1, 3 * 0.5 + 3]
    tight = RolloutConfig(max_prompt_tokens=60, max_response_tokens=60)
    batch = play(runner(engine, tokenizer, f"{FAULTY}:Scripted", tight, max_turns=99), 1, task=[{"turns": 99}])
    assert list(batch["finish_reason"]) == ["overflow"] and batch["reward_error"] == [None]
    turns = len(batch["turns"][0])
    assert 1 < turns < 99 and batch["rewards"].tolist() == [1.5 * turns]
    assert int(lengths(batch["response_ids"])[0]) <= 60
    cut = scripted(tokenizer, longest=50, stop_frac=0.0, script=lambda ids, rng: [5] * 50)
    batch = play(runner(cut, tokenizer, f"{FAULTY}:Scripted", max_turn_tokens=4), 1, task=[{"turns": 1}])
    assert list(batch["finish_reason"]) == ["length"] and len(batch["response_ids"][0]) == 4
    tiny = RolloutConfig(max_prompt_tokens=4, max_response_tokens=4)
    batch = play(runner(engine, tokenizer, f"{FAULTY}:Scripted", tiny), 1, task=[{}])
    assert list(batch["finish_reason"]) == ["failed"]
    assert batch["reward_error"][0].startswith("overflow: the first observation has")
    assert torch.isnan(batch["rewards"]).all()


def test_nothing_to_go_on_is_a_failure_of_the_episode(runner):
    """Without a template an empty observation is no tokens at all; an engine would refuse the request, and the run."""
    tokenizer = chat_tokenizer("bytes")
    engine = scripted(tokenizer)
    one = runner(engine, tokenizer, "verifier", options={"function": "numeric"}, chat_template=False)
    batch = play(one, 2, prompt=["", "go"], answer=["1", "1"])
    assert batch["reward_error"][0].startswith("invalid: the first observation has no tokens")
    assert batch["reward_error"][1] is None and len(engine.served) == 1


def test_an_episode_that_takes_too_long_is_cancelled_in_the_engine_too(runner):
    tokenizer = chat_tokenizer("bytes")
    engine = scripted(tokenizer)
    add = engine.add

    def never_for_the_first(request_id, request):
        add(request_id, request)
        if request_id == "0":
            engine.running[request_id][0] = 10**9

    engine.add = never_for_the_first
    one = runner(engine, tokenizer, f"{FAULTY}:Scripted", episode_timeout_s=0.5)
    deadlines_after(one, episodes=2)
    batch = play(one, 3, task=[{}] * 3)
    assert sorted(map(str, batch["reward_error"])) == ["None", "None", "timeout: the episode took longer than 0.5 s"]
    engine.generate([])  # takes the cancellation
    assert not engine.running


def test_seeds_make_an_episode_whatever_runs_beside_it(runner):
    tokenizer = chat_tokenizer("bytes")
    together = play(runner(scripted(tokenizer), tokenizer, f"{GAMES}:Chatter"), 8)
    alone = runner(scripted(tokenizer), tokenizer, f"{GAMES}:Chatter", max_running_episodes=1)
    again = play(alone, 8)
    for name in ("prompt_ids", "response_ids"):
        assert together[name].values().tolist() == again[name].values().tolist()
    assert together["rewards"].tolist() == again["rewards"].tolist()
    assert alone.metrics["memory/most_running_episodes"] == 1


# ---- the engine goes on while environments wait


def test_one_slow_environment_keeps_nobody_waiting(runner):
    """The slow episode is in its first step until all others are through."""
    tokenizer = chat_tokenizer("bytes")
    released = threading.Event()

    class Held(AsyncEnvironment):
        async def reset(self, task):
            self.slow, self.count = task.data, 0
            return "begin"

        async def step(self, action):
            self.count += 1
            if self.slow and self.count == 1:
                while not released.is_set():
                    await asyncio.sleep(0.005)
            else:
                ended.append(self.slow)
            if ended.count(False) == 3 * 9:
                released.set()
            return "turn", 0.0, self.count == 3, {}

    ended = []
    Held.__module__, globals()["Held"] = HERE, Held
    batch = play(runner(scripted(tokenizer), tokenizer, f"{HERE}:Held", episode_timeout_s=60), 10,
                 task=[i == 4 for i in range(10)])
    assert set(batch["reward_error"]) == {None} and released.is_set()
    assert ended == [False] * 27 + [True] * 2


def test_engine_failures_end_the_call_and_leave_nothing(runner):
    tokenizer = chat_tokenizer("bytes")
    engine = scripted(tokenizer)
    one = runner(engine, tokenizer, f"{FAULTY}:Scripted")

    def fail():
        raise DeadlineError("the engine is stuck")

    engine.before_step = fail
    with pytest.raises(DeadlineError, match="stuck"):
        play(one, 5, task=[{}] * 5)
    engine.before_step = lambda: None
    assert set(play(one, 5, task=[{}] * 5)["reward_error"]) == {None}


def test_an_environment_that_can_not_start_is_one_clear_error(runner):
    tokenizer = chat_tokenizer("bytes")
    one = runner(scripted(tokenizer), tokenizer, f"{FAULTY}:Scripted")
    one._pool._server._arguments = ("no.such:Thing", "{}")
    with pytest.raises(EpisodeError, match="'no.such:Thing' can't start"):
        play(one, 3, task=[{}] * 3)


# ---- admission


def test_episodes_are_let_in_as_the_cache_allows():
    async def work():
        door, running, order = Admission(limit=100, cache_tokens=100, first_guess=40), [], []

        async def episode(i, tokens):
            async with door.place(i):
                order.append(i)
                running.append(i)
                door.holds(i, tokens)
                counts.append(len(running))
                await asyncio.sleep(0.01)
                running.remove(i)

        counts = []
        await asyncio.gather(*(episode(i, 10) for i in range(40)))
        return order, counts, door

    order, counts, door = asyncio.run(work())
    assert order == list(range(40))  # first come first served
    assert counts[:3] == [1, 2, 1] or counts[:3] == [1, 2, 2]  # 2 x 40 fit at first
    assert door.largest == 10  # 10 x 10 do when episodes turn out smaller
    assert door.expected == 10


def test_one_episode_always_runs_and_a_cancelled_one_gives_its_place_back():
    async def work():
        door, entered = Admission(limit=1, cache_tokens=10, first_guess=100), []

        async def episode(i):
            async with door.place(i):
                entered.append(i)

        async with door.place(0):
            tasks = [asyncio.create_task(episode(i)) for i in range(1, 5)]
            await asyncio.sleep(0)
            tasks[1].cancel()  # while it waits
        tasks[0].cancel()  # let in, not begun
        await asyncio.gather(*tasks, return_exceptions=True)
        return entered

    assert asyncio.run(asyncio.wait_for(work(), 30)) == [3, 4]


def test_an_episode_whose_first_message_the_template_refuses_is_one_that_failed(runner):
    """It has a row like any other, so that a template without system messages does not make episodes vanish."""
    tokenizer = chat_tokenizer("bytes")
    tokenizer.chat_template = ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
                               + tokenizer.chat_template)
    one = runner(scripted(tokenizer), tokenizer, f"{FAULTY}:Scripted", system_prompt="play")
    batch = play(one, 3)
    assert num_rows(batch) == 3 and all(torch.isnan(batch["rewards"])) and set(batch["finish_reason"]) == {"failed"}
    assert all(error.startswith("invalid: the chat template refuses") for error in batch["reward_error"])


# ---- 1,000 episodes with faults of every kind


def test_a_thousand_episodes_with_faults_are_all_accounted_for(runner):
    tokenizer = chat_tokenizer("bytes")
    rng = random.Random(5)
    faults = ["raise", "exit", "die", "crash", "hang", "object", "long", "surrogate", "assistant", "bytes"]
    tasks = [{"turns": rng.randint(1, 3)} for _ in range(1000)]
    for task in rng.sample(tasks, 50):
        task |= {"where": rng.choice(["reset", "step", "verify"]), "fault": rng.choice(faults)}
    one = runner(scripted(tokenizer), tokenizer, f"{FAULTY}:Scripted", turn_timeout_s=3.0)
    deadlines_after(one, episodes=1000 - sum(task.get("fault") == "hang" for task in tasks))
    killed = []

    def kill_the_server_once():
        if len(one.engine.served) > 300 and not killed:
            process = one._pool._server._process
            killed.append(process.pid)
            process.kill()

    one.engine.before_step = kill_the_server_once
    batch = play(one, 1000, task=tasks)
    assert num_rows(batch) == 1000 and killed
    kinds = collections.Counter()
    for task, error, reward, reason in zip(tasks, batch["reward_error"], batch["rewards"].tolist(),
                                           batch["finish_reason"], strict=True):
        assert (error is not None) == ("fault" in task), (task, error)
        if error is None:
            assert reward == 1.5 * task["turns"]
            assert reason in ("done", "length")
        else:
            assert reward != reward and reason == "failed"
            kinds[error.partition(":")[0]] += 1
    assert sum(kinds.values()) == 50
    assert set(kinds) == {"raised", "died", "timeout", "invalid"} <= set(FAILURES)
    assert set(batch["finish_reason"]) <= set(FINISH_REASONS)
    pids = {session._pid for session in one._pool._idle}
    assert pids
    one.close()
    assert ended(*pids)  # those of the server that was killed end by themselves


# ---- on the terminal


@pytest.mark.parametrize("kind", KINDS)
def test_saved_episodes_are_shown_token_by_token(runner, kind, tmp_path):
    """Played, saved and shown: the texts are those of the ids, and marks are where the turns are."""
    tokenizer = chat_tokenizer(kind)
    batch = play(runner(scripted(tokenizer), tokenizer, f"{GAMES}:Chatter", options={"agents": 2}), 4)
    put(batch, "old_log_probs", [row + 0.5 for row in rows_of(batch["rollout_log_probs"])])
    tokenizer.save_pretrained(tmp_path / "model")
    lines = [json.dumps(sample) for sample in samples_of(1, batch, range(num_rows(batch)))]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines))
    for sample, ids, turns in zip(read_samples(tmp_path), rows_of(batch["response_ids"]), batch["turns"], strict=True):
        texts, problem = texts_of(tmp_path, ids.tolist())
        whole = tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert not problem and ("".join(texts) == whole or "\ufffd" in whole)  # where bytes make no character
        tokens = sample.tokens
        assert [token.gap for token in tokens] == pytest.approx([0.5 * (token.version == 7) for token in tokens])
        assert [t for t, token in enumerate(tokens) if token.trained] == [
            t for turn in turns for t in range(turn["start"], turn["stop"])]
        out = io.StringIO()
        show(tmp_path, row=sample.row, tokens=True, console=Console(file=out))
        assert out.getvalue().count("|+0.50]") == sum(turn["stop"] - turn["start"] for turn in turns)
