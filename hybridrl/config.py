"""Every option and its checks.

Options are dataclasses; defaults live here only. `hybridrl.config_loading` makes one of them from a recipe's
YAML and a command line and runs every `validate()`, so a wrong option fails before anything starts. The
docstring beneath a field is its documentation: docs/configuration.md is made from these.
"""

import inspect
import math
import re
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from hybridrl.errors import ConfigError, unknown


def check(ok: bool, key: str, value: object, accepted: str) -> None:
    """Raise ConfigError naming the key, the value and what is accepted, unless `ok`."""
    if not ok:
        raise ConfigError(f"{key} must be {accepted}, got {value!r}.")


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError with near matches unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{key}: " + unknown("choice", value, choices))


def check_temperature(key: str, value: float) -> None:
    """Raise ConfigError unless both engines sample at this temperature; vLLM silently raises smaller ones to 0.01."""
    check(value == 0 or 0.01 <= value <= 2, key, value, "0, or from 0.01 to 2")


def check_k(key: str, ks: list[int], samples: int, what: str) -> None:
    """Raise ConfigError unless each k has enough responses."""
    for k in ks:
        check(1 <= k <= samples, key, ks, f"from 1 to {what}={samples}")


def check_seed(value: int, key: str = "seed") -> None:
    """Raise ConfigError unless every generator takes this seed; vLLM's have the narrowest range."""
    check(0 <= value < 2**32, key, value, f"from 0 to {2**32 - 1}")


