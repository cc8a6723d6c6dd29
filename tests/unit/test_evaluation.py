"""Evaluation without engines: scores by hand, and what suites are asked, when, with which seeds."""

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from hybridrl.algorithms import bootstrap_interval
from hybridrl.batch import make_batch, num_rows, put
from hybridrl.config import EvaluateConfig, GRPOConfig, SuiteConfig, TrainerConfig
from hybridrl.config_loading import load
from hybridrl.controller.evaluation import Evaluation, Plan, Suite, evaluation_metrics
from hybridrl.controller.evaluation_output import EvaluationOutput
from hybridrl.controller.suites import Suites
from hybridrl.data import PromptSet, row_seeds
from hybridrl.errors import ConfigError

NAN = math.nan


def scored(rewards, group_ids, responses=None):
    return make_batch(rewards=torch.tensor(rewards), group_ids=group_ids, response=responses or ["x"] * len(rewards))


def test_scores_by_hand():
    """Three problems: two of three solved, none of two, and one whose responses all failed."""
    batch = scored([1.0, 1.0, 0.5, 0.0, 0.25, NAN, NAN], [0, 0, 0, 1, 1, 2, 2], list("1123344"))
    found = evaluation_metrics(batch, [2])
    accuracy, at_one, at_two, majority = [2.5 / 3, 0.125], [2 / 3, 0.0], [1.0, 0.0], [2 / 3, 0.0]
    # of the pairs of the first problem one agrees on the right answer, two are ties between right and wrong
    expected = {"accuracy": accuracy, "pass@1": at_one, "avg@2": accuracy, "pass@2": at_two, "maj@2": majority}
    for name, (first, second) in expected.items():
        assert found[name] == pytest.approx((first + second) / 2), name
        ends = bootstrap_interval([first, second])
        assert (found[f"{name}_low"], found[f"{name}_high"]) == pytest.approx(ends), name
    assert (found["problems"], found["responses"], found["unscored"]) == (3, 7, 2)
    assert found.keys() == {f"{name}{end}" for name in expected for end in ("", "_low", "_high")} | {
        "problems", "responses", "unscored"}


def test_an_episode_votes_with_what_it_said_last():
    """Its response has what the environment showed, too: two that heard 3 have not both answered 3."""
    batch = scored([0.0, 0.0, 1.0], [0, 0, 0], ["8 1 3", "2 3", "3 9"])
    assert evaluation_metrics(batch, [3])["maj@3"] == 0
    put(batch, "turns", [[{"action": "8"}, {"action": "1"}], [{"action": "2"}], [{"action": "9"}]])
    assert evaluation_metrics(batch, [3])["maj@3"] == pytest.approx(1 / 3)


def test_one_problem_has_no_interval_and_none_no_score():
    one, nothing = evaluation_metrics(scored([1.0, 0.0], [0, 0])), evaluation_metrics(scored([NAN], [0]))
    assert one["accuracy"] == one["pass@1"] == 0.5
    assert math.isnan(one["accuracy_low"]) and math.isnan(one["accuracy_high"])
    assert math.isnan(nothing["accuracy"]) and nothing["unscored"] == 1


def problems(*texts):
    count = len(texts)
    return PromptSet(list(texts), [[1]] * count, [], [None] * count, [{}] * count)


class Asked:
    """Answers every problem with 1 and the temperature, and notes what it was asked."""

    def __init__(self):
        self.batches = []

    def __call__(self, batch, temperature):
        self.batches.append((list(batch["prompt"]), batch["seeds"].tolist(), temperature))
        put(batch, "response", [f"1 at {temperature}"] * num_rows(batch))
        put(batch, "rewards", torch.full((num_rows(batch),), 1.0 if temperature else 0.0))
        return batch


def test_suites_change_the_plan_where_they_say_so():
    asked, own = Asked(), Asked()
    plan = Plan(samples=2, ks=[2], limit=2, temperature=0.5, greedy=True, seed=3)
    answers = Suite("", problems("a", "b", "c")).answer(plan, asked)
    assert asked.batches == [(["a", "a", "b", "b"], row_seeds(3, -1, 4).tolist(), 0.5),
                             (["a", "b"], row_seeds(3, -1, 2).tolist(), 0.0)]
    assert answers.metrics["accuracy"] == 1 and answers.metrics["greedy/accuracy"] == 0
    assert "maj@2" in answers.metrics and "greedy/maj@2" not in answers.metrics
    answers = Suite("more", problems("a", "b", "c"), own, samples=3, ks=[3], limit=1).answer(plan, asked)
    assert [batch[0] for batch in own.batches] == [["a"] * 3, ["a"]] and len(asked.batches) == 2
    assert {"maj@3", "pass@3"} <= answers.metrics.keys() and "maj@2" not in answers.metrics


