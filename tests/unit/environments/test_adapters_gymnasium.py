"""Gymnasium's own text environments, played in text."""

import sys

import gymnasium
import pytest

from hybridrl.environments import Task
from hybridrl.environments.adapters.gymnasium import Gymnasium
from hybridrl.environments.binding import bind
from hybridrl.errors import ConfigError
from tests.unit.environments.playing import episodes, said

LAKE = {"id": "FrozenLake-v1", "make": {"is_slippery": False}, "actions": ["left", "down", "right", "up"]}
ECHO = {"id": "tests.unit.environments.boxes:tests/Echo-v0"}


def test_a_lake_is_crossed_and_drowned_in():
    """The map is SFFF FHFH FFFH HFFG: a way around all holes, and one into the first."""
    way = ["down", "I go Down!", "is it left or right", "2", "<think>up</think> down", "right"]
    (replies, end), (drowned, _) = episodes("gymnasium", LAKE, way, ["right", "down"])
    assert said(replies[0]) == "Possible answers: left, down, right, up.\n\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert said(replies[1]) == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert [reply.rewards for reply in replies[1:]] == [{"agent": 0.0}] * 5 + [{"agent": 1.0}]
    assert [reply.done for reply in replies] == [False] * 6 + [True] and end == {"agent": 0.0}
    assert said(replies[-1]).endswith("HFF[G]") and replies[-1].info == {"malformed": 0, "truncated": 0}
    assert said(drowned[-1]).splitlines()[2] == "F[H]FH" and drowned[-1].done
    assert drowned[-1].rewards == {"agent": 0.0}


@pytest.mark.parametrize("nonsense", ["", "north", "4", "-1", "lefty", "down 1.5", "right " + "9" * 5000, "2 17"])
def test_no_action_is_said_so_and_changes_nothing(nonsense):
    environment = bind("gymnasium", LAKE | {"malformed_reward": -0.5}).build()
    environment.reset(Task())
    step = environment.step(nonsense)
    if nonsense == "down 1.5":
        assert said_of(step) == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
        return
    assert step[:4] == ("That is no action. Possible answers: left, down, right, up.", -0.5, False, {"malformed": 1})
    assert said_of(environment.step("down")).startswith("  (Down)\nSFFF\n[F]HFH")


def said_of(step):
    return step.observation


def test_blackjack_is_dealt_from_the_seed_as_gymnasium_deals_it():
    options = {"id": "Blackjack-v1", "actions": {"stick": 0, "hit": 1}, "rules": ""}
    tasks = [Task(prompt="play", seed=seed) for seed in (5, 5, 6, 1 << 40)]
    played = episodes("gymnasium", options, *[["hit"] * 9] * 4, tasks=tasks)
    direct = gymnasium.make("Blackjack-v1")
    for task, (replies, _) in zip(tasks, played, strict=True):
        hand, _ = direct.reset(seed=task.seed)
        assert said(replies[0]) == str(list(hand))
        for reply in replies[1:]:
            hand, reward, done, _, _ = direct.step(1)
            assert (said(reply), reply.rewards, reply.done) == (str(list(hand)), {"agent": reward}, done)
        assert replies[-1].done and reward == -1
    assert played[0] == played[1] != played[2]


def test_colours_of_a_drawing_are_told_apart():
    environment = bind("gymnasium", {"id": "Taxi-v4"}).build()
    board = environment.reset(Task(seed=3))
    assert "<blue>R</blue>" in board and "<magenta>Y</magenta>" in board and "[ ]" in board and "\x1b" not in board
    assert environment.step("1").reward == -1


def test_actions_and_observations_of_other_kinds():
    environment = bind("gymnasium", ECHO | {"reset": {"letters": "a"}}).build()
    first = environment.reset(Task())
    assert first == ("Possible answers: texts of 2 to 4 of the characters 'abc'.\n\n"
                     '{"word": "aaa", "place": [-1.0, -1.0]}')
    for nonsense in ("a", "abcab", "abd", ""):
        assert environment.step(nonsense).info == {"malformed": 1}
    assert environment.step("abc").reward == 0
    assert environment.step(" aaa\n")[1:4] == (1.0, True, {"malformed": 0, "truncated": 0})


def test_steps_are_limited_and_text_is_made_by_a_function():
    options = ECHO | {"show": "tests.unit.environments.boxes:shout", "rules": "{actions}?", "max_steps": 2}
    ((replies, _),) = episodes("gymnasium", options, ["aa", "bb", "cc"])
    assert said(replies[0]).startswith("texts of 2 to 4") and said(replies[0]).splitlines()[2].startswith("Echo: ")
    assert [reply.done for reply in replies] == [False, False, True] and replies[-1].info["truncated"] == 1


@pytest.mark.parametrize(("options", "message"), [
    ({"id": "FrozenLke-v1"}, "gymnasium can't make 'FrozenLke-v1' .* Did you mean: `FrozenLake`"),
    (LAKE | {"make": {"slippery": True}}, "can't make 'FrozenLake-v1' with {'slippery': True}: .*'slippery'"),
    (LAKE | {"actions": ["left", "right"]}, "must name 4 actions"),
    (LAKE | {"actions": ["a", "b", "c", "A"]}, "different names"),
    (LAKE | {"actions": {"a": 4}}, "numbers from 0 to 3"), (LAKE | {"actions": {}}, "different names"),
    (ECHO | {"actions": ["a"]}, "must be empty where actions are texts"),
    ({"id": "Blackjack-v1", "show": "render"}, "Blackjack-v1 has no drawing in text"),
    ({"id": "Blackjack-v1", "show": "picture"}, "show must be auto, render, observation or"),
    ({"id": "Blackjack-v1", "show": "json:loud"}, "Unknown formatter in module 'json' 'loud'"),
    ({"id": "Pendulum-v1"}, "actions must be Discrete or Text"), ({}, "needs 'id'")])
def test_what_can_not_be_played_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        bind("gymnasium", options)


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r'environment.name=gymnasium needs .* pip install "hybridrl\[gymnasium\]"'):
        Gymnasium.check_options("Blackjack-v1")