def validate_all(config: Any, key: str = "") -> None:
    """Run every `validate` of a config and the configs in it, inner ones first.

    A `validate` that takes an argument gets the dotted key of its config. Raises ConfigError.
    """
    for name in (f.name for f in fields(config)):
        value, inner = getattr(config, name), f"{key}.{name}" if key else name
        nodes = {f"{inner}[{i}]": item for i, item in enumerate(value)} if isinstance(value, list) else {inner: value}
        for node_key, node in nodes.items():
            if is_dataclass(node):
                validate_all(node, node_key)
    if hasattr(config, "validate"):
        takes_key = inspect.signature(config.validate).parameters
        config.validate(*([key] if takes_key else []))


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    backend: str = "ray"
    """`ray` (workers are processes) or `local` (one worker inside the controller's process; a debugger works)."""
    address: str = ""
    """Address of a running Ray cluster to join (`auto`, or host:port); empty starts one on this machine."""
    ranks: int = 1
    """Worker processes of a pool, one device each."""
    call_timeout_s: float = 1800.0
    """Longest wait for one worker-group call, in seconds."""
    start_timeout_s: float = 300.0
    """Longest wait for Ray, for the pool's processes and for their process group, in seconds."""

    def validate(self) -> None:
        check_choice("cluster.backend", self.backend, ("ray", "local"))
        check(self.ranks >= 1, "cluster.ranks", self.ranks, "at least 1")
        if self.backend == "local":
            check(self.ranks == 1, "cluster.ranks", self.ranks, "1 with cluster.backend=local")
            check(not self.address, "cluster.address", self.address, "empty with cluster.backend=local")
        check(self.call_timeout_s > 0, "cluster.call_timeout_s", self.call_timeout_s, "positive")
        check(self.start_timeout_s > 0, "cluster.start_timeout_s", self.start_timeout_s, "positive")


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


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    engine: str = "vllm"
    """`vllm`, or `transformers` (slow; a reference, and for models that vLLM lacks)."""
    tensor_parallel: int = 1
    """Ranks that share one engine; must divide `cluster.ranks`."""
    dtype: str = "auto"
    """`float32`, `bfloat16`, or `auto`: float32 on CPU, bfloat16 on CUDA."""
    temperature: float = 1.0
    """Sampling temperature; training uses the same one. 0 takes the most likely token (`recipes.evaluate` only)."""
    max_prompt_tokens: int = 512
    """Longest prompt; longer ones are left out by the loader and counted."""
    max_response_tokens: int = 512
    """Longest response; a longer one is cut and its finish reason is `length`."""
    max_running: int = 256
    """Sequences decoded at a time by one engine."""
    kv_cache_gib: float = 1.0
    """Largest key-value cache of one engine on CPU, in GiB; less is taken where `max_running` sequences need less."""
    gpu_memory_frac: float = 0.6
    """Share of a GPU's memory that one engine may use (CUDA)."""
    enforce_eager: bool = False
    """Skip CUDA graphs (CPU engines are always eager)."""

    @property
    def context(self) -> int:
        """Tokens of the longest sequence: prompt and response."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def longest(self) -> tuple[int, str]:
        """Tokens of the longest sequence, and what makes it so long."""
        prompt, response = self.max_prompt_tokens, self.max_response_tokens
        return self.context, f"policy.rollout.max_prompt_tokens={prompt} + max_response_tokens={response}"

    def validate(self, key: str = "policy.rollout") -> None:
        check_choice(f"{key}.engine", self.engine, ("vllm", "transformers"))
        check(self.tensor_parallel >= 1, f"{key}.tensor_parallel", self.tensor_parallel, "at least 1")
        if self.engine == "transformers":
            check(self.tensor_parallel == 1, f"{key}.tensor_parallel", self.tensor_parallel,
                  "1 with engine=transformers")
        check_choice(f"{key}.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        check_temperature(f"{key}.temperature", self.temperature)
        check(self.max_prompt_tokens >= 1, f"{key}.max_prompt_tokens", self.max_prompt_tokens, "at least 1")
        check(self.max_response_tokens >= 1, f"{key}.max_response_tokens", self.max_response_tokens, "at least 1")
        check(self.max_running >= 1, f"{key}.max_running", self.max_running, "at least 1")
        check(self.kv_cache_gib > 0, f"{key}.kv_cache_gib", self.kv_cache_gib, "positive")
        check(0 < self.gpu_memory_frac < 1, f"{key}.gpu_memory_frac", self.gpu_memory_frac, "between 0 and 1")


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


@dataclass(kw_only=True, slots=True)
class DataConfig:
    source: str = "jsonl"
    """`jsonl`, `parquet`, `dataset` (a Hugging Face dataset saved on disk), `reasoning_gym`, or `none`: numbered rows
    for an environment that makes its own tasks."""
    path: str = ""
    """File of `jsonl` and `parquet`, folder of `dataset`."""
    task: str = ""
    """Task name of `reasoning_gym`, for instance `chain_sum`."""
    task_options: dict[str, Any] = field(default_factory=dict)
    """Options of the `reasoning_gym` task."""
    task_size: int = 1000
    """Problems that `reasoning_gym` makes; rows of `none`."""
    task_seed: int = 0
    """Seed of the problems of `reasoning_gym` and the tasks of `none`; number i is made from `task_seed + i`, so keep
    held-out seeds far away."""
    prompt_field: str = "prompt"
    """Field that holds the prompt: a text, or a list of chat messages."""
    answer_field: str = "answer"
    """Field that holds the reference answer; rows may leave it out when empty."""
    response_field: str = "response"
    """Field that holds the response to learn (SFT); not needed by chat messages that end with the assistant's turn."""
    system_prompt: str = ""
    """System message put before a text prompt when a chat template is used."""
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template; off feeds the text as it is."""
    bad_rows: str = "error"
    """`error` stops at a malformed row and names it; `skip` leaves it out and counts it."""
    shuffle: bool = True
    """Draw prompts in a new seeded order each epoch."""

    def validate(self, key: str = "data") -> None:
        check_choice(f"{key}.source", self.source, ("jsonl", "parquet", "dataset", "reasoning_gym", "none"))
        check_choice(f"{key}.bad_rows", self.bad_rows, ("error", "skip"))
        check(bool(self.prompt_field), f"{key}.prompt_field", self.prompt_field, "a field name")
        check(self.chat_template or not self.system_prompt, f"{key}.system_prompt", self.system_prompt,
              "empty with chat_template=false")
        if self.source == "reasoning_gym":
            check(bool(self.task), f"{key}.task", self.task, "a reasoning-gym task with source=reasoning_gym")
        if self.source in ("reasoning_gym", "none"):
            check(self.task_size >= 1, f"{key}.task_size", self.task_size, "at least 1")
        else:
            check(bool(self.path), f"{key}.path", self.path, f"a path with source={self.source}")

    def check_prompts(self, key: str = "data") -> None:
        """Raise ConfigError where rows have no prompt of their own; for uses without an environment."""
        check(self.source != "none", f"{key}.source", self.source, "a source of prompts without an environment")


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


@dataclass(kw_only=True, slots=True)
class EnvironmentConfig:
    name: str = ""
    """`agent`, `guess`, `tools`, `verifier`; of other packages `gymnasium`, `openenv`, `reasoning_gym`, `textarena`,
    `verifiers`; or a class's import path, `package.module:Class`; empty plays no episodes."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""
    chat_template: bool = True
    """Render observations with the tokenizer's chat template; off feeds them as they are, one after the other."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """More variables for the chat template, for instance `{enable_thinking: false}`."""
    system_prompt: str = ""
    """System message put before the first observation unless that begins with one."""
    max_turns: int = 8
    """Turns of one episode, those of all its agents together."""
    max_turn_tokens: int = 0
    """Longest response of one turn, in tokens; 0 leaves `policy.rollout.max_response_tokens`, which limits all turns
    and the observations between them together."""
    max_running_episodes: int = 256
    """Episodes that one engine plays at a time, at most; fewer run while they would not fit its key-value cache."""
    turn_timeout_s: float = 60.0
    """Longest call of one method of the environment, in seconds."""
    episode_timeout_s: float = 600.0
    """Longest episode, in seconds."""
    min_success_frac: float = 0.5
    """Share of the episodes of one call that must not fail; below it the run stops."""

    @property
    def enabled(self) -> bool:
        """Whether an environment is named."""
        return bool(self.name)

    def validate(self, key: str = "environment") -> None:
        check(self.chat_template or not self.system_prompt, f"{key}.system_prompt", self.system_prompt,
              "empty with chat_template=false")
        check(self.max_turns >= 1, f"{key}.max_turns", self.max_turns, "at least 1")
        check(self.max_turn_tokens >= 0, f"{key}.max_turn_tokens", self.max_turn_tokens, "at least 0")
        check(self.max_running_episodes >= 1, f"{key}.max_running_episodes", self.max_running_episodes, "at least 1")
        check(self.turn_timeout_s > 0, f"{key}.turn_timeout_s", self.turn_timeout_s, "positive")
        check(self.episode_timeout_s > 0, f"{key}.episode_timeout_s", self.episode_timeout_s, "positive")
        check(0 <= self.min_success_frac <= 1, f"{key}.min_success_frac", self.min_success_frac, "from 0 to 1")


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


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    run_dir: str = ""
    """Folder of the run; empty makes `runs/<recipe>-<date>-<time>`. An existing one is resumed."""
    steps: int = 100
    """Steps of the run."""
    prompts_per_step: int = 16
    """Prompts drawn for one step."""
    eval_every: int = 0
    """Steps between evaluations on `eval_data` and `eval_suites`; 0 evaluates only before the first and after the last
    step."""
    eval_samples: int = 1
    """Responses per evaluation problem."""
    eval_temperature: float = 0.0
    """Sampling temperature of evaluations; 0 takes the most likely token."""
    eval_greedy: bool = False
    """Take the likeliest response to each problem, too."""
    eval_k: list[int] = field(default_factory=list)
    """The k of avg@k, pass@k and maj@k, each at most `eval_samples`."""
    eval_prompts: int = 256
    """Problems of one evaluation: the first of `eval_data`, and of each suite."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 saves only at the end and when interrupted."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept."""
    export: bool = True
    """Write the trained model in Hugging Face format at the end."""
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Any of `tensorboard`, `wandb`, `mlflow`; `metrics.jsonl` is always written."""
    save_samples: int = 4
    """Rows of each step written to `samples.jsonl`."""
    dry_run: bool = False
    """Before the first step, take the largest possible micro-batch through forward and backward passes: says what it
    takes and what is left, or stops with the largest `micro_batch_tokens` that fits."""

    def validate(self) -> None:
        check(self.steps >= 0, "trainer.steps", self.steps, "at least 0")
        check(self.prompts_per_step >= 1, "trainer.prompts_per_step", self.prompts_per_step, "at least 1")
        for name in ("eval_every", "checkpoint_every", "save_samples"):
            check(getattr(self, name) >= 0, f"trainer.{name}", getattr(self, name), "at least 0")
        for name in ("eval_samples", "eval_prompts", "keep_checkpoints"):
            check(getattr(self, name) >= 1, f"trainer.{name}", getattr(self, name), "at least 1")
        check_temperature("trainer.eval_temperature", self.eval_temperature)
        check(not self.eval_greedy or self.eval_temperature > 0, "trainer.eval_greedy", self.eval_greedy,
              "false with eval_temperature=0, which takes the likeliest response")
        check_k("trainer.eval_k", self.eval_k, self.eval_samples, "eval_samples")
        for tracker in self.trackers:
            check_choice("trainer.trackers", tracker, ("tensorboard", "wandb", "mlflow"))


