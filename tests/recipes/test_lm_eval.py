"""lm-eval, the real package, against a served model: scores and log-probs, computed again with transformers."""

import json

import pytest
import torch

from tests.recipes.command import ROOT, write_jsonl

pytestmark = pytest.mark.slow

MODEL = ROOT / "recipes" / "demo" / "model"
PROBLEMS = 24
TASKS = {
    "sums": """
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: [], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "choices": """
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""}


@pytest.fixture(scope="module")
def problems() -> list[dict]:
    """Sums of the demo, each with its answer and one that forgets a carry."""
    with open(ROOT / "recipes" / "demo" / "heldout.jsonl") as file:
        rows = [json.loads(next(file)) for _ in range(PROBLEMS)]
    return [row | {"choices": [row["answer"], str(int(row["answer"]) - 10)]} for row in rows]


@pytest.fixture(scope="module")
def measured(start, problems, tmp_path_factory) -> tuple[dict, dict[str, list[dict]]]:
    """What lm-eval says of the served model: results by task, and what it logged of each problem."""
    folder = tmp_path_factory.mktemp("lm_eval")
    data = write_jsonl(folder / "problems.jsonl", problems)
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\ndataset_path: json\ntest_split: test\n"
                                             f"dataset_kwargs: {{data_files: {{test: {data}}}}}{task}")
    server = start("recipes.serve", f"policy.model.path={MODEL}", "port=0", "api_key=local",
                   "policy.rollout.max_prompt_tokens=24", "policy.rollout.max_response_tokens=8",
                   "policy.rollout.kv_cache_gib=0.25")
    server.wait_for("base_url")
    access = json.loads(server.out.splitlines()[0])
    model = f"base_url={access['base_url']}/completions,model={access['model']},tokenizer={MODEL},num_concurrent=8"
    env = {"OPENAI_API_KEY": access["api_key"], "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    evaluation = start("tests.recipes.lm_eval_run", model, str(folder), *TASKS, env=env)
    assert evaluation.wait() == 0, evaluation.err
    server.kill()
    found = json.loads((folder / "found.json").read_text())
    return found["results"], found["samples"]


@pytest.fixture(scope="module")
def reference():
    """The model in transformers, and the tokens of a prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    causal_lm, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL).eval(), AutoTokenizer.from_pretrained(MODEL)

    def prompt(text: str) -> list[int]:
        return tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True,
                                             return_dict=False)

    return causal_lm, tokenizer, prompt


def test_accuracy_is_that_of_the_likeliest_answers(measured, reference, problems):
    causal_lm, tokenizer, prompt = reference
    right = []
    for row in problems:
        ids = torch.tensor([prompt(row["prompt"])])
        with torch.no_grad():
            out = causal_lm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        right.append(tokenizer.decode(out[0, ids.shape[1]:], skip_special_tokens=True).strip() == row["answer"])
    results, logged = measured
    assert 0 < sum(right) < PROBLEMS
    assert results["sums"]["exact_match,none"] == pytest.approx(sum(right) / PROBLEMS)
    found = {sample["doc_id"]: sample["exact_match"] for sample in logged["sums"]}
    assert [bool(found[i]) for i in range(PROBLEMS)] == right


def test_log_probs_are_those_of_the_model(measured, reference, problems):
    causal_lm, tokenizer, prompt = reference
    results, logged = measured
    right = 0
    for sample in logged["choices"]:
        row, scores = problems[sample["doc_id"]], []
        for text, (found, greedy) in zip(row["choices"], sample["filtered_resps"], strict=True):
            asked, answer = prompt(row["prompt"]), tokenizer(text, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits = causal_lm(torch.tensor([asked + answer])).logits[0, len(asked) - 1:-1]
            log_probs = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])
            scores.append(float(log_probs.sum()))
            assert float(found) == pytest.approx(scores[-1], abs=1e-3)
            assert str(greedy) == str(bool((logits.argmax(-1) == torch.tensor(answer)).all()))
        right += scores[0] > scores[1]
    assert len(logged["choices"]) == PROBLEMS and 0 < right <= PROBLEMS
    assert results["choices"]["acc,none"] == pytest.approx(right / PROBLEMS)
