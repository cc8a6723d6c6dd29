"""Options of `recipes.serve`."""

from dataclasses import dataclass, field
from typing import Any

from hybridrl.config.checks import check, check_choice, check_seed
from hybridrl.config.rollout import RolloutConfig
from hybridrl.config.training import ModelConfig


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
