"""Policy loss, corrections, KL penalty and entropy bonus in one: what a policy worker needs for an update."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hybridrl.algorithms.aggregation import aggregate
from hybridrl.algorithms.corrections import CORRECTIONS, correct
from hybridrl.algorithms.diagnostics import batch_mismatch
from hybridrl.algorithms.keep_masks import KEEP_MASKS
from hybridrl.algorithms.kl import KL_ESTIMATORS, token_kl
from hybridrl.algorithms.losses import POLICY_LOSSES, anchored, policy_loss
from hybridrl.algorithms.metrics import policy_metrics
from hybridrl.algorithms.partials import Max, Partial, mean_of
from hybridrl.algorithms.tables import Entry

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Loss:
    """Turns log-probs into a partial loss; pickles, a user's own functions included.

    Called with log_probs [b, R] (carrying gradient), the padded columns of the same rows, and entropies or None.
    Where there is no column `old_log_probs`, the update starts from the weights that would have made it: the
    log-probs at hand are the old ones, and the corrections are computed from them here.
    """

    policy_loss: Entry
    options: Options
    anchor: str = "old"
    step_masks: Mapping[Entry, Options] = field(default_factory=dict)
    """Keep masks that look at the current log-probs."""
    kl: Entry | None = None
    kl_options: Options = field(default_factory=dict)
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    measures_entropy: bool = False
    corrections: Mapping[Entry, Options] = field(default_factory=dict)
    """Used where the batch brings no `correction_weights`."""
    diagnoses: bool = False
    """Whether it measures `mismatch/...`, which only a single update over the whole batch can."""
    ratio_bounds: tuple[float, float] = (0.0, 2.0)
    """Ratios whose shares below and above `mismatch/...` counts."""

    @property
    def needs_entropies(self) -> bool:
        """Whether entropies must be computed for it."""
        return self.measures_entropy or self.entropy_coefficient > 0

    def __call__(self, log_probs: Tensor, columns: Mapping[str, Tensor],
                 entropies: Tensor | None) -> tuple[Tensor, dict[str, Partial]]:
        """The partial loss (0-d) of some rows of a mini-batch and its metrics as sums and counts."""
        self._adopt()
        mask, reused = columns["response_mask"], "old_log_probs" not in columns
        columns = {"old_log_probs": log_probs.detach(), **columns, "mask": mask, "log_probs": log_probs}
        if self.corrections and "correction_weights" not in columns:
            chosen = {entry.name: options for entry, options in self.corrections.items()}
            columns["correction_weights"] = correct(chosen, columns).weights.float()
        masks = {entry.name: options for entry, options in self.step_masks.items()}
        result = policy_loss(self.policy_loss.name, columns, self.options, anchor=self.anchor, step_masks=masks)
        moved = policy_metrics(log_probs.detach(), anchored(columns, self.anchor)["old_log_probs"], mask,
                               ref_log_probs=columns.get("ref_log_probs"),
                               entropies=columns.get("entropies") if entropies is None else entropies)
        metrics: dict[str, Partial] = {f"policy/{name}": value for name, value in (result.metrics | moved).items()}
        metrics["old_log_probs_reused"] = Max(float(reused))
        if self.diagnoses and "rollout_log_probs" in columns:
            metrics |= batch_mismatch(columns, self.ratio_bounds)
        loss = aggregate(result.loss, columns["loss_weights"], mask)
        if self.kl is not None:
            kl = token_kl(self.kl.name, log_probs, columns["ref_log_probs"], mask, columns["old_log_probs"],
                          self.kl_options)
            loss = loss + self.kl_coefficient * aggregate(kl, columns["loss_weights"], mask)
            metrics["policy/kl_loss"] = mean_of(kl.detach(), mask)
        if entropies is not None and self.entropy_coefficient > 0:
            loss = loss - self.entropy_coefficient * aggregate(entropies, columns["loss_weights"], mask)
        return loss, metrics

    def _adopt(self) -> None:
        """Make the tables of this process know what a user's recipe registered in another one."""
        POLICY_LOSSES.adopt(self.policy_loss)
        for table, entries in ((CORRECTIONS, self.corrections), (KEEP_MASKS, self.step_masks)):
            for entry in entries:
                table.adopt(entry)
        if self.kl is not None:
            KL_ESTIMATORS.adopt(self.kl)
