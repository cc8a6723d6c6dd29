"""The judge: a frozen language model on a rollout engine that is asked about each response."""

from statistics import fmean
from typing import Any

import torch
from tensordict import TensorDict

from hybridrl.batch import make_batch, num_rows, objects_of, require
from hybridrl.config import JudgeConfig
from hybridrl.dispatch import over_rows
from hybridrl.errors import ConfigError
from hybridrl.models import load_tokenizer
from hybridrl.rewards.texts import Prompt, as_text, fill, verdict_of
from hybridrl.workers.base import Worker, WorkerContext
from hybridrl.workers.rollout.engine import Completion, Request
from hybridrl.workers.rollout.frozen import frozen_engine

SHOWN_CHARS = 80
"""Of a judge's answer without a verdict, in the row's error."""


class JudgeWorker(Worker):
    """One rank of the judge.

    Args:
        context: rank, device, role.
        cfg: its folder, its question and how its answer is read.
        seed: base seed of the engine; rows carry their own.
    Raises:
        ModelError: the folder can't be used. ConfigError: it has no chat template and `cfg.chat_template` asks for it.
    """

    def __init__(self, context: WorkerContext, cfg: JudgeConfig, seed: int = 0):
        super().__init__(context)
        self.cfg, self.tokenizer = cfg, load_tokenizer(cfg)
        check_chat_template(cfg, self.tokenizer)
        self.words = {word.lower(): score for word, score in cfg.words.items()}
        self.engine = frozen_engine(cfg, cfg.rollout, self.tokenizer, self.device, seed, "reward.judge.rollout")

    def peers(self, axis: str) -> int:
        return self.cfg.rollout.tensor_parallel if axis == "rollout" else 1

    @over_rows(axis="rollout")
    def score(self, batch: TensorDict) -> TensorDict:
        """A batch of `scores` [B] float32, the mean of the row's verdicts, NaN where `score_errors` gives a reason.

        Args:
            batch: `prompt` and `response`; `answer` where the question has it; `seeds`, when the same answers are to
                come however rows are split.
        """
        questions = self._questions(batch)
        seeds = batch["seeds"].tolist() if "seeds" in batch.keys() else [None] * num_rows(batch)
        rollout, requests = self.cfg.rollout, []
        for ids, seed in zip(questions, seeds, strict=True):
            if not isinstance(ids, str):
                requests += [Request(ids, rollout.max_response_tokens, rollout.temperature, _seed(seed, i))
                             for i in range(self.cfg.samples)]
        completions = self.engine.generate(requests)
        if not self.engine.leads:
            return batch
        answers = iter(completions)
        results = [(float("nan"), ids) if isinstance(ids, str) else
                   self._verdict([next(answers) for _ in range(self.cfg.samples)]) for ids in questions]
        return make_batch(scores=torch.tensor([score for score, _ in results], dtype=torch.float32),
                          score_errors=[error for _, error in results])

    def _questions(self, batch: TensorDict) -> list[list[int] | str]:
        """Token ids of the question about each row, or why there is none."""
        names = ["prompt", "response", *(["answer"] if "{answer}" in self.cfg.prompt else [])]
        require(batch, *names)
        rows = zip(*(objects_of(batch, name) for name in names), strict=True)
        return [self._question(*row) for row in rows]

    def _question(self, prompt: Prompt, response: str, answer: Any = "") -> list[int] | str:
        if answer is None:
            return "the question asks for {answer}, and the row has none"
        return self._encoded(fill(self.cfg.prompt, prompt=as_text(prompt), response=response, answer=str(answer)))

    def _encoded(self, text: str) -> list[int] | str:
        if self.cfg.chat_template:
            try:
                text = self.tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False,
                                                          add_generation_prompt=True)
            except Exception as error:  # templates raise jinja's errors, and Python's through them
                return f"its chat template refuses the row: {error}"
        ids = self.tokenizer(text, add_special_tokens=not self.cfg.chat_template)["input_ids"]
        limit = self.cfg.rollout.max_prompt_tokens
        if 0 < len(ids) <= limit:
            return ids
        return f"the question has {len(ids)} tokens, more than reward.judge.rollout.max_prompt_tokens={limit}"

    def _verdict(self, answers: list[Completion]) -> tuple[float, str | None]:
        """Mean score of the answers that hold a verdict; NaN and the reason when none does."""
        texts = [self.tokenizer.decode(answer.token_ids, skip_special_tokens=True) for answer in answers]
        found = [verdict_of(text, self.cfg.verdict, self.words) for text in texts]
        scores = [score for score in found if score is not None]
        if scores:
            return fmean(scores), None
        return float("nan"), f"no verdict in {texts[0][-SHOWN_CHARS:]!r}"

    def close(self) -> None:
        self.engine.close()


def check_chat_template(cfg: JudgeConfig, tokenizer: Any, key: str = "reward.judge") -> None:
    """Raise ConfigError when a judge is to be asked with a chat template that its tokenizer lacks."""
    if cfg.chat_template and not tokenizer.chat_template:
        raise ConfigError(f"{key}.path={cfg.path} has no chat template; {key}.chat_template=false asks in plain text.")


def _seed(seed: int | None, sample: int) -> int | None:
    """Sampling seed of one of a row's samples."""
    return None if seed is None else (seed + sample * 0x9E3779B97F4A7C15) % 2**63
