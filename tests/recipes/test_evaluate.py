"""`python -m recipes.evaluate`: the printed scores, computed again from the written responses by counting subsets."""

import io
import json
import re
from itertools import combinations

import pytest
import torch
from rich.console import Console

from hybridrl.show import show

pytestmark = pytest.mark.slow

SAMPLES = 5


@pytest.fixture(scope="module")
def words(model, sums) -> list[str]:
    """Sharp enough for repeated responses of up to two characters, blunt enough for different ones."""
    return ["recipes.evaluate", "cluster.backend=local", f"policy.model.path={model}", f"data.path={sums}",
            "policy.rollout.max_prompt_tokens=32", "policy.rollout.max_response_tokens=2",
            "policy.rollout.temperature=0.15", "reward.workers=1"]


@pytest.fixture(scope="module")
def scored(run, words, tmp_path_factory):
    """The printed scores and the written rows."""
    output = tmp_path_factory.mktemp("scored") / "responses.jsonl"
    command = run(*words, "reward.functions=[{name:'tests.recipes.reward_functions:short_answers'}]",
                  f"samples_per_prompt={SAMPLES}", "k=[1,3,5]", "max_prompts=9", f"output={output}")
    return json.loads(command.out.splitlines()[-1], parse_constant=pytest.fail), [
        json.loads(line, parse_constant=pytest.fail) for line in output.read_text().splitlines()]


def vote(response: str) -> str:
    """The final number of at most two characters, or the text."""
    if response[:1] in ("-", ".") and response[1:].isdigit():
        return response
    return response.strip("abcdefghijklmnopqrstuvwxyz+-*/=?.,: \n") if any(map(str.isdigit, response)) \
        else response.strip()


def majority(rows: tuple[dict, ...]) -> float:
    """Share of correct ones among the answers with most votes."""
    answers = [(vote(row["response"]), row["reward"] >= 1) for row in rows]
    most = max(map(answers.count, answers))
    winners = {answer for answer in answers if answers.count(answer) == most}
    return sum(right for _, right in winners) / len(winners)


def over_subsets(rows: list[dict], k: int, score) -> float:
    """Mean over problems with at least k scored responses of the mean score of their k-subsets."""
    problems = [rows[i:i + SAMPLES] for i in range(0, len(rows), SAMPLES)]
    scored = [[row for row in problem if row["reward"] is not None] for problem in problems]
    subsets = [list(combinations(problem, k)) for problem in scored if len(problem) >= k]
    return sum(sum(map(score, group)) / len(group) for group in subsets) / len(subsets)


def test_every_row_is_written(scored):
    _, rows = scored
    assert len(rows) == 9 * SAMPLES
    assert [row["prompt"] for row in rows] == [f"{i}+{i + 1}=" for i in range(9) for _ in range(SAMPLES)]
    failed = [row for row in rows if row["reward"] is None]
    assert 0 < len(failed) < 20 and all("a vowel" in row["reward_error"] for row in failed)
    assert all(set(row["response"]) & set("aeiou") for row in failed)
    assert {row["reward"] for row in rows} == {None, 1.0, 0.25}


def test_scores_are_those_of_counting_subsets(scored):
    found, rows = scored
    assert found["unscored"] == sum(row["reward"] is None for row in rows)
    expected = {}
    for k in (1, 3, 5):
        expected[f"pass@{k}"] = over_subsets(rows, k, lambda group: any(row["reward"] >= 1 for row in group))
        expected[f"avg@{k}"] = over_subsets(rows, k, lambda group: sum(r["reward"] for r in group) / len(group))
        expected[f"maj@{k}"] = over_subsets(rows, k, majority)
    del expected["maj@1"]
    expected["accuracy"] = expected.pop("avg@1")
    scores = {name: value for name, value in found.items() if not name.endswith(("_low", "_high"))}
    counts = {"problems": 9, "responses": 45, "unscored": found["unscored"]}
    assert scores == pytest.approx(expected | counts, abs=1e-12)
    for name in expected:
        assert 0 <= found[f"{name}_low"] <= found[name] <= found[f"{name}_high"] <= 1
    assert 0 < expected["pass@1"] < expected["pass@3"] < 1
    assert len({expected["pass@1"], expected["maj@3"], expected["pass@3"], expected["avg@3"]}) == 4


def test_what_could_not_be_computed_is_null(run, words):
    """No problem has two scored responses: one of each pair fails."""
    command = run(*words, "reward.functions=[{name:'tests.recipes.reward_functions:every_second'}]",
                  "samples_per_prompt=2", "k=[2]", "max_prompts=3", "policy.rollout.engine=transformers")
    found = json.loads(command.out.splitlines()[-1], parse_constant=pytest.fail)
    nothing = {f"{name}@2{end}": None for name in ("avg", "pass", "maj") for end in ("", "_low", "_high")}
    everything = {f"{name}{end}": 1.0 for name in ("accuracy", "pass@1") for end in ("", "_low", "_high")}
    assert found == nothing | everything | {"problems": 3, "responses": 6, "unscored": 3}