def test_each_suite_is_evaluated_on_schedule_under_its_name(tmp_path):
    cfg = SimpleNamespace(seed=1, trainer=TrainerConfig(steps=7, eval_every=3, eval_temperature=1.0, save_samples=1))
    asked, own = Asked(), Asked()
    run = SimpleNamespace(dir=tmp_path, phase=lambda name: nullcontext())
    evaluate = Evaluation(cfg, run, asked, [Suite("", problems("a", "b")), Suite("s", problems("c"), own)])
    due = {step: evaluate(step) for step in range(8)}
    assert [step for step, metrics in due.items() if metrics] == [0, 3, 6, 7]
    assert due[3]["eval/accuracy"] == due[3]["eval/s/accuracy"] == 1
    assert (due[3]["eval/problems"], due[3]["eval/s/problems"]) == (2, 1)
    assert asked.batches[1:] == asked.batches[:-1], "each time the same"

    def lines():
        return [json.loads(line) for line in (tmp_path / "eval_samples.jsonl").read_text().splitlines()]

    assert [(line["step"], line["suite"], line["prompt"]) for line in lines()] == [
        (step, *of) for step in (0, 3, 6, 7) for of in (("data", "a"), ("s", "c"))]
    evaluate(3)  # resumed from a step before
    assert [line["step"] for line in lines()] == [0, 0, 3, 3]


def outputs(folder):
    return json.loads((folder / "results.json").read_text()), [
        json.loads(line)["suite"] for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_results_are_on_disk_suite_by_suite(tmp_path):
    plan, suites = Plan(2, [], 0, 1.0, True, 0), [SuiteConfig(name="s")]
    answers = Suite("", problems("a", "b")).answer(plan, Asked())
    output = EvaluationOutput(EvaluateConfig(output=str(tmp_path / "out"), suites=suites))
    assert not list(tmp_path.iterdir())
    output.add("", answers)
    results, lines = outputs(tmp_path / "out")
    assert list(results) == ["data"] and lines == ["data"] * 6
    output.add("s", answers)
    results, lines = outputs(tmp_path / "out")
    assert results == output.results and results["s"]["greedy/accuracy"] == 0 and lines == ["data"] * 6 + ["s"] * 6
    again = EvaluationOutput(EvaluateConfig(output=str(tmp_path / "out")))
    again.add("", answers)
    assert outputs(tmp_path / "out") == (results["data"], ["data"] * 6)


def test_nothing_to_evaluate_on(tmp_path):
    cfg = SimpleNamespace(seed=1, trainer=TrainerConfig())
    assert Evaluation(cfg, SimpleNamespace(dir=tmp_path), Asked(), [])(0) == {} and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("suite", "said"), [
    ("reward: {functions: [{name: numerik}]}", "Unknown reward function 'numerik'"),
    ("environment: {name: gess}", "Did you mean guess"), ("environment: {name: guess, options: {hihg: 3}}", "high")])
def test_rewards_and_environments_of_suites_are_checked_at_once(suite, said):
    cfg = load("evaluate", EvaluateConfig, ["policy.model.path=m", f"suites=[{{name: a, data: {{path: x}}, {suite}}}]"])
    with pytest.raises(ConfigError, match=said):
        Suites(cfg.data, cfg.suites)


@pytest.mark.parametrize(("words", "said"), [
    (["suites=[{name: a b, data: {path: x}}]"], "suites[0].name must be letters, digits, - and _, got 'a b'"),
    (["suites=[{name: a}]"], "suites[0].data.path must be a path (or data.task a reasoning-gym task), got ''"),
    (["suites=[{name: a, data: {path: x}}, {name: a, data: {path: x}}]"], "suites[1].name must be a name that no"),
    (["suites=[{name: a, data: {path: x}, k: [2]}]"], "suites[0].k must be from 1 to the suite's samples=1, got [2]"),
    (["suites=[{name: a, data: {pth: x}}]"], "Unknown option 'suites[].data.pth'. Did you mean suites[].data.path?"),
    (["suites=[{name: a, data: {path: x}, reward: {timeout_s: -1, functions: [{name: exact}]}}]"],
     "suites[0].reward.timeout_s must be positive, got -1.0"),
    ([], "data.path must be a path (or data.task a reasoning-gym task) without suites"),
    (["data.path=x", "k=[2]"], "k must be from 1 to samples_per_prompt=1, got [2]"),
    (["data.path=x", "greedy=true", "policy.rollout.temperature=0"], "greedy must be false with policy.rollout.temp"),
    (["data.path=x", f"output={__file__}"], "output must be no file's name unless it ends in .jsonl")])
def test_options_of_an_evaluation(words, said):
    with pytest.raises(ConfigError) as caught:
        load("evaluate", EvaluateConfig, ["policy.model.path=m", *words])
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("words", "said"), [
    (["trainer.eval_greedy=true"], "trainer.eval_greedy must be false with eval_temperature=0"),
    (["trainer.eval_k=[3]", "trainer.eval_samples=2"], "trainer.eval_k must be from 1 to eval_samples=2, got [3]"),
    (["trainer.eval_every=2"], "trainer.eval_every must be 0 while eval_data names no problems")])
def test_options_of_evaluation_in_training(words, said):
    with pytest.raises(ConfigError) as caught:
        load("grpo", GRPOConfig, ["policy.model.path=m", "data.path=d", *words])
    assert said in str(caught.value)
    load("grpo", GRPOConfig, ["policy.model.path=m", "data.path=d", "trainer.eval_every=2",
                              "eval_suites=[{name: a, data: {path: x}}]"])
