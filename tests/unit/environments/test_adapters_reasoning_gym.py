"""Problems of reasoning-gym as episodes of one turn."""

import sys

import pytest
import reasoning_gym

from hybridrl.environments import Action, Task, Trajectory, Turn
from hybridrl.environments.adapters.reasoning_gym import ReasoningGym
from hybridrl.environments.binding import bind
from hybridrl.errors import ConfigError
from tests.unit.environments.playing import episodes, said

SUMS = {"task": "chain_sum", "task_options": {"min_terms": 2, "max_terms": 2}, "extract": "last_number"}


def solve(reply):
    """The sum that a question of chain_sum ends with."""
    left, sign, right = said(reply).partition(": ")[2].split()[:3]
    return f"It is {int(left) + int(right) if sign == '+' else int(left) - int(right)}"


def test_a_problem_is_made_from_the_number_or_the_seed():
    tasks = [*(Task(data={"number": 7}, seed=seed) for seed in (1, 2)), *(Task(seed=seed) for seed in (1, 1, 2))]
    played = episodes("reasoning_gym", SUMS, *[[solve]] * 4, ["It is 10000"], tasks=tasks)
    shown = [said(replies[0]) for replies, _ in played]
    problem = reasoning_gym.create_dataset("chain_sum", seed=7, size=1, min_terms=2, max_terms=2)[0]
    assert shown[0] == shown[1] == problem["question"] and shown[2] == shown[3] and len(set(shown)) == 3
    assert [end["agent"] for _, end in played] == [1.0] * 4 + [0.0]


def test_a_row_that_is_a_problem_is_played_as_it_is():
    entry = reasoning_gym.create_dataset("spell_backward", seed=3, size=1)[0]
    options = {"extract": "tag:answer", "prompt": "{question} Use <answer>."}
    environment, task = bind("reasoning_gym", options).build(), Task(data=entry)
    assert environment.reset(task) == entry["question"] + " Use <answer>."
    assert environment.step("x").done
    assert verified(environment, task, f"<answer>{entry['answer']}</answer>") == 1
    assert verified(environment, task, entry["answer"]) == 0


def verified(environment, task, response):
    turn = Turn("agent", [], Action(response), {}, {})
    return environment.verify(Trajectory(task, [turn]))


def test_scorers_that_run_answers_as_code_are_refused():
    environment = bind("reasoning_gym", {"task": "countdown"}).build()
    environment.reset(Task())
    with pytest.raises(ValueError, match="allow_eval=true"):
        verified(environment, Task(), "1+1")
    with pytest.raises(ValueError, match="environment.options.task is empty"):
        bind("reasoning_gym", {}).build().reset(Task())


@pytest.mark.parametrize(("options", "message"), [
    ({"task": "chain_sun"}, "environment.options.task: Unknown reasoning_gym task 'chain_sun'. Did you mean chain_sum"),
    ({"task": "chain_sum", "task_options": {"min_term": 1}}, "Did you mean min_terms"),
    ({"task": "chain_sum", "task_options": {"min_terms": 0}}, "chain_sum refuses {'min_terms': 0}"),
    ({"prompt": "hello"}, "must have {question}"), ({"extract": "tag"}, "extract must be none")])
def test_what_can_not_be_played_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        bind("reasoning_gym", options)


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r'environment.options.task=chain_sum needs .* "hybridrl\[tasks\]"'):
        ReasoningGym.check_options("chain_sum")
