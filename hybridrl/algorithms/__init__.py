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
    MovingBaseline,
    compute_advantages,
    distill_advantages,
    mean_return,
    reinforce_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    remax_advantages,
)
from hybridrl.algorithms.aggregation import AGGREGATIONS, aggregate, loss_weights
from hybridrl.algorithms.corrections import CORRECTIONS, Correction, correct, self_normalised
from hybridrl.algorithms.group_advantages import (
    dr_grpo_advantages,
    gdpo_advantages,
    gpg_advantages,
    grpo_advantages,
    maxrl_advantages,
    opo_advantages,
    rloo_advantages,
)
from hybridrl.algorithms.kl import KL_ESTIMATORS, AdaptiveKL, FixedKL, batch_kl, k3_capped, token_kl
from hybridrl.algorithms.losses import POLICY_LOSSES, PolicyLoss, policy_loss
from hybridrl.algorithms.masked import reject_nonfinite
from hybridrl.algorithms.reward_shaping import (
    drop_rows,
    kl_in_reward,
    overlong_penalty,
    scale_rewards,
    unscorable,
)
from hybridrl.algorithms.tables import Entry, Table, option

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "AdaptiveKL",
    "Advantages",
    "Correction",
    "Entry",
    "FixedKL",
    "MovingBaseline",
    "PolicyLoss",
    "Table",
    "aggregate",
    "batch_kl",
    "compute_advantages",
    "correct",
    "distill_advantages",
    "dr_grpo_advantages",
    "drop_rows",
    "gdpo_advantages",
    "gpg_advantages",
    "grpo_advantages",
    "k3_capped",
    "kl_in_reward",
    "loss_weights",
    "maxrl_advantages",
    "mean_return",
    "opo_advantages",
    "option",
    "overlong_penalty",
    "policy_loss",
    "reinforce_advantages",
    "reinforce_pp_advantages",
    "reinforce_pp_baseline_advantages",
    "reject_nonfinite",
    "remax_advantages",
    "rloo_advantages",
    "scale_rewards",
    "self_normalised",
    "token_kl",
    "unscorable",
]
