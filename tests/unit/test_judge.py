"""The judge: questions, verdicts, and the answers of a real model behind them."""

import math

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.batch import make_batch, rows_of, select
from hybridrl.config import JudgeConfig, RolloutConfig
from hybridrl.errors import BatchError, ConfigError
from hybridrl.rewards.texts import as_text, fill, verdict_of
from hybridrl.workers.base import WorkerContext
from hybridrl.workers.judge import JudgeWorker
from tests.models import tiny_model
from tests.unit.test_rollout_engine import CountingEngine

CPU = torch.device("cpu")
NUMBER = r"score (\d+)"


@pytest.mark.parametrize(("text", "pattern", "words", "score"), [
    ("Score: 7", r"Score:\s*(\d+)", {}, 7), ("Score: 1, no, Score: 4.5", r"Score:\s*([\d.]+)", {}, 4.5),
    ("score seven", r"score (\w+)", {}, None), ("nothing", NUMBER, {}, None), ("", NUMBER, {}, None),
    ("Verdict: YES.", r"Verdict:\W*(\w+)", {"yes": 1.0, "no": 0.0}, 1),
    ("Verdict: yes\nVerdict: **no**", r"Verdict:\W*(\w+)", {"yes": 1.0, "no": 0.0}, 0),
    ("Verdict: maybe", r"Verdict:\W*(\w+)", {"yes": 1.0, "no": 0.0}, None),
    ("score -3e2", r"score (\S+)", {}, -300), ("score nan", r"score (\S+)", {}, None),
    ("score inf", r"score (\S+)", {}, None),
])
def test_verdicts(text, pattern, words, score):
    assert verdict_of(text, pattern, words) == score


def test_filled_templates_and_texts_of_prompts():
    assert fill("{a} {b} {c} {", a="{b}", b="2") == "{b} 2 {c} {"
    assert as_text("1+1=") == as_text([{"role": "user", "content": "1+1="}]) == "1+1="
    assert as_text([{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}]) == (
        "system: add\n\nuser: 1+1=")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("judge"), "llama", seed=7)


def judge(folder, answers=None, **options):
    """A judge on the transformers engine; with `answers`, an engine that gives these instead, in order."""
    rollout = {"engine": "transformers", "temperature": 0.0, "max_prompt_tokens": 64, "max_response_tokens": 16}
    rollout |= options.pop("rollout", {})
    cfg = JudgeConfig(path=str(folder), rollout=RolloutConfig(**rollout),
                      **{"prompt": "{prompt}/{response}", "verdict": NUMBER} | options)
    worker = JudgeWorker(WorkerContext(0, 1, CPU, "judge"), cfg)
    if answers is not None:
        worker.engine = ScriptedEngine(worker.tokenizer, answers)
    return worker


class ScriptedEngine(CountingEngine):
    """Gives the next of `answers` to each request and keeps what it was asked."""

    def __init__(self, tokenizer, answers):
        super().__init__()
        self.tokenizer, self.answers, self.requests = tokenizer, list(answers), []
        self.load_weights([], version=0)

    def add(self, request_id, request):
        self.requests.append(request)
        super().add(request_id, request)

    def step(self):
        finished = super().step()
        for _, completion in finished:
            completion.token_ids[:] = self.tokenizer(self.answers.pop(0))["input_ids"]
        return finished

    def questions(self):
        return [self.tokenizer.decode(request.prompt_ids) for request in self.requests]


def rows(*responses, **columns):
    return make_batch(prompt=["1+1="] * len(responses), response=list(responses), **columns)


def test_scores_are_means_of_the_verdicts_and_failures_are_marked(folder):
    worker = judge(folder, ["score 4", "score 2", "none", "score 8", "x" * 90 + "yz", "hm"], samples=2,
                   rollout={"temperature": 1.0, "max_response_tokens": 1})
    scored = worker.score(rows("2", "3", "4", seeds=torch.tensor([5, 6, 7])))
    assert scored["scores"][:2].tolist() == [3, 8] and math.isnan(scored["scores"][2])
    assert rows_of(scored["score_errors"])[:2] == [None, None]
    assert rows_of(scored["score_errors"])[2] == f"no verdict in {'x' * 78 + 'yz'!r}"
    assert worker.engine.questions() == ["<user>1+1=/2<assistant>"] * 2 + ["<user>1+1=/3<assistant>"] * 2 + [
        "<user>1+1=/4<assistant>"] * 2
    seeds = [request.seed for request in worker.engine.requests]
    assert len(set(seeds)) == 6 and seeds[::2] == [5, 6, 7] and all(0 <= seed < 2**63 for seed in seeds)


def test_questions_without_a_chat_template_or_an_answer_or_room(folder):
    worker = judge(folder, ["score 1"], chat_template=False, prompt="{answer}: {response}?",
                   rollout={"max_response_tokens": 1})
    scored = worker.score(rows("{answer}", "3", "4" * 70, answer=[12, None, "x"]))
    assert worker.engine.questions() == ["12: ?answer??"], "braces have no token of their own"
    assert rows_of(scored["score_errors"]) == [
        None, "the question asks for {answer}, and the row has none",
        "the question has 74 tokens, more than reward.judge.rollout.max_prompt_tokens=64"]
    with pytest.raises(BatchError, match="answer"):
        worker.score(rows("2"))
    assert worker.score(select(rows("2", answer=["x"]), [])).batch_size == torch.Size([0])


def test_the_answers_are_those_of_the_model_in_the_folder(folder):
    """Greedy, against transformers' own generate; the verdict is the first character of the answer."""
    worker, batch = judge(folder, verdict=r"^(.)", words=dict.fromkeys("0123456789abcdefghijklmnopqrstuvwxyz", 1.0) | {
        "a": 2.0}), rows(*"0123456789")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    texts = []
    for response in "0123456789":
        ids = tokenizer(f"<user>1+1=/{response}<assistant>", return_tensors="pt")["input_ids"]
        answer = model.generate(ids, do_sample=False, max_new_tokens=16)[0, ids.shape[1]:]
        texts.append(tokenizer.decode(answer, skip_special_tokens=True))
    expected = [verdict_of(text, r"^(.)", worker.words) for text in texts]
    scored = worker.score(batch)
    assert [None if math.isnan(score) else score for score in scored["scores"].tolist()] == expected
    assert len(set(expected)) > 1, "the model gives more than one verdict"


def test_a_model_without_a_chat_template_is_asked_in_plain_text_only(tmp_path):
    path = tiny_model(tmp_path)
    (path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template; reward.judge.chat_template=false"):
        judge(path)


def test_a_frozen_engine_takes_no_process_group(folder):
    assert not dist.is_initialized()
    assert judge(folder).engine.version == 0
