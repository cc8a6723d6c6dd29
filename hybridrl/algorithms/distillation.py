"""On-policy distillation: the divergence from a teacher, over its likeliest tokens, as a loss of its own.

The other form, the teacher's opinion of the sampled token alone, is the advantage `distill` (advantages.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict
from torch import Tensor

from hybridrl.algorithms.advantages import ADVANTAGES
from hybridrl.algorithms.aggregation import aggregate
from hybridrl.algorithms.combined_loss import Loss
from hybridrl.algorithms.losses import PolicyLoss
from hybridrl.algorithms.masked import at_least_float32, count_true
from hybridrl.algorithms.partials import Mean, Partial, finalize, mean_of
from hybridrl.batch import padded
from hybridrl.config import DistillOptionsConfig
from hybridrl.errors import BatchError, ConfigError

if TYPE_CHECKING:
    from hybridrl.algorithms.algorithm import Algorithm

LARGEST_MASS = 1 - 1e-6
"""Of the likeliest tokens: the rest is kept away from 0, where its logarithm ends. float32 is about this fine."""

TEACHER_COLUMNS = {"sampled": ["teacher_log_probs"],
                   "top_k": ["teacher_log_probs", "teacher_top_ids", "teacher_top_log_probs"]}
"""What the teacher writes, by `distill.loss`."""


def top_k_reverse_kl(log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor) -> PolicyLoss:
    """KL(policy || teacher) of each token's distribution over K tokens and all others as one.

    L = sum_k p_k (log p_k - log q_k) + p_0 (log p_0 - log q_0),  p_0 = 1 - sum_k p_k,  q_0 = 1 - sum_k q_k

    A lower bound of the divergence over the whole vocabulary, and equal to it when the K tokens are the vocabulary.
    Tokens that are masked or have a log-prob that is not finite have no loss.

    Args:
        log_probs: [B, R, K] float, of the policy at the K tokens, carries gradient.
        teacher_log_probs: [B, R, K] float, of the teacher at the same tokens. mask: [B, R] bool.
    Returns:
        PolicyLoss [B, R] with metrics top_k_kl, top_k_mass (sum_k p_k) and nonfinite_frac.
    Raises:
        BatchError: shapes or the mask's dtype don't fit.
    Source: reverse KL on the policy's own samples, arXiv:2306.08543, arXiv:2306.13649.
    """
    if mask.dtype != torch.bool or log_probs.shape != teacher_log_probs.shape or log_probs.shape[:-1] != mask.shape:
        raise BatchError(
            f"log_probs and teacher_log_probs must be [B, R, K] and mask [B, R] of bool, got {tuple(log_probs.shape)}, "
            f"{tuple(teacher_log_probs.shape)} and {tuple(mask.shape)} of {mask.dtype}.")
    policy, teacher = at_least_float32(log_probs), at_least_float32(teacher_log_probs.detach())
    usable = mask & policy.isfinite().all(-1) & teacher.isfinite().all(-1)
    # In the place of what is masked: any distribution, the same for both.
    policy, teacher = (torch.where(usable[..., None], x, -20.0) for x in (policy, teacher))
    rest, teacher_rest = _log_rest(policy), _log_rest(teacher)
    kl = (policy.exp() * (policy - teacher)).sum(-1) + rest.exp() * (rest - teacher_rest)
    loss = torch.where(usable, kl, 0.0)
    return PolicyLoss(loss, {
        "top_k_kl": mean_of(loss.detach(), mask), "top_k_mass": mean_of(policy.detach().exp().sum(-1), usable),
        "nonfinite_frac": Mean(count_true(mask) - count_true(usable), count_true(mask))})


def _log_rest(log_probs: Tensor) -> Tensor:
    """log(1 - sum exp) over the last dimension, no less than log(1 - LARGEST_MASS)."""
    return torch.log1p(-log_probs.exp().sum(-1).clamp(max=LARGEST_MASS))


@dataclass(frozen=True)
class DistillationLoss:
    """What a policy worker needs to learn from a teacher's likeliest tokens, beside the loss of the rewards.

    The columns `teacher_top_ids` and `teacher_top_log_probs` are what the teacher wrote.
    """

    policy: Loss
    weight: float = 1.0
    """Of the divergence, beside the policy loss."""
    candidates = "teacher_top_ids"
    """The column of tokens whose log-probs the update computes."""

    @property
    def needs_entropies(self) -> bool:
        """As of the policy loss."""
        return self.policy.needs_entropies

    def __call__(self, log_probs: Tensor, columns: Mapping[str, Tensor],
                 entropies: Tensor | None) -> tuple[Tensor, dict[str, Partial]]:
        """The partial loss (0-d) of some rows of a mini-batch and its metrics as sums and counts."""
        loss, metrics = self.policy(log_probs, columns, entropies)
        mask = columns["response_mask"]
        kl = top_k_reverse_kl(columns["candidate_log_probs"], columns["teacher_top_log_probs"], mask)
        loss = loss + self.weight * aggregate(kl.loss, columns["loss_weights"], mask)
        return loss, metrics | {f"distill/{name}": value for name, value in kl.metrics.items()}


def check_distillation(cfg: DistillOptionsConfig, algorithm: "Algorithm", rewards: Sequence[str]) -> None:
    """Raise ConfigError for an advantage that does not read the teacher where nothing else does, or reads what is not
    there: rewards without a part (`rewards` names them), a reference."""
    name, options = algorithm.cfg.advantage.name, algorithm.advantage_options
    key, reads = "algorithm.advantage.name", ADVANTAGES[name].columns
    if cfg.loss == "sampled" and "teacher_log_probs" not in reads:
        raise ConfigError(f"{key} must be distill with distill.loss=sampled, got {name!r}, which does not read the "
                          "teacher; distill.loss=top_k goes with any.")
    if not rewards and (options.get("reward_coef") if "teacher_log_probs" in reads else "rewards" in reads):
        raise ConfigError(f"{key}={name} reads rewards, which need an entry of reward.functions, reward.model.path or "
                          "reward.judge.path.")
    if algorithm.needs_reference or algorithm.needs_greedy:
        raise ConfigError(f"{key}={name} with algorithm.kl.coefficient={algorithm.cfg.kl.coefficient:g} needs a "
                          "reference or greedy responses, which distillation does not make: the teacher is its anchor.")


def rewards_alone(batch: TensorDict) -> TensorDict:
    """The batch for an advantage without the teacher's part: with a teacher that agrees with the policy everywhere."""
    agreed = batch.copy()
    agreed["teacher_log_probs"] = batch["old_log_probs"]
    return agreed


def distillation_metrics(batch: TensorDict) -> dict[str, float]:
    """`distill/kl`: mean of old_log_probs - teacher_log_probs over sampled tokens, the reverse KL before the update."""
    mask, old, teacher = (padded(batch[name]) for name in ("response_mask", "old_log_probs", "teacher_log_probs"))
    gap = (old - teacher).nan_to_num(nan=0.0, posinf=20.0, neginf=-20.0)
    return {f"distill/{name}": value for name, value in finalize({"kl": mean_of(gap, mask)}).items()}