@dataclass(kw_only=True, slots=True)
class EvalDataConfig(DataConfig):
    """Held-out problems. Evaluation is off while neither `path` nor `task` is given."""

    shuffle: bool = False
    """Draw problems in a seeded order; off takes them as they come."""

    @property
    def enabled(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.path or self.task or self.source in ("reasoning_gym", "none"))

    def validate(self, key: str = "eval_data") -> None:
        if self.enabled:
            DataConfig.validate(self, key)


@dataclass(kw_only=True, slots=True)
class SuiteConfig:
    """Problems to evaluate on, and what scores the responses."""

    name: str = ""
    """Name in metrics and results: letters, digits, `-` and `_`."""
    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    """The problems."""
    reward: OptionalRewardConfig = field(default_factory=OptionalRewardConfig)
    """How responses are scored; with an environment, on top of its rewards."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Play episodes in this environment, which scores them. With neither this nor `reward`, problems are answered and
    scored as the recipe's own."""
    samples: int = 0
    """Responses per problem; 0 takes as many as of the recipe's own problems."""
    k: list[int] = field(default_factory=list)
    """The k of avg@k, pass@k and maj@k; empty takes the recipe's."""
    max_prompts: int = 0
    """Problems taken, from the first; 0 takes as many as the recipe says."""

    @property
    def scores(self) -> bool:
        """Whether it says how responses are scored."""
        return self.reward.enabled or self.environment.enabled

    def validate(self, key: str = "suites") -> None:
        check(bool(re.fullmatch(r"[\w-]+", self.name)), f"{key}.name", self.name, "letters, digits, - and _")
        check(self.data.enabled, f"{key}.data.path", self.data.path, "a path (or data.task a reasoning-gym task)")
        check(self.samples >= 0, f"{key}.samples", self.samples, "at least 0")
        check(self.max_prompts >= 0, f"{key}.max_prompts", self.max_prompts, "at least 0")


