"""From a model folder to a transformers model, or to one line about what is wrong with the folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

from hybridrl.config import ModelConfig
from hybridrl.errors import ModelError
from hybridrl.models import load_config, resolve_model, unreadable
from hybridrl.workers.training.attention import ATTENTION

# Bars of loading and saving would run across the terminal's own progress line.
disable_progress_bar()

LAYER_TYPES = {"full_attention", "sliding_attention"}
"""Kinds of layer that packing keeps apart; a recurrent layer would carry state from one sequence to the next."""

LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale")
"""Config fields by which a model changes what its head returns."""


def read_config(cfg: ModelConfig) -> PretrainedConfig:
    """The config of a model folder. Raises ModelError when training does not compute what it asks for."""
    folder, config = resolve_model(cfg.path), load_config(cfg)
    if getattr(config, "quantization_config", None):
        raise ModelError(f"Model folder {folder} holds quantised weights, which can't be trained: take the model that "
                         "they were made from.")
    others = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if others:
        raise ModelError(f"Model folder {folder} has layers of type {', '.join(sorted(others))}; "
                         f"training supports {', '.join(sorted(LAYER_TYPES))}.")
    for name in LOGIT_CHANGES:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ModelError(f"Model folder {folder} changes logits with {name}={getattr(config, name)}, "
                             f"which training does not support.")
    return config


def read(loads: Any, cfg: ModelConfig, dtype: torch.dtype | str, device: str = "cpu") -> PreTrainedModel:
    """The whole model; every parameter must come from the folder and every stored weight must have a place.

    On the device `meta` the files' headers alone are read, and checked as much.

    Args:
        loads: the transformers class that makes it.
    """
    folder, config = resolve_model(cfg.path), read_config(cfg)
    try:
        with _without_report():
            model, info = loads.from_pretrained(
                folder, config=config, dtype=dtype, output_loading_info=True, use_safetensors=True,
                local_files_only=True, trust_remote_code=cfg.trust_remote_code, ignore_mismatched_sizes=True,
                **implementation(dtype), **({"device_map": {"": device}} if device != "cpu" else {}))
    except Exception as error:  # whatever transformers, and the folder's own code, stumble over
        raise unreadable("model", folder, error) from error
    for problem, what in (("missing_keys", "lacks weights that its config asks for"),
                          ("mismatched_keys", "has weights of another shape than its config says"),
                          ("unexpected_keys", "has weights that its config has no place for")):
        if info[problem]:
            names = sorted(str(key if isinstance(key, str) else key[0]) for key in info[problem])
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(f"Model folder {folder} {what}: {', '.join(names[:3])}{more}.")
    return model


@contextmanager
def _without_report() -> Iterator[None]:
    """Inside, transformers prints no table of what is wrong with a folder: it becomes one line of ours."""
    before = get_verbosity()
    set_verbosity_error()
    try:
        yield
    finally:
        set_verbosity(before)


def implementation(dtype: torch.dtype | str) -> dict[str, str]:
    """How transformers is to build a model of that dtype."""
    # The grouped matrix product of experts does not exist in float64.
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    return {"attn_implementation": ATTENTION, **experts}
