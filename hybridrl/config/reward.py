"""What scores responses: functions, reward models, judges."""

import math
import re
from dataclasses import dataclass, field
from typing import Any

from hybridrl.config.checks import check, check_choice
from hybridrl.config.cluster import ClusterConfig
from hybridrl.config.rollout import RolloutConfig
from hybridrl.config.training import ModelConfig
from hybridrl.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class RewardFunctionConfig:
    name: str = "exact"
    """`exact`, `numeric`, `math_verify`, `reasoning_gym`, or a function's import path, `package.module:function`."""
    weight: float = 1.0
    """Weight in the sum of all functions."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments handed to the function."""

    def validate(self, key: str) -> None:
        check(math.isfinite(self.weight), f"{key}.weight", self.weight, "finite")


@dataclass(kw_only=True, slots=True)
class RewardModelConfig(ModelConfig):
    """A sequence classifier with one label that scores prompt and response."""

    path: str = ""
    """Folder of a sequence classifier with one label; empty loads none."""
    template: str = ""
    """What it reads: `tokens` (what the policy read and wrote, given the policy's tokenizer), `chat` (its own chat
    template) or a text with `{prompt}` and `{response}`; empty takes the first of these that it can."""
    max_tokens: int = 4096
    """Longest text, in its own tokens."""
    too_long: str = "mark"
    """`mark` leaves rows with longer texts without a reward; `cut` takes the text's last `max_tokens` tokens."""
    micro_batch_tokens: int = 8192
    """Token budget of one forward pass."""
    offload: str = "auto"
    """`auto` or `never`: wait in CPU memory while nothing is scored (CUDA only)."""
    ranks: int = 0
    """Devices of its own; 0 puts it on the policy's devices, in the same processes."""
    weight: float = 1.0
    """Weight in the reward."""
    scale: float = 1.0
    """Multiplies its score."""
    bias: float = 0.0
    """Added to the scaled score."""
    clip: float = 0.0
    """Largest size of the scaled score, bias included; 0 sets no limit."""

    def validate(self, key: str = "reward.model") -> None:
        named = set(re.findall(r"\{(\w+)\}", self.template))
        check(self.template in ("", "tokens", "chat") or "response" in named, f"{key}.template", self.template,
              "`tokens`, `chat` or a text with {prompt} and {response}")
        check(named <= {"prompt", "response"}, f"{key}.template", self.template, "a text with {prompt} and {response}")
        check(self.max_tokens >= 1, f"{key}.max_tokens", self.max_tokens, "at least 1")
        check_choice(f"{key}.too_long", self.too_long, ("mark", "cut"))
        check(self.micro_batch_tokens >= self.max_tokens, f"{key}.micro_batch_tokens", self.micro_batch_tokens,
              f"at least {key}.max_tokens={self.max_tokens}")
        check_choice(f"{key}.offload", self.offload, ("auto", "never"))
        check(self.ranks >= 0, f"{key}.ranks", self.ranks, "at least 0")
        for name in ("weight", "scale", "bias"):
            check(math.isfinite(getattr(self, name)), f"{key}.{name}", getattr(self, name), "finite")
        check(0 <= self.clip < math.inf, f"{key}.clip", self.clip, "at least 0 and finite")