def check_suites(key: str, suites: list[SuiteConfig], samples: int, ks: list[int], cluster: ClusterConfig,
                 rollout: RolloutConfig) -> None:
    """Raise ConfigError unless names differ, each k has enough responses, and models that score have a place."""
    names = [suite.name for suite in suites]
    for i, suite in enumerate(suites):
        check(suite.name not in names[:i], f"{key}[{i}].name", suite.name, "a name that no other suite has")
        check_k(f"{key}[{i}].k", suite.k or ks, suite.samples or samples, "the suite's samples")
        suite.reward.check_placement(cluster, rollout, f"{key}[{i}].reward")


def check_prompts_of(key: str, suites: list[SuiteConfig]) -> None:
    """Raise ConfigError where the rows of a suite without an environment have no prompts."""
    for i, suite in enumerate(suites):
        if not suite.environment.enabled:
            suite.data.check_prompts(f"{key}[{i}].data")


@dataclass(kw_only=True, slots=True)
class ReferenceConfig:
    ranks: int = 0
    """Devices of its own for the frozen reference of a KL penalty; 0 puts it on the policy's devices."""

    def validate(self) -> None:
        check(self.ranks >= 0, "reference.ranks", self.ranks, "at least 0")


@dataclass(kw_only=True, slots=True)
class GRPOConfig:
    """Reinforcement learning with several responses to each prompt: GRPO, Dr. GRPO, RLOO, REINFORCE."""

    seed: int = 0
    """Seed of prompts, sampling and initial values; two runs with one seed give the same metrics."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """The model that is trained, its training engine, its rollout engine and the sync between them."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts to train on."""
    eval_data: EvalDataConfig = field(default_factory=EvalDataConfig)
    """Held-out problems; evaluation is off while neither `path` nor `task` is given."""
    eval_suites: list[SuiteConfig] = field(default_factory=list)
    """More held-out problems, each suite with rewards or an environment of its own and its metrics under its name."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """How responses are scored."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """From rewards to a loss."""
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    """Where the reference of a KL penalty runs."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Where workers run."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Steps, run folder, evaluation, checkpoints, trackers."""

    def validate(self) -> None:
        check_seed(self.seed)
        ranks, shared = self.cluster.ranks, self.policy.rollout.tensor_parallel
        check(ranks % shared == 0, "cluster.ranks", ranks, f"a multiple of policy.rollout.tensor_parallel={shared}")
        self.policy.training.check_ranks(ranks, "cluster.ranks")
        if self.reference.ranks:
            self._check_reference(self.reference.ranks)
        self.check_data()
        self.reward.check_placement(self.cluster, self.policy.rollout)
        self.policy.training.check_longest(*self.policy.rollout.longest)
        temperature = self.policy.rollout.temperature
        check(temperature > 0, "policy.rollout.temperature", temperature, "positive to train")
        prompts = self.trainer.prompts_per_step
        check(self.algorithm.mini_batches <= prompts, "algorithm.mini_batches", self.algorithm.mini_batches,
              f"at most trainer.prompts_per_step={prompts}")
        check(bool(self.eval_data.enabled or self.eval_suites or not self.trainer.eval_every), "trainer.eval_every",
              self.trainer.eval_every, "0 while eval_data names no problems (set eval_data.path or eval_data.task)")
        check_suites("eval_suites", self.eval_suites, self.trainer.eval_samples, self.trainer.eval_k, self.cluster,
                     self.policy.rollout)

    def check_data(self) -> None:
        """Raise ConfigError where rows have no prompts."""
        self.data.check_prompts()
        self.eval_data.check_prompts("eval_data")
        check_prompts_of("eval_suites", self.eval_suites)

    def _check_reference(self, ranks: int) -> None:
        for nothing, why in ((not self.algorithm.kl.coefficient, "without a KL penalty (algorithm.kl.coefficient)"),
                             (self.policy.training.lora.rank, "with policy.training.lora, whose base is the reference"),
                             (self.cluster.backend == "local", "with cluster.backend=local")):
            check(not nothing, "reference.ranks", ranks, f"0 {why}")
        self.policy.training.check_ranks(ranks, "reference.ranks")


@dataclass(kw_only=True, slots=True)
class AgentConfig(GRPOConfig):
    """Reinforcement learning on episodes: several turns in an environment, with tools, games or other players."""

    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Where episodes are played, and how they are scored."""
    reward: OptionalRewardConfig = field(default_factory=OptionalRewardConfig)
    """Rewards of trajectories on top of the environment's."""

    def validate(self) -> None:
        GRPOConfig.validate(self)
        check(self.environment.enabled, "environment.name", self.environment.name,
              "the name of an environment, or a class's import path (package.module:Class)")

    def check_data(self) -> None:
        """Nothing to check: environments may make up what rows lack."""


