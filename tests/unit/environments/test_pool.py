"""Environments in processes: what each fault costs, and that nothing is left of it."""

import asyncio
import os
import signal

import pytest

from hybridrl.environments import Action, Environment, Step, Task
from hybridrl.environments import pool as pool_module
from hybridrl.environments.pool import EnvironmentPool
from hybridrl.environments.record import EnvironmentFailure, Record
from hybridrl.errors import ConfigError, EpisodeError
from tests.processes import children, ended

HERE = "tests.unit.environments.misbehaving"


def run(work, name=f"{HERE}:Scripted", options=None, timeout_s=20.0):
    async def main():
        pool = EnvironmentPool(name, options or {}, timeout_s)
        try:
            return await asyncio.wait_for(work(pool), 60)
        finally:
            await pool.close()

    return asyncio.run(main())


async def play(pool, data, actions=("a", "b"), timeout_s=None):
    """Observations, rewards of the turns, and the reward of verify; `timeout_s` of a call in place of the pool's."""
    session = await pool.open()
    session._timeout_s = timeout_s or pool._timeout_s
    try:
        replies = [await session.reset(Task(data=data, seed=1))]
        for action in actions:
            replies.append(await session.step(Action(action)))
        return replies, await session.verify("done")
    finally:
        await pool.release(session)


@pytest.mark.parametrize("name", ["Scripted", "Waiting"])
def test_an_episode(name):
    replies, rewards = run(lambda pool: play(pool, {}), f"{HERE}:{name}")
    assert [reply.messages[0]["content"] for reply in replies] == ["begin", "turn 1", "turn 2"]
    assert [reply.rewards for reply in replies] == [{}, {"agent": 0.5}, {"agent": 0.5}]
    assert [reply.done for reply in replies] == [False, False, True]
    assert rewards == {"agent": 2.0 if name == "Scripted" else 1.0}


def test_a_process_is_used_again_and_one_that_failed_is_not():
    async def work(pool):
        pids = []
        for data in ({}, {}, {"where": "verify", "fault": "raise"}, {}):
            try:
                replies, _ = await play(pool, data | {"pid": True})
            except EnvironmentFailure:
                continue
            pids.append(int(replies[0].messages[0]["content"].split()[1]))
        return pids

    first, second, last = run(work)
    assert first == second != last
    assert ended(first, last)


FAULTS = [
    ("reset", "raise", "raised", "reset: ValueError: asked to raise (misbehaving.py:"),
    ("step", "raise", "raised", "step: ValueError"), ("verify", "raise", "raised", "verify: ValueError"),
    ("step", "exit", "raised", "SystemExit"),
    ("step", "die", "died", "step ended its process (exit status 3)"),
    ("verify", "crash", "died", "verify ended its process (signal SIGSEGV)"),
    ("step", "number", "invalid", "observation must be text, a chat message or a list of them, got 7 (int)"),
    ("step", "bytes", "invalid", "got b'\\xff\\xfe' (bytes)"),
    ("reset", "object", "invalid", "no repr"),
    ("step", "long", "invalid", "must be at most 1048576"),
    ("step", "surrogate", "invalid", "observation is no valid Unicode text"),
    ("step", "assistant", "invalid", "the assistant's turns are sampled"),
    ("verify", "nan", "invalid", "reward must be finite"), ("verify", "text", "invalid", "reward must be a number")]


def test_a_fault_is_named_and_costs_one_episode():
    async def work(pool):
        bad = [play(pool, {"where": where, "fault": fault}) for where, fault, _, _ in FAULTS]
        return await asyncio.gather(play(pool, {}), *bad, play(pool, {}), return_exceptions=True)

    first, *failed, last = run(work)
    assert first[1] == last[1] == {"agent": 2.0}
    for (_, _, kind, said), failure in zip(FAULTS, failed, strict=True):
        assert isinstance(failure, EnvironmentFailure) and failure.kind == kind and said in str(failure), failure


def test_what_hangs_is_killed_with_what_it_started():
    async def work(pool):
        session = await pool.open()
        pid = session._pid
        with pytest.raises(EnvironmentFailure, match="timeout: reset gave no result within 0.5 s"):
            await session.reset(Task(data={"where": "reset", "fault": "hang_with_child"}))
        (grandchild,) = children(pid)  # it may start it after we lost patience
        await pool.release(session)
        return pid, grandchild

    assert ended(*run(work, timeout_s=0.5))


def test_a_server_that_dies_is_started_again_and_costs_no_episode():
    async def work(pool):
        first = await pool.open()
        await first.reset(Task(data={}))
        os.kill(pool._server._process.pid, 9)
        second = await play(pool, {})
        await first.step(Action("a"))
        await first.step(Action("b"))
        rewards = await first.verify("done")
        first.healthy = False
        await pool.release(first)
        return rewards, second[1]

    assert run(work) == ({"agent": 2.0}, {"agent": 2.0})


