"""A model, and the engine that trains it."""

import math
from dataclasses import dataclass, field

from hybridrl.config.checks import check, check_choice, check_seed


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    path: str = ""
    """Folder of a Hugging Face model with its tokenizer, or `smollm2` (converted on first use, cached)."""
    trust_remote_code: bool = False
    """Run Python code that the model folder carries. Only for folders you trust."""

    def validate(self, key: str = "policy.model") -> None:
        check(bool(self.path), f"{key}.path", self.path, "a model folder")


@dataclass(kw_only=True, slots=True)
class LoRAConfig:
    rank: int = 0
    """Rank of the adapters; 0 trains the whole model."""
    alpha: float = 32.0
    """An adapter's product counts alpha / rank times."""
    rank_stabilized: bool = False
    """Count it alpha / sqrt(rank) times instead."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Linear layers that get an adapter, by the end of their name (`q_proj`, `layers.0.mlp.up_proj`); `all-linear`
    takes every one inside the decoder layers."""
    seed: int = 0
    """Seed of the adapters' initial values."""
    export_adapter: bool = False
    """Beside the merged model, export the adapters in peft's format (folder `adapter`)."""

    @property
    def scaling(self) -> float:
        """What an adapter's product is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def validate(self, key: str = "policy.training.lora") -> None:
        check(0 <= self.rank <= 512, f"{key}.rank", self.rank, "from 0 to 512")
        check(0 < self.alpha < math.inf, f"{key}.alpha", self.alpha, "positive and finite")
        check(len(self.targets) >= 1 and all(self.targets), f"{key}.targets", self.targets,
              "names of linear layers, or [all-linear]")
        check_seed(self.seed, f"{key}.seed")
        check(self.rank > 0 or not self.export_adapter, f"{key}.export_adapter", True, f"false with {key}.rank=0")


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    optimizer: str = "adamw"
    """`adamw`; `adamw_8bit` keeps its averages in 8 bits (`pip install "hybridrl[adamw-8bit]"`); `muon` for the
    matrices of the layers and AdamW for the rest."""
    learning_rate: float = 1e-6
    """Peak learning rate."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    schedule: str = "constant"
    """`constant`, `linear` or `cosine` decay to 0 over `total_steps`, after the warm-up."""
    total_steps: int = 0
    """Optimizer steps the decay spans; needed by `linear` and `cosine`."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    beta1: float = 0.9
    """AdamW's first-moment decay."""
    beta2: float = 0.999
    """AdamW's second-moment decay."""
    muon_momentum: float = 0.95
    """Muon's momentum."""
    max_grad_norm: float = 1.0
    """Global gradient-norm clip."""
    max_skipped_steps: int = 3
    """Optimizer steps in a row that may be skipped for non-finite gradients before the run stops."""
    micro_batch_tokens: int = 8192
    """Token budget of one forward and backward pass on one rank; the longest sequence must fit."""
    shard_ranks: int = 0
    """Ranks that one copy of the model is sharded over; groups of this size hold a copy each. 0 takes all ranks."""
    context_parallel: int = 1
    """Ranks that share the tokens of each sequence; must divide the ranks and the model's attention heads."""
    logits_chunk_tokens: int = 1024
    """Tokens whose logits are held at a time."""
    attention: str = "auto"
    """Kernel: `sdpa` (everywhere), `flash` (GPUs, bfloat16), `flex` (GPUs), or `auto`: the first that works of flash,
    flex and sdpa."""
    whole_gradient_gib: float = 4.0
    """Largest gradient of the whole model, float32, that every rank may hold between the micro-batches of an update, in
    GiB; gradients are then added up over ranks once an update. That of a larger model is added up and sharded after
    each micro-batch."""
    compile: bool = False
    """Compile the layers with torch.compile, at the first forward and backward pass; needs a C++ compiler."""
    gradient_checkpointing: str = "none"
    """What the backward pass computes again to keep less: `none`, `layers` (all but each layer's input) or `selective`
    (all but matrix products and attention)."""
    offload: str = "auto"
    """What lies in CPU memory rather than the GPU's: with `rollout`, parameters and optimizer state while the rollout
    engine works; with `always`, those and gradients at all times, and the optimizer steps on the CPU; with `never`,
    nothing. `auto` is `rollout` on GPUs; a CPU has nothing to offload."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """Low-rank adapters: train these, and keep the model's own weights as they are."""

    def validate(self, key: str = "policy.training") -> None:
        check_choice(f"{key}.optimizer", self.optimizer, ("adamw", "adamw_8bit", "muon"))
        check(0 <= self.learning_rate < math.inf, f"{key}.learning_rate", self.learning_rate, "at least 0 and finite")
        check(self.warmup_steps >= 0, f"{key}.warmup_steps", self.warmup_steps, "at least 0")
        check_choice(f"{key}.schedule", self.schedule, ("constant", "linear", "cosine"))
        check(self.total_steps >= 0, f"{key}.total_steps", self.total_steps, "at least 0")
        if self.schedule != "constant":
            check(self.total_steps > self.warmup_steps, f"{key}.total_steps", self.total_steps,
                  f"more than warmup_steps={self.warmup_steps} with schedule={self.schedule}")
        check(0 <= self.weight_decay < math.inf, f"{key}.weight_decay", self.weight_decay, "at least 0 and finite")
        check(0 <= self.beta1 < 1, f"{key}.beta1", self.beta1, "in [0, 1)")
        check(0 <= self.beta2 < 1, f"{key}.beta2", self.beta2, "in [0, 1)")
        check(0 <= self.muon_momentum < 1, f"{key}.muon_momentum", self.muon_momentum, "in [0, 1)")
        check(self.max_grad_norm > 0, f"{key}.max_grad_norm", self.max_grad_norm, "positive")
        check(self.max_skipped_steps >= 0, f"{key}.max_skipped_steps", self.max_skipped_steps, "at least 0")
        check(self.micro_batch_tokens >= 1, f"{key}.micro_batch_tokens", self.micro_batch_tokens, "at least 1")
        check(self.logits_chunk_tokens >= 1, f"{key}.logits_chunk_tokens", self.logits_chunk_tokens, "at least 1")
        check(self.shard_ranks >= 0, f"{key}.shard_ranks", self.shard_ranks, "at least 0")
        check(self.context_parallel >= 1, f"{key}.context_parallel", self.context_parallel, "at least 1")
        check(self.whole_gradient_gib >= 0, f"{key}.whole_gradient_gib", self.whole_gradient_gib, "at least 0")
        check_choice(f"{key}.attention", self.attention, ("auto", "sdpa", "flash", "flex"))
        check_choice(f"{key}.gradient_checkpointing", self.gradient_checkpointing, ("none", "layers", "selective"))
        check(not self.compile or self.gradient_checkpointing != "selective", f"{key}.gradient_checkpointing",
              self.gradient_checkpointing, "`none` or `layers` with compile=true, which is selective by itself")
        check_choice(f"{key}.offload", self.offload, ("auto", "never", "rollout", "always"))

    def check_longest(self, tokens: int, what: str, key: str = "policy.training") -> None:
        """Raise ConfigError unless the longest sequence, of `tokens` tokens, fits into one micro-batch."""
        least = -(-tokens // self.context_parallel)
        check(self.micro_batch_tokens >= least, f"{key}.micro_batch_tokens", self.micro_batch_tokens,
              f"at least {least}, the tokens that a rank may have of one sequence ({what})")

    def check_ranks(self, ranks: int, ranks_key: str, key: str = "policy.training") -> None:
        """Raise ConfigError unless groups of ranks divide the ranks of the pool."""
        for name in ("shard_ranks", "context_parallel"):
            size = getattr(self, name)
            if size and ranks % size:
                accepted = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
                check(False, f"{key}.{name}", size, f"a divisor of {ranks_key}={ranks} ({accepted})")
