"""Supervised fine-tuning: the negative log-likelihood of given responses."""

from collections.abc import Mapping

from torch import Tensor

from hybridrl.algorithms.aggregation import aggregate
from hybridrl.algorithms.partials import Partial, mean_of


def sft_loss(log_probs: Tensor, columns: Mapping[str, Tensor],
             entropies: Tensor | None) -> tuple[Tensor, dict[str, Partial]]:
    """Partial loss -sum(loss_weights * log_probs) of some rows, and `sft/nll`, the mean over their tokens.

    Args:
        log_probs: [b, R], carries gradient. columns: `response_mask` and `loss_weights` [b, R].
        entropies: not read.
    """
    mask = columns["response_mask"]
    return aggregate(-log_probs, columns["loss_weights"], mask), {"sft/nll": mean_of(-log_probs, mask)}
