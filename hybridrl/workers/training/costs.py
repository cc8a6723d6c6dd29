"""What a row costs to compute, from the shapes of a model: the measure by which work is cut and spread.

    FLOPs of a forward pass = per_token n + per_target r + per_pair n (n + 1) / 2

for a row that feeds n tokens and has r response tokens. A backward pass costs twice that; recomputed layers once more.
The first term is the matrix products of the decoder layers, the second the head's, which runs on response tokens only,
the third causal attention: every token with every token before it. Products are what counts: norms, activations and
the embedding are left out, and a sliding window is taken for full attention.
"""

from dataclasses import dataclass

from tensordict import TensorDict

from hybridrl.batch import lengths
from hybridrl.workers.training.models import PolicyModel


@dataclass(frozen=True, slots=True)
class Costs:
    """Coefficients of the formula above, in FLOPs."""

    per_token: float
    per_target: float
    per_pair: float

    def of(self, tokens: int, targets: int) -> float:
        """A row that feeds `tokens` and has `targets` response tokens."""
        return self.per_token * tokens + self.per_target * targets + self.per_pair * tokens * (tokens + 1) / 2

    def __call__(self, batch: TensorDict) -> list[float] | None:
        """Cost of each row; None for a batch without prompts or responses. Rows without a response cost nothing."""
        if not {"prompt_ids", "response_ids"} <= set(batch.keys()):
            return None
        prompts, responses = (lengths(batch[name]).tolist() for name in ("prompt_ids", "response_ids"))
        return [self.of(p + r - 1, r) if r else 0.0 for p, r in zip(prompts, responses, strict=True)]


def model_costs(model: PolicyModel) -> Costs:
    """Coefficients of a model: 2 FLOPs a weight and token, 4 a pair of tokens and element of a head.

    Of a mixture of experts, whose weights have the experts as their first of three dimensions, a token uses
    `num_experts_per_tok`.
    """
    config = model.causal_lm.config.get_text_config()
    layers, weights = model.layers(), 0.0
    for layer in layers:
        for weight in layer.parameters():
            used = config.num_experts_per_tok / len(weight) if weight.dim() == 3 else 1.0
            weights += weight.numel() * used if weight.dim() >= 2 else 0
    head = model.causal_lm.get_output_embeddings() or getattr(model.causal_lm, "score", None)
    targets = sum(weight.numel() for weight in head.parameters()) if head is not None else 0
    return Costs(2 * weights, 2 * targets, 4 * len(layers) * config.num_attention_heads * model.head_size)