@dataclass(kw_only=True, slots=True)
class CriticConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model whose layers the critic starts from; `recipes.ppo` takes the policy's unless told otherwise."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Optimizer and batching."""
    value_clip: float = 0.2
    """How far values may move from those that made the advantages before they stop to gain; 0 sets no limit."""
    bootstrap: bool = False
    """End responses that the length limit cut with the critic's value of what was written so far; otherwise with 0,
    which counts being cut as failing."""
    ranks: int = 0
    """Devices of its own; 0 puts it on the policy's devices, in the same processes."""

    def validate(self) -> None:
        check(self.value_clip >= 0, "critic.value_clip", self.value_clip, "at least 0")
        check(self.ranks >= 0, "critic.ranks", self.ranks, "at least 0")


@dataclass(kw_only=True, slots=True)
class PPOConfig(GRPOConfig):
    """Reinforcement learning with a critic: PPO with generalized advantage estimation."""

    algorithm: AlgorithmConfig = field(default_factory=lambda: AlgorithmConfig(advantage=Choice(name="gae")))
    """From rewards and values to a loss."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The model that learns values, its training engine and where it runs."""

    def validate(self) -> None:
        GRPOConfig.validate(self)
        check(not self.algorithm.dynamic_sampling.enabled, "algorithm.dynamic_sampling.enabled", True,
              "false with a critic, which learns from groups of equal rewards, too")
        own = self.critic.ranks
        self.critic.training.check_longest(*self.policy.rollout.longest, "critic.training")
        self.critic.training.check_ranks(own or self.cluster.ranks, "critic.ranks" if own else "cluster.ranks",
                                         "critic.training")
        if self.cluster.backend == "local":
            check(self.critic.ranks == 0, "critic.ranks", self.critic.ranks, "0 with cluster.backend=local")


