"""The teacher: a frozen model with the policy's vocabulary, which says how likely it finds each sampled token."""

import math

import torch
from tensordict import TensorDict
from torch import Tensor

from hybridrl.batch import from_lengths, lengths, put
from hybridrl.config import DistillOptionsConfig, ModelConfig, TeacherConfig, TrainingConfig, check
from hybridrl.dispatch import RowCosts, over_rows
from hybridrl.models import check_same_vocabulary, load_tokenizer, vocabulary_of
from hybridrl.workers.base import Worker, WorkerContext
from hybridrl.workers.training.engine import TrainingEngine
from hybridrl.workers.training.frozen import TeacherModel


class TeacherWorker(Worker):
    """One rank of the teacher.

    Args:
        context: rank, device, role.
        cfg: its folder and its batching.
        options: its temperature, and how many of its likeliest tokens are wanted.
        policy: the model that learns from it.
    Raises:
        ModelError: the folder can't be used, or its tokenizer has another vocabulary than the policy's. ConfigError:
            more likeliest tokens than there are.
    """

    def __init__(self, context: WorkerContext, cfg: TeacherConfig, options: DistillOptionsConfig, policy: ModelConfig):
        super().__init__(context)
        check_same_vocabulary(load_tokenizer(policy), load_tokenizer(cfg.model))
        engine = TrainingConfig(micro_batch_tokens=cfg.micro_batch_tokens, offload=cfg.offload,
                                logits_chunk_tokens=cfg.logits_chunk_tokens)
        self.training = TrainingEngine(cfg.model, engine, self.device, trainable=False, module=TeacherModel)
        self.temperature, self.vocabulary = options.teacher_temperature, vocabulary_of(cfg.model)
        self.top_k = options.top_k if options.loss == "top_k" else 0
        shared = check_top_k(self.top_k, cfg.model, policy)
        self.training.model.top_k, self.training.model.vocabulary = self.top_k, shared
        self.training.offload()

    def costs(self, axis: str) -> RowCosts | None:
        return self.training.costs

    @over_rows()
    def log_probs(self, batch: TensorDict) -> TensorDict:
        """The batch with `teacher_log_probs`, and with `distill.loss=top_k` also `teacher_top_ids` and
        `teacher_top_log_probs`, of the states before its response tokens; a token beyond the teacher's head has -inf.
        """
        self.training.onload()
        sizes, ids = lengths(batch["response_ids"]), batch["response_ids"].values()
        known = ids < self.vocabulary
        score = self.training.top_log_probs if self.top_k else self.training.log_probs
        found = score(_with_ids(batch, torch.where(known, ids, 0), sizes), self.temperature)
        self.training.offload()
        log_probs = torch.where(known, found["log_probs"].values(), -math.inf)
        put(batch, "teacher_log_probs", from_lengths(log_probs, sizes))
        if self.top_k:
            put(batch, "teacher_top_ids", found["top_ids"])
            put(batch, "teacher_top_log_probs", found["top_log_probs"])
        return batch


def check_top_k(top_k: int, teacher: ModelConfig, policy: ModelConfig) -> int:
    """Token ids that both models know. Raises ConfigError unless they are `top_k` at least."""
    # Heads may be padded to different sizes beyond the tokens that both tokenizers know.
    shared = min(vocabulary_of(teacher), vocabulary_of(policy))
    check(top_k <= shared, "distill.top_k", top_k, f"at most the {shared} tokens of the vocabulary")
    return shared


def _with_ids(batch: TensorDict, ids: Tensor, sizes: Tensor) -> TensorDict:
    """The prompts of a batch with other response tokens."""
    part = TensorDict({}, batch_size=batch.batch_size)
    part.set("prompt_ids", batch.get("prompt_ids"))
    part.set("response_ids", from_lengths(ids, sizes))
    return part
