"""From rewards to a loss."""

import math
from dataclasses import dataclass, field
from typing import Any

from hybridrl.config.checks import check, check_choice


@dataclass(kw_only=True, slots=True)
class Choice:
    name: str = ""
    """Name in the table."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of that entry; its options class in `hybridrl.algorithms` lists them."""


@dataclass(kw_only=True, slots=True)
class KLConfig:
    coefficient: float = 0.0
    """Weight of the KL penalty against the reference, or the first one with a `target`; 0 needs no reference."""
    place: str = "loss"
    """`loss` adds the penalty to the loss; `reward` subtracts it from the reward, token by token."""
    estimator: str = "k3+"
    """Entry of `KL_ESTIMATORS`; `k1` is the usual one for `place=reward`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of that entry; those that come with the library have none."""
    target: float = 0.0
    """KL to which the coefficient is steered after each batch, on the scale of the metric `policy/batch_kl`; 0 leaves
    the coefficient as it is."""
    horizon: float = 10000.0
    """How slowly it is steered: responses over which a steady error of 1% changes the coefficient by about 1%."""

    def validate(self) -> None:
        key = "algorithm.kl"
        check(0 <= self.coefficient < math.inf, f"{key}.coefficient", self.coefficient, "at least 0 and finite")
        check_choice(f"{key}.place", self.place, ("loss", "reward"))
        check(self.target >= 0, f"{key}.target", self.target, "at least 0")
        check(self.horizon > 0, f"{key}.horizon", self.horizon, "positive")
        check(not self.target or self.coefficient > 0, f"{key}.coefficient", self.coefficient,
              f"positive with target={self.target:g}, which multiplies it")


@dataclass(kw_only=True, slots=True)
class EntropyConfig:
    coefficient: float = 0.0
    """Weight of the entropy bonus in the loss, or the first one with a `target`."""
    measure: bool = False
    """Log the exact entropy, `policy/entropy`, also where nothing else needs it; otherwise `policy/entropy_estimate`,
    which costs nothing, is logged."""
    target: float = 0.0
    """Entropy in nats: below it the coefficient rises by `step` after each optimizer step, above it the coefficient
    falls and there is no bonus; 0 leaves the coefficient as it is."""
    step: float = 1e-4
    """How far the coefficient moves."""
    minimum: float = 0.0
    """Smallest coefficient that it moves to."""
    maximum: float = 0.005
    """Largest coefficient that it moves to."""

    def validate(self) -> None:
        key = "algorithm.entropy"
        check(0 <= self.coefficient < math.inf, f"{key}.coefficient", self.coefficient, "at least 0 and finite")
        check(self.target >= 0, f"{key}.target", self.target, "at least 0")
        check(self.step > 0, f"{key}.step", self.step, "positive")
        check(self.maximum < math.inf, f"{key}.maximum", self.maximum, "finite")
        check(0 <= self.minimum <= self.maximum, f"{key}.minimum", self.minimum,
              f"from 0 to maximum={self.maximum:g}")
        if self.target:
            check(self.minimum <= self.coefficient <= self.maximum, f"{key}.coefficient", self.coefficient,
                  f"from minimum={self.minimum:g} to maximum={self.maximum:g} with a target")


@dataclass(kw_only=True, slots=True)
class ShapingConfig:
    scale: float = 1.0
    """Multiplies the reward."""
    bias: float = 0.0
    """Added to the scaled reward."""
    clip: float = 0.0
    """Largest size of the result; 0 sets no limit."""

    def validate(self) -> None:
        key = "algorithm.shaping"
        for name in ("scale", "bias"):
            check(math.isfinite(getattr(self, name)), f"{key}.{name}", getattr(self, name), "finite")
        check(0 <= self.clip < math.inf, f"{key}.clip", self.clip, "at least 0 and finite")