@dataclass(kw_only=True, slots=True)
class TeacherConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model to learn from; its tokenizer must have the policy's vocabulary."""
    micro_batch_tokens: int = 8192
    """Token budget of one forward pass."""
    logits_chunk_tokens: int = 1024
    """Tokens whose logits are held at a time."""
    offload: str = "auto"
    """`auto` or `never`: wait in CPU memory while nothing is scored (CUDA only)."""
    ranks: int = 0
    """Devices of its own; 0 puts it on the policy's devices, in the same processes."""

    def validate(self, key: str = "teacher") -> None:
        check(self.micro_batch_tokens >= 1, f"{key}.micro_batch_tokens", self.micro_batch_tokens, "at least 1")
        check(self.logits_chunk_tokens >= 1, f"{key}.logits_chunk_tokens", self.logits_chunk_tokens, "at least 1")
        check_choice(f"{key}.offload", self.offload, ("auto", "never"))
        check(self.ranks >= 0, f"{key}.ranks", self.ranks, "at least 0")


@dataclass(kw_only=True, slots=True)
class DistillOptionsConfig:
    loss: str = "sampled"
    """`sampled` learns from the teacher's log-prob of each sampled token, which becomes its advantage; `top_k` from the
    teacher's `top_k` likeliest tokens in its place, by a divergence that becomes part of the loss."""
    top_k: int = 32
    """Likeliest tokens of the teacher (`loss=top_k`); as many as the vocabulary give the exact divergence."""
    teacher_temperature: float = 1.0
    """Divides the teacher's logits: below 1 sharpens what is learnt."""
    weight: float = 1.0
    """Weight of the divergence beside the loss of the rewards (`loss=top_k`)."""

    def validate(self, key: str = "distill") -> None:
        check_choice(f"{key}.loss", self.loss, ("sampled", "top_k"))
        check(self.top_k >= 1, f"{key}.top_k", self.top_k, "at least 1")
        temperature = self.teacher_temperature
        check(0 < temperature < math.inf, f"{key}.teacher_temperature", temperature, "positive")
        check(0 < self.weight < math.inf, f"{key}.weight", self.weight, "positive")
        check(self.loss == "top_k" or self.weight == 1, f"{key}.weight", self.weight,
              "1 with loss=sampled (algorithm.advantage.options.reward_coef weighs rewards against the teacher)")


