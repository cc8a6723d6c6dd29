"""A trained model as a Hugging Face folder, and its adapters as one of peft."""

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hybridrl.errors import ModelError
from hybridrl.workers.training.first_rank import on_first_rank


def export_model(folder: Path, weights: dict[str, Tensor], trained: PreTrainedModel, dtype: torch.dtype,
                 tokenizer: Any) -> None:
    """Write config, safetensors weights, generation config and tokenizer from rank 0; collective.

    `save_pretrained` gives the weights their names in checkpoints (experts one by one, tied weights once), so
    that transformers and vLLM load the folder.

    Args:
        weights: on rank 0 all parameters by their name in `trained`, on CPU, in `dtype`; unused elsewhere.
    Raises:
        ModelError: on every rank, when rank 0 can't write.
    """
    def write() -> None:
        with torch.device("meta"):
            model = type(trained)._from_config(copy.deepcopy(trained.config), dtype=dtype)
        model.generation_config = trained.generation_config
        model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)

    on_first_rank(write, ModelError)


def export_adapter(folder: Path, adapters: dict[str, Tensor], configs: dict[str, LoraConfig]) -> None:
    """Write adapters from rank 0 as peft's `adapter_model.safetensors` and `adapter_config.json`; collective.

    Args:
        adapters: on rank 0 `<layer>.lora_A.weight` and `<layer>.lora_B.weight`, on CPU; unused elsewhere.
        configs: what peft put into the model, one entry.
    Raises:
        ModelError: on every rank, when rank 0 can't write.
    """
    def write() -> None:
        (config,) = configs.values()
        config.save_pretrained(str(folder))
        save_file({f"base_model.model.{name}": value.contiguous() for name, value in adapters.items()},
                  folder / "adapter_model.safetensors", metadata={"format": "pt"})

    on_first_rank(write, ModelError)
