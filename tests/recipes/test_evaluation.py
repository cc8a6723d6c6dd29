"""Evaluation during training: what is measured, and that training does not notice."""

import json

import pytest

from tests.recipes.command import metrics, samples

pytestmark = pytest.mark.slow


def test_training_is_the_same_with_and_without_evaluation(run, grpo, doubles, tmp_path):
    """Sampled evaluation with vLLM, in an environment, too, before the first step and after each one."""
    words = [*grpo, "trainer.trackers=[]", "trainer.export=false"]
    run(*words, f"trainer.run_dir={tmp_path / 'without'}")
    suites = [f"{{name: numeric, data: {{path: {doubles}}}, reward: {{functions: [{{name: numeric}}]}}}}",
              f"{{name: guess, data: {{path: {doubles}}}, environment: {{name: guess, options: {{guesses: 2}}, "
              "max_turn_tokens: 3}}"]
    run(*words, f"trainer.run_dir={tmp_path / 'with'}", f"eval_data.path={doubles}", "trainer.eval_every=1",
        "trainer.eval_samples=4", "trainer.eval_k=[4]", "trainer.eval_temperature=1", "trainer.eval_greedy=true",
        f"eval_suites=[{', '.join(suites)}]")
    without, found = metrics(tmp_path / "without"), metrics(tmp_path / "with")
    assert list(found) == [0, 1, 2]
    trained = {step: {name: value for name, value in row.items() if not name.startswith("eval/")}
               for step, row in found.items()}
    assert trained == {0: {"step": 0}, **without}
    assert samples(tmp_path / "with") == samples(tmp_path / "without")
    for row in found.values():
        for prefix in ("", "numeric/", "guess/"):
            assert row[f"eval/{prefix}problems"] == 6 and row[f"eval/{prefix}responses"] == 24
            assert {f"eval/{prefix}{name}" for name in ("maj@4_low", "pass@1", "greedy/accuracy_high")} <= row.keys()
    lines = [json.loads(line) for line in (tmp_path / "with" / "eval_samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [step for step in range(3) for _ in range(24)]
    assert {line["suite"] for line in lines} == {"data", "numeric", "guess"}
    assert all(len(line["turns"]) <= 2 for line in lines if line["suite"] == "guess")
