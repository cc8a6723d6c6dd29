"""Tiny models, and commands that leave no process behind."""

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.models import tiny_model
from tests.recipes.command import Command, write_jsonl


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A tiny model folder; don't write into it."""
    return tiny_model(tmp_path_factory.mktemp("model"), "llama_tied", initializer_range=0.1)


@pytest.fixture(scope="session")
def sums(tmp_path_factory) -> Path:
    """Ten problems, `0+1=` to `9+10=`."""
    rows = [{"prompt": f"{i}+{i + 1}=", "answer": str(2 * i + 1)} for i in range(10)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "sums.jsonl", rows)


@pytest.fixture(scope="session")
def doubles(tmp_path_factory) -> Path:
    """Six held-out problems, `0+0=` to `5+5=`."""
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(6)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "doubles.jsonl", rows)


@pytest.fixture(scope="session")
def grpo(model, sums) -> list[str]:
    """Options of a small GRPO run on one local rank: 4 prompts x 4 responses x up to 12 tokens."""
    return ["recipes.grpo", "cluster.backend=local", f"policy.model.path={model}", f"data.path={sums}",
            "reward.functions=[{name:'tests.recipes.reward_functions:digits'}]", "reward.workers=1",
            "policy.training.learning_rate=1e-3", "policy.rollout.max_prompt_tokens=32",
            "policy.rollout.max_response_tokens=12", "trainer.steps=2", "trainer.prompts_per_step=4",
            "algorithm.responses_per_prompt=4"]


@pytest.fixture
def refusal(capsys, monkeypatch) -> Callable[[list[str]], tuple[int, list[str]]]:
    """`refusal(words)`: exit code and lines on stderr of a command that fails before it starts an engine."""
    def command(words: list[str]) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as stopped:
            importlib.import_module(words[0]).main()
        return stopped.value.code, capsys.readouterr().err.splitlines()

    return command


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Iterator[Callable[..., Command]]:
    """`start(*words, ...)`: a started `Command`. What still runs when the module ends is killed."""
    folder, numbers, started = tmp_path_factory.mktemp("output"), itertools.count(), []

    def begin(*words: str, **options) -> Command:
        started.append(Command(list(words), folder / str(next(numbers)), **options))
        return started[-1]

    yield begin
    for command in started:
        command.kill()


@pytest.fixture(scope="module")
def run(start) -> Callable[..., Command]:
    """`run(*words, code=0)`: a finished `Command`; it must have ended with `code` and left no process."""
    def finish(*words: str, code: int = 0, **options) -> Command:
        command = start(*words, **options)
        found = command.wait()
        assert found == code, f"exit code {found}:\n{command.out}\n{command.err}"
        assert command.left() == []
        return command

    return finish