@dataclass(kw_only=True, slots=True)
class JudgeConfig(ModelConfig):
    """A frozen language model that is asked about each response."""

    path: str = ""
    """Folder of the language model; empty loads none."""
    prompt: str = ("Question:\n{prompt}\n\nResponse:\n{response}\n\nHow good is the response? Reason briefly, then end "
                   "with `Score: ` and a number from 0 to 10.")
    """What it is asked: a text with `{response}`, and `{prompt}` and `{answer}` where they are wanted."""
    chat_template: bool = True
    """Ask with its chat template, as the user's turn; off feeds the text as it is."""
    verdict: str = r"Score:\W*(\d+(?:\.\d+)?)"
    """Regular expression with one group, the verdict; its last match in the judge's answer counts."""
    words: dict[str, float] = field(default_factory=dict)
    """Score of each verdict, whatever its case, for instance `{correct: 1, wrong: 0}`; empty: verdicts are numbers."""
    samples: int = 1
    """Answers sampled to each question; the score is the mean of those with a verdict."""
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(
        temperature=0.0, max_prompt_tokens=2048, max_response_tokens=256))
    """Its rollout engine. A response whose question is longer than `max_prompt_tokens` has no reward."""
    ranks: int = 0
    """Devices of its own; 0 puts it on the policy's devices, in the same processes."""
    weight: float = 1.0
    """Weight in the reward."""

    def validate(self, key: str = "reward.judge") -> None:
        named = set(re.findall(r"\{(\w+)\}", self.prompt))
        check("response" in named, f"{key}.prompt", self.prompt, "a text with {response}")
        try:
            groups = re.compile(self.verdict).groups
        except re.error as error:
            raise ConfigError(f"{key}.verdict is no regular expression: {error} in {self.verdict!r}.") from None
        check(groups == 1, f"{key}.verdict", self.verdict, "a regular expression with one group")
        for word, score in self.words.items():
            check(math.isfinite(score), f"{key}.words.{word}", score, "finite")
        check(self.samples >= 1, f"{key}.samples", self.samples, "at least 1")
        if self.samples > 1:
            temperature = self.rollout.temperature
            check(temperature > 0, f"{key}.rollout.temperature", temperature, f"positive with samples={self.samples}")
        check(self.ranks >= 0, f"{key}.ranks", self.ranks, "at least 0")
        check(math.isfinite(self.weight), f"{key}.weight", self.weight, "finite")


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    functions: list[RewardFunctionConfig] = field(default_factory=lambda: [RewardFunctionConfig()])
    """Reward functions; `[]` when a model or a judge alone gives the reward."""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """A reward model: a sequence classifier."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """A language model that judges responses in words."""
    workers: int = 2
    """Processes that run the functions."""
    timeout_s: float = 10.0
    """Longest run of one call, in seconds; a longer one is killed and its row has no reward."""
    cache: list[str] = field(default_factory=list)
    """Parts that score equal content once and remember the score: any of `functions`, `model` and `judge`."""
    cache_size: int = 100_000
    """Scores that each of these remembers; those that were not needed for longest are dropped."""

    @property
    def learned(self) -> dict[str, RewardModelConfig | JudgeConfig]:
        """The configured ones of `model` and `judge`, by name."""
        parts: dict[str, RewardModelConfig | JudgeConfig] = {"model": self.model, "judge": self.judge}
        return {name: part for name, part in parts.items() if part.path}

    @property
    def enabled(self) -> bool:
        """Whether anything scores."""
        return bool(self.functions or self.learned)

    def validate(self, key: str = "reward") -> None:
        check(self.enabled, f"{key}.functions", self.functions,
              f"at least one function while neither {key}.model.path nor {key}.judge.path is given")
        check(self.workers >= 1, f"{key}.workers", self.workers, "at least 1")
        check(self.timeout_s > 0, f"{key}.timeout_s", self.timeout_s, "positive")
        for part in self.cache:
            check_choice(f"{key}.cache", part, ("functions", "model", "judge"))
            check(bool(self.functions) if part == "functions" else part in self.learned, f"{key}.cache", self.cache,
                  f"without {part}, as there is none")
        check("judge" not in self.cache or self.judge.rollout.temperature == 0, f"{key}.cache", self.cache,
              f"without judge while {key}.judge.rollout.temperature draws each of its answers")
        check(self.cache_size >= 1, f"{key}.cache_size", self.cache_size, "at least 1")

    def check_placement(self, cluster: ClusterConfig, rollout: RolloutConfig, key: str = "reward") -> None:
        """Raise ConfigError unless model and judge fit the cluster, beside a policy with that rollout engine."""
        for name, part in self.learned.items():
            if cluster.backend == "local":
                check(part.ranks == 0, f"{key}.{name}.ranks", part.ranks, "0 with cluster.backend=local")
        judge = self.judge
        if judge.path:
            ranks, shared = judge.ranks or cluster.ranks, judge.rollout.tensor_parallel
            name = f"{key}.judge.rollout.tensor_parallel"
            check(ranks % shared == 0, name, shared, f"a divisor of its {ranks} ranks")
            if not judge.ranks and judge.rollout.engine == rollout.engine == "vllm":
                check(shared == rollout.tensor_parallel, name, shared,
                      f"policy.rollout.tensor_parallel={rollout.tensor_parallel} in the policy's processes "
                      f"({key}.judge.ranks gives the judge its own)")


@dataclass(kw_only=True, slots=True)
class OptionalRewardConfig(RewardConfig):
    """Rewards that may be left out."""

    functions: list[RewardFunctionConfig] = field(default_factory=list)
    """Reward functions."""

    def validate(self, key: str = "reward") -> None:
        if self.enabled:
            RewardConfig.validate(self, key)