@dataclass(kw_only=True, slots=True)
class OverlongConfig:
    penalty: float = 0.0
    """Subtracted from the reward of a response that runs to the length limit; 0 turns it off."""
    buffer_frac: float = 0.2
    """Share of the length limit over which the penalty grows from 0."""
    mask: bool = False
    """Leave responses that the limit cut out of the loss; their rewards still count in their group."""

    def validate(self) -> None:
        key = "algorithm.overlong"
        check(0 <= self.penalty < math.inf, f"{key}.penalty", self.penalty, "at least 0 and finite")
        check(0 <= self.buffer_frac <= 1, f"{key}.buffer_frac", self.buffer_frac, "from 0 to 1")


@dataclass(kw_only=True, slots=True)
class DynamicSamplingConfig:
    enabled: bool = False
    """Sample fresh prompts in place of groups whose rewards are all equal, which teach nothing."""
    max_rounds: int = 10
    """Rounds of sampling in one step; then the groups at hand are used. 0 sets no limit."""

    def validate(self) -> None:
        check(self.max_rounds >= 0, "algorithm.dynamic_sampling.max_rounds", self.max_rounds, "at least 0")


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    responses_per_prompt: int = 8
    """Responses sampled per prompt: the group."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    """Which groups are trained on."""
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    """From the environment's rewards to those that are learned from; comes before the penalty for long responses."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    """What becomes of responses that are too long."""
    advantage: Choice = field(default_factory=lambda: Choice(name="grpo"))
    """Entry of `ADVANTAGES`."""
    baseline_decay: float = 0.9
    """Share of the past in the baseline that moves from batch to batch (advantage `reinforce`, `baseline=moving`)."""
    loss: Choice = field(default_factory=lambda: Choice(name="ppo_clip"))
    """Entry of `POLICY_LOSSES`."""
    anchor: str = "old"
    """What the loss measures ratios from: `old`, the policy before the update, or `rollout`, the one that sampled."""
    aggregation: str = "token-mean"
    """Entry of `AGGREGATIONS`."""
    aggregation_options: dict[str, Any] = field(default_factory=dict)
    """Options of that entry."""
    corrections: list[Choice] = field(default_factory=lambda: [Choice(name="token_tis")])
    """Entries of `CORRECTIONS` for the gap between rollout and training log-probs; `[]` turns them off."""
    self_normalise: bool = False
    """Divide the weights of the corrections by their mean over the batch."""
    keep_masks: list[Choice] = field(default_factory=list)
    """Entries of `KEEP_MASKS`: tokens that are left out of the policy loss for other reasons."""
    kl: KLConfig = field(default_factory=KLConfig)
    """Penalty for leaving the reference."""
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    """Bonus for an uncertain policy, and how entropy is measured."""
    old_log_probs: str = "auto"
    """`separate` computes the log-probs before the update in a pass of their own; `auto` does so only where something
    needs them first, and otherwise takes them from the update's own first forward pass, with the same numbers."""
    mini_batches: int = 1
    """Optimizer steps per batch."""
    epochs: int = 1
    """Passes over each batch."""

    def validate(self) -> None:
        check(self.responses_per_prompt >= 1, "algorithm.responses_per_prompt", self.responses_per_prompt, "at least 1")
        check_choice("algorithm.old_log_probs", self.old_log_probs, ("auto", "separate"))
        check(self.mini_batches >= 1, "algorithm.mini_batches", self.mini_batches, "at least 1")
        check(self.epochs >= 1, "algorithm.epochs", self.epochs, "at least 1")
        check_choice("algorithm.anchor", self.anchor, ("old", "rollout"))
        check(0 <= self.baseline_decay < 1, "algorithm.baseline_decay", self.baseline_decay, "at least 0 and below 1")
        if self.dynamic_sampling.enabled:
            check(self.responses_per_prompt >= 2, "algorithm.responses_per_prompt", self.responses_per_prompt,
                  "at least 2 with algorithm.dynamic_sampling.enabled=true")