def test_an_output_that_cannot_be_written_is_refused_at_once(run, words, tmp_path):
    command = run(*words, f"output={tmp_path}/no/such/folder.jsonl", code=2)
    assert command.err.splitlines() == [f"evaluate: output must be a file in a folder that exists, got "
                                        f"'{tmp_path}/no/such/folder.jsonl'."]


def test_problems_may_be_played_in_an_environment(run, words, tmp_path):
    """Two guesses at the answer: solved when the last number of one of them is it."""
    output = tmp_path / "played.jsonl"
    command = run(*words, "policy.rollout.engine=transformers", "policy.rollout.max_response_tokens=24",
                  "environment.name=guess", "environment.options={rules: '{low}-{high}?', high: 19, guesses: 2}",
                  "environment.max_turn_tokens=4", "samples_per_prompt=6", "k=[1,6]", f"output={output}",
                  "policy.rollout.temperature=1")
    found, rows = json.loads(command.out.splitlines()[-1]), [json.loads(line) for line in output.open()]
    assert found["problems"] == 10 and found["responses"] == len(rows) == 60 and found["unscored"] == 0
    for row in rows:
        guesses = [re.findall(r"\d+", action) for action in re.split("higher|lower|no number", row["response"])]
        assert len(guesses) <= 2
        assert row["reward"] == any(numbers[-1:] and int(numbers[-1]) == int(row["answer"]) for numbers in guesses)
    assert found["pass@1"] == pytest.approx(sum(row["reward"] for row in rows) / 60)
    assert 0 < found["pass@1"] < found["pass@6"]


def test_several_suites_in_one_run(run, words, model, sums, doubles, tmp_path):
    """Sampled and greedy: with the recipe's rewards, with rewards of their own, and in an environment."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    suites = [f"{{name: doubles, data: {{path: {doubles}}}, max_prompts: 4}}",
              f"{{name: numeric, data: {{path: {sums}}}, reward: {{functions: [{{name: numeric}}]}}, samples: 2, "
              "k: [2]}",
              f"{{name: guess, data: {{path: {sums}}}, environment: {{name: guess, options: {{high: 19, guesses: 2}}, "
              "max_turn_tokens: 2}}"]
    command = run(*words, "reward.functions=[{name:'tests.recipes.reward_functions:digits'}]", "samples_per_prompt=3",
                  "k=[3]", "greedy=true", f"suites=[{', '.join(suites)}]", f"output={tmp_path / 'out'}",
                  "policy.rollout.temperature=1", "policy.rollout.max_response_tokens=24",
                  "policy.rollout.max_prompt_tokens=64")
    found = json.loads(command.out.splitlines()[-1])
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == found
    assert list(found) == ["data", "doubles", "numeric", "guess"]
    rows = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    sizes = {"data": (30, 10), "doubles": (12, 4), "numeric": (20, 10), "guess": (30, 10)}
    for name, (sampled, greedy) in sizes.items():
        for likeliest, prefix, count in ((False, "", sampled), (True, "greedy/", greedy)):
            chosen = [row for row in rows if row["suite"] == name and row["greedy"] is likeliest]
            assert len(chosen) == found[name][f"{prefix}responses"] == count
            rewards = [row["reward"] for row in chosen]
            assert found[name][f"{prefix}accuracy"] == pytest.approx(sum(rewards) / count)
            assert found[name][f"{prefix}pass@1"] == pytest.approx(sum(reward >= 1 for reward in rewards) / count)
    assert "maj@2" in found["numeric"] and "maj@3" not in found["numeric"] and "maj@3" in found["guess"]
    digits = [row for row in rows if row["suite"] in ("data", "doubles")]
    assert [row["reward"] for row in digits] == pytest.approx([
        sum(map(str.isdigit, row["response"])) / max(1, len(row["response"])) for row in digits])
    causal_lm, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    for row in [row for row in rows if row["suite"] == "doubles" and row["greedy"]]:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": row["prompt"]}], add_generation_prompt=True,
                                            return_dict=False)
        for token in row["tokens"]["ids"]:
            with torch.no_grad():
                assert causal_lm(torch.tensor([ids])).logits[0, -1].argmax() == token
            ids = [*ids, token]
    shown = io.StringIO()
    show(tmp_path / "out", row=len(rows) - 1, tokens=True, console=Console(file=shown))
    assert "suite guess" in shown.getvalue() and "turn 2" in shown.getvalue()
