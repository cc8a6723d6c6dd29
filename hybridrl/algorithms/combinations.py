"""Combinations of choices that can't work, found before any model is loaded."""

from collections.abc import Mapping
from typing import Any

from hybridrl.algorithms.advantages import ADVANTAGES
from hybridrl.algorithms.aggregation import AGGREGATIONS
from hybridrl.algorithms.corrections import CORRECTIONS
from hybridrl.algorithms.kl import KL_ESTIMATORS
from hybridrl.algorithms.losses import POLICY_LOSSES
from hybridrl.errors import ConfigError, unknown


def check_combination(
    *,
    advantage: str,
    loss: str,
    advantage_options: Any = None,
    loss_options: Any = None,
    aggregation: str | None = None,
    corrections: Mapping[str, Any] | None = None,
    kl_estimator: str | None = None,
    anchor: str = "old",
    num_responses: int,
    has_critic: bool = False,
) -> None:
    """Check names, options and their combination.

    Args:
        advantage, loss, aggregation, kl_estimator: names in their tables. corrections: name -> options.
        anchor: "old" or "rollout", what the loss measures ratios from (see `policy_loss`).
        num_responses: responses per prompt. has_critic: the recipe trains a critic.
    Raises:
        ConfigError: an unknown name or option, a value out of range (dual clip below its bound), a
            behaviour-anchored ratio together with a behaviour weight, two weights, a group estimator with one
            response per prompt, k above the group size, an estimator that needs a critic without one, a critic
            that the estimator does not read.
    """
    options = ADVANTAGES.options(advantage, advantage_options)
    POLICY_LOSSES.options(loss, loss_options)
    if aggregation is not None:
        AGGREGATIONS[aggregation]
    if kl_estimator is not None:
        KL_ESTIMATORS[kl_estimator]
    if anchor not in ("old", "rollout"):
        raise ConfigError(unknown("anchor", anchor, ("old", "rollout")))
    _check_corrections(loss, anchor, corrections or {})
    _check_groups(advantage, options, num_responses)
    _check_critic(advantage, has_critic)


def _check_critic(advantage: str, has_critic: bool) -> None:
    readers = {name for name in ADVANTAGES if "values" in ADVANTAGES[name].columns}
    needing = {name for name in readers if ADVANTAGES[name].columns["values"]}
    accepted = readers if has_critic else set(ADVANTAGES) - needing
    if advantage not in accepted:
        what = "does not read the critic that this recipe trains" if has_critic else (
            "needs a critic, which this recipe does not train")
        raise ConfigError(f"advantage {advantage!r} {what}; accepted: {', '.join(sorted(accepted))}.")


def _check_corrections(loss: str, anchor: str, corrections: Mapping[str, Any]) -> None:
    for name, options in corrections.items():
        built = CORRECTIONS.options(name, options)
        lo, hi = getattr(built, "lo", None), getattr(built, "hi", None)
        if lo is not None and hi is not None and lo > hi:
            raise ConfigError(f"correction {name!r}: lo must be at most hi = {hi:g}, got {lo:g}.")
    weighing = [name for name in corrections if "weight" in CORRECTIONS[name].traits]
    if len(weighing) > 1:
        raise ConfigError(f"at most one correction may carry a weight, got {weighing}; combine it with masks.")
    traits = POLICY_LOSSES[loss].traits
    if "behaviour_weight" in traits and anchor == "rollout":
        raise ConfigError(
            f"anchor must be 'old' with loss {loss!r}, whose behaviour weight already corrects; got 'rollout'."
        )
    if weighing and ("behaviour_anchored" in traits or anchor == "rollout"):
        masks = ", ".join(sorted(name for name in CORRECTIONS if "weight" not in CORRECTIONS[name].traits))
        what = f"loss {loss!r}" if "behaviour_anchored" in traits else "anchor 'rollout'"
        raise ConfigError(
            f"correction {weighing[0]!r} weighs by the behaviour policy, and {what} already measures its ratio "
            f"from it: the correction would count twice. Accepted with it: none, or {masks}."
        )


def _check_groups(advantage: str, options: Any, num_responses: int) -> None:
    if num_responses < 1:
        raise ConfigError(f"num_responses must be at least 1, got {num_responses}.")
    traits = ADVANTAGES[advantage].traits
    needs_group = "groups" in traits or getattr(options, "baseline", None) == "group"
    if needs_group and num_responses < 2 and getattr(options, "singleton", "zero") != "raw":
        raise ConfigError(
            f"num_responses must be at least 2 with advantage {advantage!r}, which compares responses to the "
            f"same prompt; got {num_responses}."
        )
    k = getattr(options, "k", None)
    if "k" in traits and k is not None and k > num_responses:
        raise ConfigError(f"k must be at most num_responses = {num_responses}, got {k}.")
