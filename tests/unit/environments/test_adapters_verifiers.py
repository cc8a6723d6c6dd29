"""Environments of the verifiers package: examples, turns, rubrics, tools."""

import signal
import sys

import pytest

from hybridrl.environments import Action, Task, Trajectory
from hybridrl.environments.adapters.verifiers import Verifiers
from hybridrl.environments.binding import bind
from hybridrl.errors import ConfigError
from tests.unit.environments.playing import episodes, said

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 14), reason="verifiers 0.1 is for Python up to 3.13")
HERE = "tests.unit.environments.verified"


def numbered(number):
    return Task(prompt="begin", data={"number": number})


def test_one_turn_is_scored_by_the_rubric():
    """Rewards: right is worth 1, brief 2. Example 3 asks 3+3; 7 is example 3 again."""
    options = {"id": f"{HERE}:single", "arguments": {"weight": 2.0}}
    played = episodes("verifiers", options, ["6"], [" 6 "], ["seven"], ["8"],
                      tasks=[numbered(3), numbered(3), numbered(7), numbered(4)])
    assert played[0][0][0].messages == [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+3"}]
    assert [said(replies[0]) for replies, _ in played] == ["Add.\n3+3"] * 3 + ["Add.\n4+4"]
    assert [end["agent"] for _, end in played] == [3.0, 1.0, 0.0, 3.0]
    assert all(len(replies) == 2 and replies[1].done for replies, _ in played)


def test_the_environment_takes_turns_until_it_is_content():
    options = {"id": f"{HERE}:several"}
    (first, second, cut) = episodes("verifiers", options, ["1", "4", "5"], ["3", "3", "3"], ["0"],
                                    tasks=[numbered(2)] * 3)
    assert [said(reply) for reply in first[0][:2]] == ["2+2", "wrong, 2 left"]
    # said by the policy and the environment: 1, wrong, 4, right
    assert first[0][2].done and first[0][2].info == {"stop": "has_final_env_response"}
    assert first[1] == {"agent": 1 / 2 + 400}
    assert second[0][3].info == {"stop": "max_turns_reached"} and second[1] == {"agent": 1 / 3 + 500}
    assert not cut[0][-1].done and cut[1] == {"agent": 1 + 100}


def test_tools_are_called_in_the_models_own_format():
    environment = bind("verifiers", {"id": f"{HERE}:tools", "format": "hermes"}).build()
    environment.reset(numbered(4))
    assert [tool["function"]["name"] for tool in environment.tools] == ["double"]
    call = '<tool_call>{"name": "double", "arguments": {"x": 4}}</tool_call>'
    step = environment.step(Action(f"let me see {call}<tool_call>{{</tool_call>"))
    assert [(message["role"], message["content"]) for message in step.observation[:1]] == [("tool", "8")]
    assert len(step.observation) == 2 and "Expecting value" in step.observation[1]["content"]
    assert environment.step(Action("8")).done and environment.verify(Trajectory(Task())) == 1.0
    environment.close()


def test_examples_are_drawn_from_the_seed_or_the_other_split():
    tasks = [Task(prompt="begin", seed=seed) for seed in (*range(12), 3, 3)]
    played = episodes("verifiers", {"id": f"{HERE}:single"}, *[["1"]] * 14, tasks=tasks)
    shown = [said(replies[0]) for replies, _ in played]
    assert len(set(shown)) == 4 and shown[3] == shown[12] == shown[13]
    held_out = bind("verifiers", {"id": f"{HERE}:single", "split": "eval"}).build()
    assert {held_out.reset(task)[1]["content"] for task in tasks} == {"4+4"}
    held_out.close()


@pytest.mark.parametrize(("make", "number", "said"), [
    ("unfair", 1, "Error calling reward function broken: no judge"), ("several", 4, "the service is down"),
    ("rewriting", 1, "the environment rewrote the conversation"),
    ("tools", 1, "environment.options.format must say how")])
def test_what_fails_is_no_reward_of_0(make, number, said):
    environment = bind("verifiers", {"id": f"{HERE}:{make}"}).build()
    with pytest.raises(Exception, match=said):
        environment.reset(numbered(number))
        while not environment.step(Action("1")).done:
            pass
        environment.verify(Trajectory(Task()))
    environment.close()


def test_an_environment_is_found_by_name_and_leaves_signals_alone(monkeypatch):
    monkeypatch.syspath_prepend("tests/unit/environments")
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    environment = bind("verifiers", {"id": "someone/verified"}).build()
    assert environment.reset(numbered(1))[1]["content"] == "1+1"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    environment.close()


@pytest.mark.parametrize(("options", "message"), [
    ({"id": "no-such-env"}, "options.id: can't import 'no_such_env' of 'no_such_env:load_env"),
    ({"id": f"{HERE}:sngle"}, "'sngle'. Did you mean single"),
    ({"id": f"{HERE}:single", "split": "test"}, "split must be train or eval, got 'test'"),
    ({"id": f"{HERE}:single", "format": "hermis"}, "Did you mean hermes"), ({}, "needs 'id'")])
def test_what_can_not_be_played_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        bind("verifiers", options)


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=r'environment.name=verifiers needs .* pip install "hybridrl\[verifiers\]"'):
        Verifiers.check_options("any")
