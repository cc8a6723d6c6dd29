"""A rollout engine with the weights of a folder, which stay as they are: for judges and for serving."""

from typing import Any

import torch

from hybridrl.config import ModelConfig, RolloutConfig
from hybridrl.models import check_context, resolve_model, stop_ids
from hybridrl.workers.rollout.engine import RolloutEngine
from hybridrl.workers.rollout.transformers_engine import TransformersEngine
from hybridrl.workers.rollout.vllm_engine import VLLMEngine, rollout_dtype


def frozen_engine(model: ModelConfig, rollout: RolloutConfig, tokenizer: Any, device: torch.device,
                  seed: int = 0, key: str = "policy.rollout") -> RolloutEngine:
    """The engine of `rollout.engine`, ready to sample.

    Args:
        key: of `rollout` in a recipe's options, for messages.
    Raises:
        ModelError: the folder can't be used. ConfigError: the model has fewer positions than the rollout asks for.
    """
    folder = resolve_model(model.path)
    stop = stop_ids(folder, tokenizer)
    if rollout.engine == "transformers":
        check_context(model, rollout.context, f"{key}.max_prompt_tokens + max_response_tokens")
        dtype = getattr(torch, rollout_dtype(rollout, device))
        return TransformersEngine(folder, device, dtype, stop, rollout.max_running, model.trust_remote_code,
                                  frozen=True)
    return VLLMEngine(folder, rollout, device, stop, model.trust_remote_code, seed, frozen=True, key=key)
