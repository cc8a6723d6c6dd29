"""A reward model and a judge in a real run, and what is refused at the start."""

import math
from pathlib import Path

import pytest

import recipes.grpo
from hybridrl.metrics import read_metrics
from tests.models import tiny_model, tiny_tokenizer
from tests.recipes.command import GAP

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A reward model with a chat template of its own, and a judge."""
    root = tmp_path_factory.mktemp("scorers")
    found = {"model": tiny_model(root / "model", "qwen3", seed=2, classifier=True),
             "judge": tiny_model(root / "judge", "llama", seed=5)}
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<eos>{% endfor %}"
    tokenizer.save_pretrained(found["model"])
    return found


@pytest.fixture(scope="module")
def judged(grpo, folders) -> list[str]:
    """A GRPO run whose reward is a function, a model and a judge that gives digits."""
    return [*grpo, "trainer.trackers=[]", "trainer.export=false", "algorithm.advantage.name=gdpo",
            f"reward.model.path={folders['model']}", "reward.model.weight=0.5", "reward.model.scale=2",
            f"reward.judge.path={folders['judge']}", f"reward.judge.prompt='{'x' * 250}{{prompt}}{{response}}'",
            "reward.judge.verdict='([0-9])'", "reward.judge.samples=2", "reward.judge.rollout.temperature=1",
            "reward.judge.rollout.max_prompt_tokens=320", "reward.judge.rollout.max_response_tokens=24",
            "reward.judge.rollout.kv_cache_gib=0.1"]


@pytest.fixture(scope="module")
def local(run, judged, tmp_path_factory) -> Path:
    """Two vLLM engines and two training engines in one process; the judge's prompts take more than one step to read."""
    folder = tmp_path_factory.mktemp("local") / "run"
    run(*judged, f"trainer.run_dir={folder}")
    return folder


def test_every_part_is_logged_and_their_sum_is_the_reward(local):
    first, second = read_metrics(local / "metrics.jsonl")
    for row in (first, second):
        assert {"reward/digits", "reward/model", "reward/judge"} <= row.keys()
        total = row["reward/digits"] + 0.5 * row["reward/model"] + row["reward/judge"]
        assert row["reward/mean"] == pytest.approx(total, abs=1e-5)
        assert row["reward/failed"] == row["reward/judge_failed"] < 8 and row["reward/model_failed"] == 0
        assert 0 < row["reward/judge"] < 9 and row["mismatch/max_gap"] < GAP
        assert all(math.isfinite(value) for value in row.values())
    assert first["reward/model"] != second["reward/model"]


@pytest.mark.parametrize("words, message", [
    (["reward.model.path={policy}"], "is no sequence classifier: its architecture is LlamaForCausalLM"),
    (["reward.model.path={two}"], "is a classifier of 2 labels; a reward model has 1."),
    (["reward.model.template='Q: {prompt}'"], "reward.model.template must be `tokens`, `chat` or a text with"),
    (["reward.model.template='{response}{answer}'"], "reward.model.template must be a text with {prompt} and"),
    (["reward.judge.prompt='good?'"], "reward.judge.prompt must be a text with {response}, got 'good?'."),
    (["reward.judge.verdict=yes"], "reward.judge.verdict must be a regular expression with one group, got 'yes'."),
    (["reward.judge.verdict='(yes'"], "reward.judge.verdict is no regular expression: missing )"),
    (["reward.judge.samples=2"], "reward.judge.rollout.temperature must be positive with samples=2, got 0.0."),
    (["reward.judge.path={gone}"], "is neither a folder nor a known name"),
    (["reward.judge.path={policy}", "reward.judge.ranks=1"], "reward.judge.ranks must be 0 with cluster.backend=local"),
    (["reward.judge.path={policy}", "cluster.backend=ray", "cluster.ranks=2",
      "reward.judge.rollout.tensor_parallel=2"], "must be policy.rollout.tensor_parallel=1 in the policy's processes"),
    (["reward.functions=[]"], "reward.functions must be at least one function while neither reward.model.path nor"),
])
def test_what_cannot_be(capsys, monkeypatch, grpo, model, tmp_path, words, message):
    """In one line, before an engine starts."""
    places = {"{policy}": model, "{gone}": tmp_path / "gone",
              "{two}": tiny_model(tmp_path / "two", classifier=True, num_labels=2)}
    words = [next((w.replace(k, str(v)) for k, v in places.items() if k in w), w) for w in words]
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", [*grpo, f"trainer.run_dir={tmp_path / 'run'}", *words])
    with pytest.raises(SystemExit) as stopped:
        recipes.grpo.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code in (1, 2) and message in line
