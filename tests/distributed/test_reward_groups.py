"""A reward model and a judge as worker groups: one rank or two, on the policy's pool or their own, the same scores."""

from types import SimpleNamespace

import pytest
import torch

from hybridrl.batch import make_batch, narrow, num_rows, objects_of, put
from hybridrl.config import (
    EvalDataConfig,
    JudgeConfig,
    ModelConfig,
    OptionalRewardConfig,
    PolicyConfig,
    RewardConfig,
    RewardModelConfig,
    RolloutConfig,
    SuiteConfig,
)
from hybridrl.controller.evaluation import Plan
from hybridrl.controller.reward_groups import reward_groups
from hybridrl.controller.suites import Suites
from tests.models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scores(shared_pool, tmp_path_factory):
    """`scores(ranks, rows, **ranks of their own)`: scores and errors of each group for the first rows of a batch."""
    root, tokenizer = tmp_path_factory.mktemp("scorers"), tiny_tokenizer()
    folders = {name: str(tiny_model(root / name, kind, seed=seed, classifier=name == "model"))
               for seed, (name, kind) in enumerate({"model": "qwen3_moe", "judge": "llama", "policy": "llama"}.items())}
    texts = [f"{i}+{i * i}=" for i in range(5)]
    batch = make_batch(prompt=texts, response=["=".join("7" * i) for i in range(5)], seeds=torch.arange(5),
                       prompt_ids=[tokenizer(text)["input_ids"] for text in texts],
                       response_ids=[tokenizer("=".join("7" * i))["input_ids"] for i in range(5)])

    def score(ranks, rows=5, model_ranks=0, judge_ranks=0):
        cfg = RewardConfig(
            model=RewardModelConfig(path=folders["model"], micro_batch_tokens=20, max_tokens=11, ranks=model_ranks),
            judge=JudgeConfig(path=folders["judge"], prompt="{prompt}{response}", verdict="([0-9])", samples=2,
                              ranks=judge_ranks, rollout=RolloutConfig(
                                  engine="transformers", max_prompt_tokens=64, max_response_tokens=8)))
        policy = PolicyConfig(model=ModelConfig(path=folders["policy"]))
        groups = reward_groups(cfg, policy, SimpleNamespace(pool=shared_pool), shared_pool(ranks))
        try:
            found = {name: group.score.future(narrow(batch, 0, rows)).result() for name, group in groups.items()}
            return {name: (part["scores"], objects_of(part, "score_errors")) for name, part in found.items()
                    if num_rows(part) == rows}
        finally:
            for group in groups.values():
                group.close()

    return score


@pytest.fixture(scope="module")
def expected(scores):
    return scores(1)


def assert_same(found, expected):
    assert found.keys() == expected.keys() == {"model", "judge"}
    for name, (values, errors) in found.items():
        torch.testing.assert_close(values, expected[name][0][:len(values)], rtol=0, atol=1e-5, equal_nan=True)
        assert errors == expected[name][1][:len(values)]


def test_some_rows_are_scored_and_one_is_too_long(expected):
    values, errors = expected["model"]
    assert errors[:4] == [None] * 4 and errors[4] is not None and values[:4].std() > 0.01
    values, errors = expected["judge"]
    assert values.isfinite().any() and [error is None for error in errors] == values.isfinite().tolist()


@pytest.mark.parametrize("rows", [5, 1])
def test_two_ranks_give_the_scores_of_one(scores, expected, rows):
    """With one row the second rank has none, and joins in."""
    assert_same(scores(2, rows), expected)


def test_so_do_devices_of_their_own(scores, expected):
    assert_same(scores(2, model_ranks=1, judge_ranks=1), expected)


class Echo:
    """A policy that answers each prompt with itself."""

    def generate(self, batch, temperature):
        put(batch, "response", list(batch["prompt"]))
        return batch


def test_a_suite_has_a_judge_of_its_own_beside_the_recipes(shared_pool, tmp_path):
    """On one pool and of the same model, they say the same; equal responses are judged once."""
    characters = {chr(code): float(code) for code in range(32, 127) if not chr(code).isupper()}
    judge = JudgeConfig(path=str(tiny_model(tmp_path / "judge", "llama")), prompt="{response}", verdict="(?s)(.)",
                        words=characters, rollout=RolloutConfig(engine="transformers", temperature=0.0,
                                                                max_prompt_tokens=64, max_response_tokens=8))
    policy, cluster, pool = PolicyConfig(model=judge), SimpleNamespace(pool=shared_pool), shared_pool(1)
    (tmp_path / "data.jsonl").write_text("".join(f'{{"prompt": "{i % 2}+1=", "answer": "1"}}\n' for i in range(4)))
    cfg = SuiteConfig(name="judged", data=EvalDataConfig(path=str(tmp_path / "data.jsonl"), chat_template=False),
                      reward=OptionalRewardConfig(judge=judge, cache=["judge"]))
    groups = [reward_groups(RewardConfig(judge=judge), policy, cluster, pool)["judge"]]
    try:
        with Suites(EvalDataConfig(), [cfg]) as suites:
            suites.load(policy, tiny_tokenizer(), cluster, pool)
            (suite,) = suites.ready(Echo())
            groups.append(suites._rewarders["judged"].groups["judge"])
            sampled = suite.answer(Plan(1, [], 0, None, False, 0), None).sampled
            assert suites._rewarders["judged"].metrics["cache/reward_judge"] == 2
        assert [group.role for group in groups] == ["judge", "judge of judged"]
        expected = groups[0].score(sampled)["scores"]
        assert expected.isfinite().all() and expected[0] == expected[2]
        assert sampled["rewards"].tolist() == pytest.approx(expected.tolist())
    finally:
        for group in groups:
            group.close()
