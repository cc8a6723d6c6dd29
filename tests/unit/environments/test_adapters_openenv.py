"""Episodes against real OpenEnv servers on loopback."""

import asyncio
import random
import socket
import sys
import threading

import pytest

from hybridrl.environments import Action, Task
from hybridrl.environments.adapters.openenv import OpenEnv
from hybridrl.environments.adapters.openenv_server import Server
from hybridrl.environments.binding import bind
from hybridrl.environments.pool import EnvironmentPool
from hybridrl.environments.record import EnvironmentFailure
from hybridrl.errors import ConfigError
from tests.processes import ended
from tests.unit.environments.playing import episode, said

HERE = "tests.unit.environments.served"
DOWN = {"server": f"{HERE}:app", "field": "number", "show": "text"}


def play(options, work, timeout_s=80.0):
    async def main():
        pool = EnvironmentPool("openenv", options, timeout_s)
        try:
            return await work(pool)
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(main(), 170))


def test_episodes_at_the_same_time_have_one_server_that_ends_with_them():
    async def work(pool):
        scripts = [["1", "0"], ["2", "1", "0"], ["7"], ["many", "5"]]
        starts = [seed_for(2), seed_for(3), seed_for(3), seed_for(3)]
        played = await asyncio.gather(*(episode(pool, Task(seed=seed), script)
                                        for seed, script in zip(starts, scripts, strict=True)))
        (server,) = Server._running.values()
        again = await episode(pool, Task(seed=starts[0]), scripts[0])
        return played, again, server._process.pid

    played, again, pid = play(DOWN | {"action": {"note": "so"}}, work)
    assert [[said(reply) for reply in replies] for replies, _ in played[:3]] == [
        ["from 2", "right so", "right so"], ["from 3", "right so", "right so", "right so"], ["from 3", "wrong"]]
    assert [[reply.rewards["agent"] for reply in replies[1:]] for replies, _ in played[:3]] == [[1, 1], [1, 1, 1], [0]]
    assert all(replies[-1].done and end == {"agent": 0.0} for replies, end in played)
    refused = played[3][0][1]
    assert said(refused).startswith("That is no action: number: Input should be a valid integer")
    assert refused.info == {"refused": 1} and not refused.done and said(played[3][0][2]) == "wrong"
    assert again == played[0]
    assert not Server._running and ended(pid)


def killed(server):
    server._process.kill()
    server._process.wait(60)  # its connections close before it has ended


def seed_for(start):
    return next(seed for seed in range(99) if random.Random(seed).randint(2, 3) == start)


def test_actions_as_json_and_observations_whole():
    options = {"server": f"{HERE}:app", "field": "", "reset": {"high": 2}}
    script = ["one", "[1]", '{"number": 1', '{"nombre": 1}', 'I say ```json\n{"number": 1}\n```', '{"number": 0}']
    replies, _ = play(options, lambda pool: episode(pool, Task(seed=5), script))
    assert said(replies[0]) == '{"text": "from 2", "left": 2}'
    assert [reply.info["refused"] for reply in replies[1:]] == [1, 1, 1, 1, 0, 0]
    assert "a JSON object is needed" in said(replies[1]) and "number: Field required" in said(replies[4])
    assert said(replies[5]) == '{"text": "right", "left": 1}' and replies[6].done


def test_faults_of_a_server_cost_their_episode():
    async def work(pool):
        bug = episode(pool, Task(seed=1), ["99"])
        failed, good = await asyncio.gather(bug, episode(pool, Task(seed=1), ["7"]), return_exceptions=True)
        (server,) = Server._running.values()
        session = await pool.open()
        await session.reset(Task(seed=1))
        killed(server)
        with pytest.raises(EnvironmentFailure, match="raised: ConnectionClosed"):
            await session.step(Action("1"))
        await pool.release(session)
        after = [await episode(pool, Task(seed=1), ["7"])]  # by a server that was started anew
        for end in ("kill", "hang up"):  # what happens to sessions that are idle while a model trains
            (server,) = Server._running.values()
            if end == "kill":
                killed(server)
            else:
                await pool._idle[-1]._environment._socket.close()
            after.append(await episode(pool, Task(seed=1), ["7"]))
        return failed, good, after

    failed, good, after = play(DOWN, work)
    assert str(failed).startswith("raised: RuntimeError: the OpenEnv server answered EXECUTION_ERROR: out of numbers")
    assert after == [good] * 3 and not Server._running


def test_a_server_that_serves_fewer_episodes_says_so():
    async def work(pool):
        first = await pool.open()
        await first.reset(Task())
        with pytest.raises(EnvironmentFailure, match="CAPACITY_REACHED.*max_running_episodes must be at most"):
            await episode(pool, Task(), [])
        await pool.release(first)

    play(DOWN | {"server": f"{HERE}:narrow"}, work)


def test_a_server_that_runs_is_named_by_its_url():
    import uvicorn

    from tests.unit.environments.served import app

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        options = DOWN | {"server": "", "url": f"http://127.0.0.1:{listening.getsockname()[1]}/"}
        replies, _ = play(options, lambda pool: episode(pool, Task(seed=seed_for(2)), ["1", "0"]))
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()
    assert [said(reply) for reply in replies] == ["from 2", "right", "right"]
    with pytest.raises(EnvironmentFailure, match=r"no session with the OpenEnv server http://127.0.0.1:\d+/: .*failed"):
        play(options, lambda pool: episode(pool, Task(), []))


def test_an_app_that_can_not_be_served_says_how_it_ended(capfd):
    with pytest.raises(EnvironmentFailure, match=r"no session .*served:apps: it ended \(exit status \d\); its"):
        play(DOWN | {"server": f"{HERE}:apps"}, lambda pool: episode(pool, Task(), []))
    assert 'Attribute "apps" not found' in capfd.readouterr().err


@pytest.mark.parametrize(("options", "message"), [
    ({}, "needs one of url and server"), (DOWN | {"url": "http://x"}, "needs one of url and server"),
    ({"url": "ftp://x"}, "must be an http or ws address, got 'ftp://x'"),
    ({"server": "no.such:app"}, "must be package.module:app"), ({"server": HERE}, "must be package.module:app")])
def test_what_can_not_be_played_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        bind("openenv", options)


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(ConfigError, match=r'environment.name=openenv needs .* pip install "hybridrl\[openenv\]"'):
        OpenEnv.check_options(server=f"{HERE}:app")
