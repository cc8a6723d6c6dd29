"""Choices that can't work, alone or together, found before any model is loaded."""

from collections.abc import Sequence
from typing import Any

from hybridrl.algorithms.advantages import ADVANTAGES
from hybridrl.algorithms.aggregation import AGGREGATIONS
from hybridrl.algorithms.corrections import CORRECTIONS
from hybridrl.algorithms.keep_masks import KEEP_MASKS
from hybridrl.algorithms.kl import KL_ESTIMATORS
from hybridrl.algorithms.losses import POLICY_LOSSES
from hybridrl.algorithms.tables import Table
from hybridrl.config import AlgorithmConfig, Choice
from hybridrl.errors import ConfigError


def check_combination(cfg: AlgorithmConfig, has_critic: bool = False) -> None:
    """Check names, options and their combination; `has_critic`: the recipe trains a critic.

    Raises:
        ConfigError: an unknown name or option; a value out of range (dual clip below its bound); a behaviour-anchored
            ratio together with a behaviour weight; two weights; a group estimator with one response per prompt; k above
            the group size; a penalty that is counted twice, or that the estimator does not read; an estimator that
            needs a critic without one, a critic that the estimator does not read.
    """
    try:
        advantage = ADVANTAGES.options(cfg.advantage.name, cfg.advantage.options)
        POLICY_LOSSES.options(cfg.loss.name, cfg.loss.options)
        AGGREGATIONS.options(cfg.aggregation, cfg.aggregation_options)
        KL_ESTIMATORS.options(cfg.kl.estimator, cfg.kl.options)
        _check_list("corrections", CORRECTIONS, cfg.corrections)
        _check_list("keep_masks", KEEP_MASKS, cfg.keep_masks)
        _check_anchor(cfg)
        _check_weights(cfg)
        _check_groups(cfg, advantage)
        _check_rewards(cfg, advantage)
        _check_critic(cfg.advantage.name, has_critic)
    except ConfigError as error:
        raise ConfigError(f"algorithm: {error}") from None


def _check_list(key: str, table: Table, chosen: Sequence[Choice]) -> None:
    for choice in chosen:
        table.options(choice.name, choice.options)
    names = [choice.name for choice in chosen]
    if len(set(names)) < len(names):
        raise ConfigError(f"{key} must name each entry once, got {', '.join(names)}.")


def _check_anchor(cfg: AlgorithmConfig) -> None:
    if cfg.anchor == "old":
        return
    loss = POLICY_LOSSES[cfg.loss.name]
    if "behaviour_weight" in loss.traits:
        raise ConfigError(f"anchor must be 'old' with loss {loss.name!r}, whose behaviour weight already corrects; "
                          f"got {cfg.anchor!r}.")
    if "old_log_probs" not in loss.columns:
        raise ConfigError(f"anchor must be 'old' with loss {loss.name!r}, which has no ratio to another policy that it "
                          f"could change; got {cfg.anchor!r}.")


def _check_weights(cfg: AlgorithmConfig) -> None:
    names = [choice.name for choice in cfg.corrections]
    weighing = [name for name in names if "weight" in CORRECTIONS[name].traits]
    if len(weighing) > 1:
        raise ConfigError(f"at most one correction may carry a weight, got {weighing}; combine it with masks.")
    anchored = "behaviour_anchored" in POLICY_LOSSES[cfg.loss.name].traits
    what = f"loss {cfg.loss.name!r}" if anchored else "anchor 'rollout'" if cfg.anchor == "rollout" else ""
    if what and weighing:
        masks = ", ".join(sorted(name for name in CORRECTIONS if "weight" not in CORRECTIONS[name].traits))
        raise ConfigError(
            f"correction {weighing[0]!r} weighs by the behaviour policy, and {what} already measures its ratio "
            f"from it: the correction would count twice. Accepted with it: none, or {masks}.")
    if cfg.self_normalise and (what or not names):
        raise ConfigError("self_normalise must be false "
                          + (f"with {what}, which takes no weights" if what else "without corrections") + "; got true.")


def _check_groups(cfg: AlgorithmConfig, advantage: Any) -> None:
    name, responses = cfg.advantage.name, cfg.responses_per_prompt
    traits = ADVANTAGES[name].traits
    needs_group = "groups" in traits or getattr(advantage, "baseline", None) == "group"
    if needs_group and responses < 2 and getattr(advantage, "singleton", "zero") != "raw":
        raise ConfigError(f"responses_per_prompt must be at least 2 with advantage {name!r}, which compares responses "
                          f"to the same prompt; got {responses}.")
    k = getattr(advantage, "k", None)
    if "k" in traits and k is not None and k > responses:
        raise ConfigError(f"k must be at most responses_per_prompt = {responses}, got {k}.")


def _check_rewards(cfg: AlgorithmConfig, advantage: Any) -> None:
    name, in_reward = cfg.advantage.name, cfg.kl.coefficient > 0 and cfg.kl.place == "reward"
    columns = ADVANTAGES[name].columns
    if in_reward and "token_rewards" not in columns:
        raise ConfigError(f"kl.place must be 'loss' with advantage {name!r}, which does not read token_rewards; "
                          "got 'reward'.")
    if in_reward and getattr(advantage, "kl_coef", 0) > 0:
        raise ConfigError(f"kl_coef of advantage {name!r} must be 0 with kl.place=reward, which subtracts the same "
                          f"penalty; got {advantage.kl_coef:g}.")
    shaped = {"overlong.penalty": cfg.overlong.penalty, "shaping.clip": cfg.shaping.clip,
              "shaping.bias": cfg.shaping.bias, "shaping.scale": cfg.shaping.scale - 1}
    unread = [key for key, value in shaped.items() if value]
    if unread and not columns.keys() & {"rewards", "token_rewards"}:
        raise ConfigError(f"{unread[0]} changes rewards, which advantage {name!r} does not read; it reads "
                          f"{', '.join(sorted(columns))}.")


def _check_critic(advantage: str, has_critic: bool) -> None:
    readers = {name for name in ADVANTAGES if "values" in ADVANTAGES[name].columns}
    needing = {name for name in readers if ADVANTAGES[name].columns["values"]}
    accepted = readers if has_critic else set(ADVANTAGES) - needing
    if advantage not in accepted:
        what = "does not read the critic that this recipe trains" if has_critic else (
            "needs a critic, which this recipe does not train")
        raise ConfigError(f"advantage {advantage!r} {what}; accepted: {', '.join(sorted(accepted))}.")
