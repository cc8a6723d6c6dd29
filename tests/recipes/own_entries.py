"""`recipes.grpo` with an entry of its own in every table; each is one of the library's with a factor as its option.

    python -m tests.recipes.own_entries algorithm.loss.name=mine algorithm.loss.options.factor=0.5 ...
"""

import recipes.grpo
from hybridrl.algorithms import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    KEEP_MASKS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    Advantages,
    Correction,
    PolicyLoss,
    grpo_advantages,
    loss_weights,
    ppo_clip,
    token_kl,
)
from hybridrl.algorithms.corrections import token_tis


@ADVANTAGES.register("mine")
def advantage(rewards, group_ids, mask, *, factor: float = 1.0):
    return Advantages(*(factor * x for x in grpo_advantages(rewards, group_ids, mask)))


@POLICY_LOSSES.register("mine")
def loss(log_probs, old_log_probs, advantages, mask, *, factor: float = 1.0):
    result = ppo_clip(log_probs, old_log_probs, advantages, mask)
    return PolicyLoss(factor * result.loss, result.metrics)


@AGGREGATIONS.register("mine")
def aggregation(mask, *, factor: float = 1.0):
    return factor * loss_weights("token-mean", {"mask": mask})


@KL_ESTIMATORS.register("mine")
def kl(log_probs, ref_log_probs, mask, *, factor: float = 1.0):
    return factor * token_kl("k2", log_probs, ref_log_probs, mask)


def correction(old_log_probs, rollout_log_probs, mask, *, factor: float = 1.0):
    plain = token_tis(old_log_probs, rollout_log_probs, mask)
    return Correction(factor * plain.weights, plain.keep)


CORRECTIONS.register("mine", traits=("weight", "token"))(correction)


@KEEP_MASKS.register("mine", traits=("step",))
def keep(log_probs, mask, *, lowest: float = 0.0):
    return mask & (log_probs > lowest)


if __name__ == "__main__":
    recipes.grpo.main()
