"""Whether the update's own first forward pass can stand for the old log-probs, so that no pass is made for them alone.

It can where a batch serves one optimizer step, because that step starts from the weights which old log-probs are
defined by; and where nothing reads them for the whole batch before the update. Losses and corrections don't: they are
local to a row, and see whole rows in the update.
"""

from hybridrl.algorithms.advantages import ADVANTAGES
from hybridrl.algorithms.aggregation import AGGREGATIONS
from hybridrl.algorithms.corrections import CORRECTIONS
from hybridrl.algorithms.keep_masks import KEEP_MASKS
from hybridrl.algorithms.losses import POLICY_LOSSES
from hybridrl.config import AlgorithmConfig


def serves_one_update(cfg: AlgorithmConfig) -> bool:
    """True where a batch makes one optimizer step and no stage before it reads `old_log_probs`, or `entropies`.

    Readers are a KL penalty in the reward, a steered KL or entropy coefficient, an advantage estimator or aggregation
    with such a column, a loss with a `prepare` (its statistics are of the whole mini-batch), a keep mask that is such a
    statistic, a correction with the trait `batch`, and self-normalised weights.
    """
    written = {"old_log_probs", "entropies", "sum_squared_probs"}
    return not (
        cfg.mini_batches * cfg.epochs > 1
        or (cfg.kl.coefficient > 0 and cfg.kl.place == "reward")
        or cfg.kl.target > 0
        or cfg.entropy.target > 0
        or written & ADVANTAGES[cfg.advantage.name].columns.keys()
        or written & AGGREGATIONS[cfg.aggregation].columns.keys()
        or POLICY_LOSSES[cfg.loss.name].prepare is not None
        or any("step" not in KEEP_MASKS[choice.name].traits for choice in cfg.keep_masks)
        or any("batch" in CORRECTIONS[choice.name].traits for choice in cfg.corrections)
        or cfg.self_normalise
    )
