"""The reward model: a sequence classifier that scores prompt and response, frozen, on the training engine."""

import math
from typing import Any

import torch
from tensordict import TensorDict

from hybridrl.batch import make_batch, num_rows, objects_of, require, rows_of
from hybridrl.config import ModelConfig, RewardModelConfig, TrainingConfig
from hybridrl.dispatch import over_rows
from hybridrl.errors import ConfigError
from hybridrl.models import load_tokenizer, same_tokenizer
from hybridrl.rewards.texts import Prompt, as_messages, as_text, fill
from hybridrl.workers.base import Worker, WorkerContext
from hybridrl.workers.training.engine import TrainingEngine
from hybridrl.workers.training.frozen import ClassifierModel


class RewardModelWorker(Worker):
    """One rank of the reward model.

    Args:
        context: rank, device, role.
        cfg: its folder, what it reads, its batching.
        policy: the model whose responses it scores.
    Raises:
        ModelError: the folder is none of a sequence classifier with one label. ConfigError: its tokenizer can't give
            it what `cfg.template` asks for.
    """

    def __init__(self, context: WorkerContext, cfg: RewardModelConfig, policy: ModelConfig):
        super().__init__(context)
        self.cfg, self.tokenizer = cfg, load_tokenizer(cfg)
        self.template = chosen_template(cfg, self.tokenizer, load_tokenizer(policy))
        engine = TrainingConfig(micro_batch_tokens=cfg.micro_batch_tokens, offload=cfg.offload)
        self.training = TrainingEngine(cfg, engine, self.device, trainable=False, module=ClassifierModel)
        self.padding = self.training.model.causal_lm.config.pad_token_id
        self.training.offload()

    @over_rows()
    def score(self, batch: TensorDict) -> TensorDict:
        """A batch of `scores` [B] float32, scaled and clipped, NaN where `score_errors` gives a reason.

        s = clip(scale * classifier(text) + bias, -clip, clip); the classifier reads the text's last token.

        Args:
            batch: `prompt` and `response`; for `template=tokens` `prompt_ids` and `response_ids`.
        """
        rows = self._texts(batch)
        errors = [row if isinstance(row, str) else None for row in rows]
        texts = [row for row in rows if not isinstance(row, str)]
        self.training.onload()
        # The state before a token that follows the text is that of the whole text.
        found = self.training.values(make_batch(prompt_ids=texts, response_ids=[[0]] * len(texts))).values()
        self.training.offload()
        found = self.cfg.scale * found.float() + self.cfg.bias
        if self.cfg.clip:
            found = found.clamp(-self.cfg.clip, self.cfg.clip)
        scores = torch.full((num_rows(batch),), math.nan)
        scored = torch.tensor([error is None for error in errors], dtype=torch.bool)
        scores[scored] = found
        for row in (scored & ~scores.isfinite()).nonzero()[:, 0].tolist():
            errors[row], scores[row] = f"the reward model gave {scores[row]}", math.nan
        return make_batch(scores=scores, score_errors=errors)

    def _texts(self, batch: TensorDict) -> list[list[int] | str]:
        """Token ids of each row's text, or why it has none."""
        if self.template == "tokens":
            require(batch, "prompt_ids", "response_ids")
            pairs = zip(rows_of(batch["prompt_ids"]), rows_of(batch["response_ids"]), strict=True)
            return [self._fitted([*prompt.tolist(), *response.tolist()]) for prompt, response in pairs]
        require(batch, "prompt", "response")
        rows = zip(objects_of(batch, "prompt"), objects_of(batch, "response"), strict=True)
        return [self._rendered(prompt, response) for prompt, response in rows]

    def _rendered(self, prompt: Prompt, response: str) -> list[int] | str:
        if self.template == "chat":
            messages = [*as_messages(prompt), {"role": "assistant", "content": response}]
            try:
                text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            except Exception as error:  # templates raise jinja's errors, and Python's through them
                return f"its chat template refuses the row: {error}"
        else:
            text = fill(self.template, prompt=as_text(prompt), response=response)
        return self._fitted(self.tokenizer(text, add_special_tokens=self.template != "chat")["input_ids"])

    def _fitted(self, ids: list[int]) -> list[int] | str:
        """The ids without padding at their end, which transformers' classifiers pass over, and within the limit."""
        while len(ids) > 1 and ids[-1] == self.padding:
            ids.pop()
        if not ids:
            return "the text has no tokens"
        if len(ids) <= self.cfg.max_tokens:
            return ids
        if self.cfg.too_long == "cut":
            return ids[-self.cfg.max_tokens:]
        return f"the text has {len(ids)} tokens, more than reward.model.max_tokens={self.cfg.max_tokens}"


def chosen_template(cfg: RewardModelConfig, tokenizer: Any, policy_tokenizer: Any,
                    key: str = "reward.model") -> str:
    """What the model reads: `tokens`, `chat` or a text with placeholders.

    Raises ConfigError when its tokenizer can't do what `cfg.template` asks for.
    """
    same = same_tokenizer(tokenizer, policy_tokenizer)
    if not cfg.template:
        return "tokens" if same else "chat" if tokenizer.chat_template else "{prompt}{response}"
    if cfg.template == "tokens" and not same:
        raise ConfigError(f"{key}.template=tokens needs the policy's tokenizer; that of {cfg.path} is another "
                          f"one than that of {policy_tokenizer.name_or_path}.")
    if cfg.template == "chat" and not tokenizer.chat_template:
        raise ConfigError(f"{key}.template=chat needs a chat template, which {cfg.path} lacks.")
    return cfg.template