@dataclass(kw_only=True, slots=True)
class DistillRewardConfig(OptionalRewardConfig):
    functions: list[RewardFunctionConfig] = field(default_factory=list)
    """Reward functions; without any, model or judge every reward is 0 and the teacher alone is learnt from."""


@dataclass(kw_only=True, slots=True)
class DistillConfig(GRPOConfig):
    """On-policy distillation: the policy samples, and a larger teacher says what it thinks of every token."""

    reward: DistillRewardConfig = field(default_factory=DistillRewardConfig)
    """How responses are scored, for evaluation and where rewards are learnt from, too."""
    algorithm: AlgorithmConfig = field(default_factory=lambda: AlgorithmConfig(advantage=Choice(name="distill")))
    """From the teacher's log-probs, and rewards, to a loss."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """The model to learn from, its batching and where it runs."""
    distill: DistillOptionsConfig = field(default_factory=DistillOptionsConfig)
    """What is learnt from it."""

    def validate(self) -> None:
        GRPOConfig.validate(self)
        check(not self.algorithm.dynamic_sampling.enabled, "algorithm.dynamic_sampling.enabled", True,
              "false with a teacher, from which groups of equal rewards learn, too")
        if self.cluster.backend == "local":
            check(self.teacher.ranks == 0, "teacher.ranks", self.teacher.ranks, "0 with cluster.backend=local")
        scored_here = self.eval_data.enabled or not all(suite.scores for suite in self.eval_suites)
        check(self.reward.enabled or not scored_here, "reward.functions", self.reward.functions,
              "at least one function to evaluate with")


@dataclass(kw_only=True, slots=True)
class SFTPolicyConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model to start from."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Optimizer and batching."""


@dataclass(kw_only=True, slots=True)
class SFTConfig:
    """Supervised fine-tuning on prompts with reference answers."""

    seed: int = 0
    """Seed of the data order and of initial values."""
    policy: SFTPolicyConfig = field(default_factory=SFTPolicyConfig)
    """The model that is trained and its training engine."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts with answers to train on."""
    max_tokens: int = 1024
    """Longest prompt plus answer; longer rows are left out and counted."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Where workers run."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Steps, run folder, checkpoints, trackers."""

    def validate(self) -> None:
        check_seed(self.seed)
        self.data.check_prompts()
        check(self.max_tokens >= 2, "max_tokens", self.max_tokens, "at least 2")
        self.policy.training.check_longest(self.max_tokens, f"max_tokens={self.max_tokens}")
        self.policy.training.check_ranks(self.cluster.ranks, "cluster.ranks")


