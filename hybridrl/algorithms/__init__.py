"""Every estimator, loss, penalty and correction, as pure functions of padded tensors.

B rows are responses, R columns response tokens; `mask` [B, R] is true on tokens the policy sampled and may
train on. Nothing here knows about configs, workers or Ray.

    adv = grpo_advantages(rewards, group_ids, mask)              # ADVANTAGES: on the whole batch
    fix = correct({"token_tis": {"hi": 2.0}}, columns)           # CORRECTIONS: on the whole batch
    c = loss_weights("token-mean", {"mask": mask})               # AGGREGATIONS: on the whole mini-batch
    out = policy_loss("ppo_clip", columns, {"clip_high": 0.28})  # POLICY_LOSSES: on any piece of it
    aggregate(out.loss, c, mask).backward()                      # pieces add up: no other normalisation

Masked positions may hold anything, NaN included. Outputs are zero there.
"""

from hybridrl.algorithms.advantages import (
    ADVANTAGES,
    Advantages,
    compute_advantages,
    distill_advantages,
    remax_advantages,
)
from hybridrl.algorithms.aggregation import AGGREGATIONS, aggregate, loss_weights
from hybridrl.algorithms.corrections import CORRECTIONS, Correction, correct, self_normalised
from hybridrl.algorithms.covariance_losses import clip_cov, kl_cov, token_covariance
from hybridrl.algorithms.diagnostics import mismatch_metrics
from hybridrl.algorithms.distillation import top_k_reverse_kl
from hybridrl.algorithms.dynamic_sampling import GroupAccumulator, informative_rows
from hybridrl.algorithms.entropy import AdaptiveEntropy, FixedEntropy, token_entropy
from hybridrl.algorithms.evaluation import avg_at_k, bootstrap_interval, maj_at_k, pass_at_k
from hybridrl.algorithms.gae import gae_advantages
from hybridrl.algorithms.group_advantages import (
    dr_grpo_advantages,
    gdpo_advantages,
    gpg_advantages,
    grpo_advantages,
    maxrl_advantages,
    opo_advantages,
    rloo_advantages,
)
from hybridrl.algorithms.keep_masks import KEEP_MASKS, high_entropy_mask, off_policy_sequence_mask, second_moment_mask
from hybridrl.algorithms.kl import KL_ESTIMATORS, AdaptiveKL, FixedKL, batch_kl, k3_capped, token_kl
from hybridrl.algorithms.losses import POLICY_LOSSES, PolicyLoss, policy_gradient, policy_loss, ppo_clip
from hybridrl.algorithms.masked import log_ratio, reject_nonfinite, whiten
from hybridrl.algorithms.max_at_k import max_at_k_advantages
from hybridrl.algorithms.metrics import (
    advantage_metrics,
    group_metrics,
    length_metrics,
    pass_at_k_metrics,
    policy_metrics,
    reward_metrics,
    staleness_metrics,
)
from hybridrl.algorithms.moving_baselines import AgentBaselines, MovingBaseline, mean_return
from hybridrl.algorithms.optimal_baseline import optimal_token_baseline_advantages
from hybridrl.algorithms.partials import Max, Mean, Min, Moments, finalize, merge, total
from hybridrl.algorithms.pass_k_advantages import pass_at_k_advantages, pass_at_k_marginal_advantages
from hybridrl.algorithms.reinforce import (
    reinforce_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
)
from hybridrl.algorithms.returns import fold_rewards, place_outcome, reward_to_go, row_scores
from hybridrl.algorithms.reward_shaping import drop_rows, kl_in_reward, overlong_penalty, scale_rewards, unscorable
from hybridrl.algorithms.sequence_losses import gmpo, gspo, sequence_clip
from hybridrl.algorithms.staleness import approximate_old_log_probs, free_slots, resumed_accepted, stale_rows
from hybridrl.algorithms.tables import Entry, Table, option
from hybridrl.algorithms.turn_level import turn_ids, turn_level_advantages
from hybridrl.algorithms.values import ValueLoss, explained_variance, value_loss
from hybridrl.algorithms.weighted_losses import aipo, cispo, decoupled_ppo, dppo, sapo

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "AdaptiveEntropy",
    "AdaptiveKL",
    "Advantages",
    "AgentBaselines",
    "CORRECTIONS",
    "Correction",
    "Entry",
    "FixedEntropy",
    "FixedKL",
    "GroupAccumulator",
    "KEEP_MASKS",
    "KL_ESTIMATORS",
    "Max",
    "Mean",
    "Min",
    "Moments",
    "MovingBaseline",
    "POLICY_LOSSES",
    "PolicyLoss",
    "Table",
    "ValueLoss",
    "advantage_metrics",
    "aggregate",
    "aipo",
    "approximate_old_log_probs",
    "avg_at_k",
    "batch_kl",
    "bootstrap_interval",
    "cispo",
    "clip_cov",
    "compute_advantages",
    "correct",
    "decoupled_ppo",
    "distill_advantages",
    "dppo",
    "dr_grpo_advantages",
    "drop_rows",
    "explained_variance",
    "finalize",
    "fold_rewards",
    "free_slots",
    "gae_advantages",
    "gdpo_advantages",
    "gmpo",
    "gpg_advantages",
    "group_metrics",
    "grpo_advantages",
    "gspo",
    "high_entropy_mask",
    "informative_rows",
    "k3_capped",
    "kl_cov",
    "kl_in_reward",
    "length_metrics",
    "log_ratio",
    "loss_weights",
    "maj_at_k",
    "max_at_k_advantages",
    "maxrl_advantages",
    "mean_return",
    "merge",
    "mismatch_metrics",
    "off_policy_sequence_mask",
    "opo_advantages",
    "optimal_token_baseline_advantages",
    "option",
    "overlong_penalty",
    "pass_at_k",
    "pass_at_k_advantages",
    "pass_at_k_marginal_advantages",
    "pass_at_k_metrics",
    "place_outcome",
    "policy_gradient",
    "policy_loss",
    "policy_metrics",
    "ppo_clip",
    "reinforce_advantages",
    "reinforce_pp_advantages",
    "reinforce_pp_baseline_advantages",
    "reject_nonfinite",
    "remax_advantages",
    "resumed_accepted",
    "reward_metrics",
    "reward_to_go",
    "rloo_advantages",
    "row_scores",
    "sapo",
    "scale_rewards",
    "second_moment_mask",
    "self_normalised",
    "sequence_clip",
    "stale_rows",
    "staleness_metrics",
    "token_covariance",
    "token_entropy",
    "token_kl",
    "top_k_reverse_kl",
    "total",
    "turn_ids",
    "turn_level_advantages",
    "unscorable",
    "value_loss",
    "whiten",
]
