"""The model that is trained: its two engines, and the sync between them."""

from dataclasses import dataclass, field

from hybridrl.config.checks import check, check_choice
from hybridrl.config.rollout import RolloutConfig
from hybridrl.config.training import ModelConfig, TrainingConfig


@dataclass(kw_only=True, slots=True)
class SyncConfig:
    mode: str = "full"
    """`full` sends all weights at each sync, `delta` those elements that changed in the rollout engine's dtype."""
    bucket_mib: int = 64
    """Weights that are exchanged at a time, in MiB of the whole model in the rollout engine's dtype; two such buckets
    are under way at once. Larger weights are cut by rows."""
    verify: str = "fingerprint"
    """What is checked after each sync beside completeness: `none`, `fingerprint` (log-probs of a few tokens in both
    engines), or `full` (that, and digests of every slice of every weight in both engines)."""
    fingerprint_tokens: int = 16
    """Tokens of the fingerprint, fewer where prompt and response are shorter."""
    max_gap: float = 0.0
    """Largest accepted log-prob gap of the fingerprint; 0 means 1e-3 in float32 and 0.5 in bfloat16."""
    lora: str = "merged"
    """How low-rank adapters get to the rollout engine: `merged` into the full weights, or as an `adapter` that vLLM
    adds while it samples, with base weights that it reads from the model folder once."""

    def validate(self) -> None:
        check_choice("policy.sync.mode", self.mode, ("full", "delta"))
        check_choice("policy.sync.lora", self.lora, ("merged", "adapter"))
        if self.lora == "adapter":
            check(self.mode == "full", "policy.sync.mode", self.mode, "full with policy.sync.lora=adapter")
        check(self.bucket_mib >= 1, "policy.sync.bucket_mib", self.bucket_mib, "at least 1")
        check_choice("policy.sync.verify", self.verify, ("none", "fingerprint", "full"))
        check(self.fingerprint_tokens >= 1, "policy.sync.fingerprint_tokens", self.fingerprint_tokens, "at least 1")
        check(self.max_gap >= 0, "policy.sync.max_gap", self.max_gap, "at least 0")


@dataclass(kw_only=True, slots=True)
class PolicyConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    routing_replay: str = "off"
    """Whose choice of experts log-probs and updates of a mixture follow: `off` (their own), `rollout` (that of the
    rollout engine) or `old` (that of training's first pass over the batch)."""
    routing_compare: bool = False
    """Measure the gap of the engines without replay, too (`mismatch_live/...`): one more forward pass an update."""

    def validate(self) -> None:
        check_choice("policy.routing_replay", self.routing_replay, ("off", "rollout", "old"))
        if self.routing_replay == "off":
            check(not self.routing_compare, "policy.routing_compare", True, "false with policy.routing_replay=off")
        else:
            check(self.training.context_parallel == 1, "policy.training.context_parallel",
                  self.training.context_parallel, f"1 with policy.routing_replay={self.routing_replay}")
            check(not self.training.compile, "policy.training.compile", True,
                  f"false with policy.routing_replay={self.routing_replay}")
        if self.sync.lora == "adapter":
            check(self.training.lora.rank > 0, "policy.training.lora.rank", 0, "positive with policy.sync.lora=adapter")
            check(self.rollout.engine == "vllm", "policy.rollout.engine", self.rollout.engine,
                  "vllm with policy.sync.lora=adapter")