@dataclass(kw_only=True, slots=True)
class EvaluateConfig:
    """Score a model on suites of problems: accuracy, avg@k, pass@k, maj@k, each with a 95% interval."""

    seed: int = 0
    """Seed of sampling."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """The model and how it samples."""
    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    """The problems; may be left out where there are suites."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """How responses are scored; left out with an environment."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Play episodes instead of single responses: the environment scores them."""
    suites: list[SuiteConfig] = field(default_factory=list)
    """More problems, each suite with rewards or an environment of its own, or those above."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Where workers run."""
    max_prompts: int = 0
    """Problems taken, from the first; 0 takes all."""
    samples_per_prompt: int = 1
    """Responses per problem, at `policy.rollout.temperature`."""
    greedy: bool = False
    """Take the likeliest response to each problem, too."""
    k: list[int] = field(default_factory=list)
    """The k of avg@k, pass@k and maj@k, each at most `samples_per_prompt`."""
    output: str = ""
    """Folder for `results.json`, `config.yaml` and the scored responses, `samples.jsonl`, which `hybridrl show` prints;
    a name that ends in `.jsonl` writes the responses alone to that file; empty writes nothing."""

    def validate(self) -> None:
        check_seed(self.seed)
        ranks, shared = self.cluster.ranks, self.policy.rollout.tensor_parallel
        check(ranks % shared == 0, "cluster.ranks", ranks, f"a multiple of policy.rollout.tensor_parallel={shared}")
        self.reward.check_placement(self.cluster, self.policy.rollout)
        if self.environment.enabled:
            given = [function.name for function in self.reward.functions
                     if function != RewardFunctionConfig()] + list(self.reward.learned)
            check(not given, "reward", given, "left out with environment.name, which scores (a suite takes both)")
        else:
            self.data.check_prompts()
            check_prompts_of("suites", self.suites)
        check(self.max_prompts >= 0, "max_prompts", self.max_prompts, "at least 0")
        check(self.samples_per_prompt >= 1, "samples_per_prompt", self.samples_per_prompt, "at least 1")
        check_k("k", self.k, self.samples_per_prompt, "samples_per_prompt")
        temperature = self.policy.rollout.temperature
        check(not self.greedy or temperature > 0, "greedy", self.greedy,
              f"false with policy.rollout.temperature={temperature:g}, which takes the likeliest response")
        check(bool(self.data.enabled or self.suites), "data.path", self.data.path,
              "a path (or data.task a reasoning-gym task) without suites")
        check_suites("suites", self.suites, self.samples_per_prompt, self.k, self.cluster, self.policy.rollout)
        path = Path(self.output).expanduser().absolute()
        check(not self.output or path.parent.is_dir(), "output", self.output, "a file in a folder that exists")
        is_file = path.suffix == ".jsonl"
        check(not path.is_dir() if is_file else not path.is_file() or not self.output, "output", self.output,
              "no folder's name when it ends in .jsonl" if is_file else "no file's name unless it ends in .jsonl")


@dataclass(kw_only=True, slots=True)
class ServePolicyConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model that is served."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Its engine; the two limits of tokens together are its context, and the temperature is that of calls without."""

    def validate(self) -> None:
        check(self.rollout.tensor_parallel == 1, "policy.rollout.tensor_parallel", self.rollout.tensor_parallel,
              "1 with recipes.serve")


@dataclass(kw_only=True, slots=True)
class ServeConfig:
    """Serve a model with OpenAI's API."""

    seed: int = 0
    """Seed of calls that bring none."""
    policy: ServePolicyConfig = field(default_factory=ServePolicyConfig)
    """The model and its engine."""
    host: str = "127.0.0.1"
    """Address to listen on; any other than the default lets other machines in."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    api_key: str = ""
    """The key that calls must bring; empty makes a new one."""
    model_name: str = ""
    """Name of the model in `/v1/models`; empty takes that of its folder."""
    call_format: str = "hermes"
    """How the model writes tool calls: `hermes`, `qwen_xml`, `llama3`, `deepseek` or `glm`."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """More variables for the chat template, for instance `{enable_thinking: false}`."""

    def validate(self) -> None:
        check_seed(self.seed)
        check(0 <= self.port < 2**16, "port", self.port, "from 0 to 65535")
        check_choice("call_format", self.call_format, ("hermes", "qwen_xml", "llama3", "deepseek", "glm"))
        check(self.api_key.isascii() and " " not in self.api_key, "api_key", self.api_key, "ASCII without blanks")


RECIPES: dict[str, type] = {"grpo": GRPOConfig, "ppo": PPOConfig, "agent": AgentConfig, "distill": DistillConfig,
                            "sft": SFTConfig, "evaluate": EvaluateConfig, "serve": ServeConfig}
"""The options of each recipe, for the reference page and the tests; `load` takes any config class."""
