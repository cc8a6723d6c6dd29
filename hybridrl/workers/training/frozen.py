"""What frozen models return beside log-probs: a teacher's likeliest tokens, a classifier's score."""

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from hybridrl.errors import ModelError
from hybridrl.workers.training.log_probs import top_log_probs
from hybridrl.workers.training.models import PolicyModel


class TeacherModel(PolicyModel):
    """Log-probs of the response tokens, and of the teacher's likeliest tokens in their places."""

    top_k = 0
    """Likeliest tokens returned."""
    vocabulary: int | None = None
    """They are among the first so many token ids; None: any."""

    def outputs(self, hidden: Tensor, targets: Tensor, temperature: float, chunk: int,
                entropies: bool) -> tuple[Tensor | None, ...]:
        """Log-probs [N], and with `top_k` the largest ones [N, k] and their token ids [N, k]."""
        head = self.causal_lm.get_output_embeddings()
        return top_log_probs(hidden, head.weight, head.bias, targets, temperature, chunk, self.top_k, self.vocabulary)


class ClassifierModel(PolicyModel):
    """One score for the text that ends at each predictor: a sequence classifier of one label.

    Raises:
        ModelError: the head is no linear layer `score` with one output.
    """

    loads = AutoModelForSequenceClassification

    def __init__(self, causal_lm: PreTrainedModel, stored_dtype: torch.dtype):
        super().__init__(causal_lm, stored_dtype)
        head = getattr(causal_lm, "score", None)
        if not isinstance(head, nn.Linear) or head.out_features != 1:
            raise ModelError(f"{type(causal_lm).__name__} has no linear layer `score` with one output: reward models "
                             "are causal language models with such a head (LlamaForSequenceClassification, ...).")

    def outputs(self, hidden: Tensor, targets: Tensor, temperature: float, chunk: int,
                entropies: bool) -> tuple[Tensor | None, ...]:
        """The score [N], float32 or better; `targets` is not read."""
        head = self.causal_lm.score
        wide = torch.promote_types(hidden.dtype, torch.float32)
        bias = 0 if head.bias is None else head.bias.to(wide)
        return hidden.to(wide) @ head.weight[0].to(wide) + bias, None
