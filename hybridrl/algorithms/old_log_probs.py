"""Whether the update's own first forward pass can stand for the old log-probs, so that no pass is made for them alone.

It can where a batch serves one optimizer step, because that step starts from the weights which old log-probs are
defined by; and where nothing reads them for the whole batch before the update. Losses and corrections don't: they are
local to a row, and see whole rows in the update.
"""

from hybridrl.algorithms.advantages import ADVANTAGES
from hybridrl.algorithms.aggregation import AGGREGATIONS
from hybridrl.algorithms.corrections import CORRECTIONS
from hybridrl.algorithms.losses import POLICY_LOSSES
from hybridrl.config import AlgorithmConfig


def serves_one_update(cfg: AlgorithmConfig) -> bool:
    """True where a batch makes one optimizer step and no stage before it reads `old_log_probs`.

    Readers are a KL penalty in the reward, an advantage estimator or aggregation with that column, a loss with a
    `prepare` (its statistics are of the whole mini-batch), and a correction with the trait `batch`.
    """
    return not (
        cfg.mini_batches * cfg.epochs > 1
        or (cfg.kl.coefficient > 0 and cfg.kl.place == "reward")
        or "old_log_probs" in ADVANTAGES[cfg.advantage.name].columns
        or "old_log_probs" in AGGREGATIONS[cfg.aggregation].columns
        or POLICY_LOSSES[cfg.loss.name].prepare is not None
        or any("batch" in CORRECTIONS[choice.name].traits for choice in cfg.corrections)
    )