@pytest.mark.parametrize(("fault", "kind"), [("raise", "raised"), ("hang", "timeout"), ("exit", "raised"),
                                             ("cancelled", "raised"), ("stay", "timeout")])
def test_coroutines_fail_alike(fault, kind):
    """Also one that ends the program, that passes a cancellation of its own on, and that ignores ours."""
    async def work(pool):
        released = asyncio.Event()
        bad = play(pool, {"fault": fault, "released": released}, timeout_s=0.5 if kind == "timeout" else None)
        try:
            return await asyncio.gather(bad, play(pool, {}), return_exceptions=True)
        finally:
            released.set()

    failed, good = run(work, f"{HERE}:Waiting")
    assert isinstance(failed, EnvironmentFailure) and failed.kind == kind
    assert good[1] == {"agent": 1.0}


def test_a_fork_of_an_environment_that_comes_back_answers_nobody():
    async def work(pool):
        return [await play(pool, data) for data in ({"fork": 1}, {}, {})]

    for replies, rewards in run(work):
        assert [reply.messages[0]["content"] for reply in replies] == ["begin", "turn 1", "turn 2"]
        assert rewards == {"agent": 2.0}


def test_an_episode_is_not_over_when_it_begins():
    with pytest.raises(EnvironmentFailure, match="invalid: reset must be the beginning of an episode"):
        Record(Task()).opened(Environment(), Step("nothing to do", done=True), None)
    assert Record(Task()).opened(Environment(), Step("go", agent="white"), None).agent == "white"


def test_numbers_that_have_no_mean_are_left_out_of_info():
    step = Step("go on", info={"count": 3, "huge": 10**400, "mean": float("nan"), "half": 0.5, "name": "x"})
    reply = Record(Task(prompt="go")).stepped(Action("a"), step, None)
    assert reply.info == {"count": 3, "huge": None, "mean": None, "half": 0.5, "name": "x"}


def test_an_environment_that_can_not_be_built_fails_its_episode():
    with pytest.raises(EnvironmentFailure, match="raised: reset: OSError: no such service"):
        run(lambda pool: play(pool, {}), f"{HERE}:Broken")


@pytest.mark.parametrize(("name", "options", "said"), [
    ("gues", {}, "Did you mean guess"), ("tests.no:Such", {}, "can't import"), (f"{HERE}:Scriptd", {}, "Scripted"),
    (f"{HERE}:misbehave", {}, "must be a subclass.*is environment.name=agent with environment.options.function=tests"),
    (f"{HERE}:Unprintable", {}, "must be a subclass.*Unprintable'>.$"), ("guess", {"hihg": 3}, "Did you mean high"),
    ("guess", {"high": "3"}, "environment.options.high of environment 'guess' must be int, got '3'"),
    ("tests.recipes.games:Brittle", {"high": "3"}, "high of environment 'tests.recipes.games:Brittle' must be int"),
    ("verifier", {}, "needs 'function'"), ("verifier", {"function": "numric"}, "Did you mean numeric")])
def test_bad_configurations_fail_before_anything_starts(name, options, said):
    with pytest.raises(ConfigError, match=said):
        EnvironmentPool(name, options, 1.0)


def test_a_server_that_can_not_start_says_why(monkeypatch):
    async def work(pool):
        pool._server._arguments = ("no.such:Thing", "{}")
        await pool.open()

    with pytest.raises(EpisodeError, match=r"'no.such:Thing' can't start: .*can't import"):
        run(work)


async def cancel_a_fork(server):
    """Ask for a process and give up on it before the server, which is stopped meanwhile, can answer."""
    pid = server._process.pid
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)
    try:
        asked = asyncio.ensure_future(server.fork(5.0))
        while not server._lock.locked():
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])
        assert asked.cancelled()
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_fork_that_is_cancelled_leaves_no_answer_for_the_next_one():
    async def work():
        server = pool_module._Server("guess", {})
        try:
            first = await server.fork(5.0)
            await cancel_a_fork(server)
            second = await server.fork(5.0)
            assert second._pid > 0 and second._pid != first._pid
            return [await server.end(session._pid, session._parent) for session in (second, first)]
        finally:
            await server.close()

    assert asyncio.run(work()) == ["signal SIGKILL"] * 2


def test_closing_waits_for_a_fork_that_was_cancelled():
    async def work():
        server = pool_module._Server("guess", {})
        await server.fork(5.0)
        await cancel_a_fork(server)
        await server.close()
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(work()) == set()
