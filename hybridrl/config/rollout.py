"""The engine that samples."""

from dataclasses import dataclass

from hybridrl.config.checks import check, check_choice, check_temperature


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
