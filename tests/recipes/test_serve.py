"""`python -m recipes.serve`, and `recipes.agent` with a program: both through OpenAI's client, unmodified."""

import json
import signal
import socket
from itertools import takewhile

import openai
import pytest
import torch

from hybridrl.config import ModelConfig, RolloutConfig, ServeConfig, ServePolicyConfig
from hybridrl.errors import ConfigError
from hybridrl.metrics import read_metrics
from recipes import serve
from tests.recipes.command import GAP

pytestmark = pytest.mark.slow


def test_a_served_model_answers_and_scores_as_itself(start, model):
    """Log-probs of prompts and of samples at another temperature, and greedy choices: those of the model itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    command = start(
        "recipes.serve", f"policy.model.path={model}", "port=0", "policy.rollout.max_prompt_tokens=64",
        "policy.rollout.max_response_tokens=32", "policy.rollout.max_running=8", "policy.rollout.temperature=0.5",
        "api_key=secret", "model_name=tiny")
    command.wait_for('"base_url"')
    access = json.loads(next(line for line in command.out.splitlines() if "base_url" in line))
    assert access["api_key"] == "secret" and access["model"] == "tiny"
    client = openai.OpenAI(base_url=access["base_url"], api_key="secret", max_retries=0)
    reference, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)

    def log_probs(ids, temperature=1.0):
        with torch.no_grad():
            return (reference(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)

    texts = ["2+2=4", "the sum of 1 and 2", "7"]
    answer = client.completions.create(model="tiny", prompt=texts, echo=True, logprobs=1, max_tokens=1, temperature=0)
    for choice, text in zip(answer.choices, texts, strict=True):
        ids = tokenizer(text)["input_ids"]
        expected = log_probs(ids)
        for t, token in enumerate(ids[1:], 1):
            assert choice.logprobs.token_logprobs[t] == pytest.approx(float(expected[t - 1, token]), abs=1e-4)
            top = max(choice.logprobs.top_logprobs[t].values())
            assert top == pytest.approx(float(expected[t - 1].max()), abs=1e-4)
        assert choice.logprobs.token_logprobs[-1] == pytest.approx(float(expected[-1].max()), abs=1e-4)
    messages = [{"role": "user", "content": "1+1="}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)["input_ids"]
    sampled = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, logprobs=True, seed=1)
    ids = [tokenizer.convert_tokens_to_ids(token.token) for token in sampled.choices[0].logprobs.content]
    ids = list(takewhile(lambda token: token is not None, ids))  # the model knows tokens that its tokenizer does not
    assert ids
    expected = log_probs(prompt + ids, temperature=0.5)[len(prompt) - 1:]
    for t, token in enumerate(ids):
        assert sampled.choices[0].logprobs.content[t].logprob == pytest.approx(float(expected[t, token]), abs=1e-4)
    options = dict(model="tiny", messages=messages, max_tokens=20, logprobs=True, seed=5)
    whole, chunks = client.chat.completions.create(**options).choices[0], []
    with client.chat.completions.create(**options, stream=True) as stream:
        chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content and len(chunks) > 2
    streamed = [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.content]
    assert [token.token for token in streamed] == [token.token for token in whole.logprobs.content]
    assert [t.logprob for t in streamed] == pytest.approx([t.logprob for t in whole.logprobs.content], abs=1e-4)
    command.process.send_signal(signal.SIGINT)
    assert command.wait(120) == 130 and command.left() == []


def test_an_address_that_is_not_to_be_had_is_refused_before_a_model_is_loaded(model):
    policy = ServePolicyConfig(model=ModelConfig(path=str(model)),
                               rollout=RolloutConfig(max_prompt_tokens=8, max_response_tokens=8))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="Address already in use"):
        serve.main(ServeConfig(policy=policy, port=taken.getsockname()[1]))
    with pytest.raises(ConfigError, match=r"must be an address of this machine that is free, got '192.0.2.1' and 0: "):
        serve.main(ServeConfig(policy=policy, host="192.0.2.1", port=0))


def test_an_unmodified_client_trains_for_five_steps(run, model, tmp_path):
    """Two calls an episode, rewarded for digits: every token under the newest weights, exact, and rewards rise."""
    folder = tmp_path / "run"
    run("recipes.agent", "cluster.backend=local", f"policy.model.path={model}", "data={source: none, task_size: 10}",
        "policy.training.learning_rate=1e-2", "policy.rollout.max_prompt_tokens=32", "trainer.steps=5",
        "policy.rollout.max_response_tokens=32", "trainer.prompts_per_step=2", "algorithm.responses_per_prompt=8",
        "algorithm.old_log_probs=separate", f"trainer.run_dir={folder}", "trainer.export=false", "trainer.trackers=[]",
        "environment.name=agent", "environment.options={function: 'tests.unit.environments.agents:digits'}",
        "environment.max_turn_tokens=8")
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert row["episodes/played"] == row["episodes/rows"] == 16 and row["episodes/failed"] == 0
        assert row["episodes/turns_mean"] == 2 and row["mismatch/max_gap"] < GAP
        assert row["version/min"] == row["version/max"] == row["step"]
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 0.1
