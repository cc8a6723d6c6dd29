"""Low-rank adapters: y = W x + scaling * B (A x), with W frozen and A, B trained.

peft puts them into the model. To everyone outside of training there is still one model of full weights: `merged`
yields it under the names it had, with W + scaling * B A in the places of W, one weight at a time. Without the
adapters the model is the one it started from, which is the reference of a KL penalty.

Source: arXiv:2106.09685, section 4.1; rank-stabilized scaling: arXiv:2312.03732.
"""

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridrl.config import LoRAConfig
from hybridrl.errors import ConfigError

NAME = "default"
"""Name of the adapter inside peft's layers."""


def add_adapters(model: nn.Module, layers: Sequence[nn.Module], cfg: LoRAConfig, dtype: torch.dtype,
                 key: str = "policy.training") -> None:
    """Put an adapter around every linear layer of `layers` that `cfg.targets` names, and freeze the rest of `model`.

    A starts uniform in +-1/sqrt(inputs), B at 0: the model computes what it did before. On a model without values
    (meta device) neither has any.

    Args:
        model: the transformers model.
        layers: its decoder layers.
        dtype: of the adapters.
        key: of the options that `cfg` is in, for messages.
    Raises:
        ConfigError: a target that names no linear layer, with near matches.
    """
    targets = _target_names(model, layers, cfg.targets, key)
    # In a list, because in a mixture that it knows by name peft would take dense layers for experts.
    listed = [f"0.{name}" for name in targets]
    inject_adapter_in_model(_peft_config(cfg, listed), nn.ModuleList([model]), adapter_name=NAME,
                            low_cpu_mem_usage=True)
    model.peft_config = {NAME: _peft_config(cfg, targets)}
    generator = torch.Generator().manual_seed(cfg.seed)
    for _, layer in adapted(model):
        for factor in (layer.lora_A[NAME], layer.lora_B[NAME]):
            values = torch.empty_like(factor.weight, dtype=dtype)
            if layer.weight.device.type != "meta":
                bound = factor.in_features ** -0.5 if factor is layer.lora_A[NAME] else 0.0
                values = torch.empty(values.shape).uniform_(-bound, bound, generator=generator).to(dtype)
            factor.weight = nn.Parameter(values)


def _peft_config(cfg: LoRAConfig, targets: list[str]) -> LoraConfig:
    return LoraConfig(r=cfg.rank, lora_alpha=cfg.alpha, use_rslora=cfg.rank_stabilized, target_modules=targets,
                      lora_dropout=0.0, bias="none")


def _target_names(model: nn.Module, layers: Sequence[nn.Module], targets: Sequence[str], key: str) -> list[str]:
    """Names in `model` of the linear layers inside `layers` that `targets` asks for."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) in inside]
    found: set[str] = set()
    for target in targets:
        names = {name for name in linear if target == "all-linear" or f".{name}".endswith(f".{target}")}
        if not names:
            raise ConfigError(f"{key}.lora.targets: {_no_such_target(model, linear, target)}")
        found |= names
    return sorted(found)


def _no_such_target(model: nn.Module, linear: list[str], target: str) -> str:
    kinds = sorted({name.rpartition(".")[2] for name in linear})
    fused = [name for name, parameter in model.named_parameters()
             if parameter.ndim == 3 and target in name.split(".")]
    if fused:
        what = f"is {fused[0]}, the weights of several experts in one tensor, which adapters are not made for"
    else:
        what = "names no linear layer of the model's decoder layers"
    near = difflib.get_close_matches(target, [*kinds, *linear], n=3, cutoff=0.6)
    hint = f" Did you mean {', '.join(near)}?" if near else ""
    return f"{target!r} {what}.{hint} Linear layers: {', '.join(kinds) or 'none'}."


def adapted(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """Layers with an adapter, by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes what it did before it got adapters."""
    # Not enable_adapters(False), which also clears requires_grad: FSDP looks at that once, in its first forward.
    for _, layer in adapted(model):
        layer._disable_adapters = True
    try:
        yield
    finally:
        for _, layer in adapted(model):
            layer._disable_adapters = False


@torch.no_grad()
def merged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Full parameters, detached, in model order, under their names in the model without adapters.

    W + scaling * B A is made when it is drawn, by shard, in the adapter's dtype. Every rank must draw all, because A
    is gathered; the rest shares memory with the model.
    """
    layers = {id(layer.get_base_layer().weight): layer for _, layer in adapted(model)}
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            layer = layers.get(id(parameter))
            whole = parameter.detach() if layer is None else _merge(layer)
            yield name.replace(".base_layer.", "."), whole


def _merge(layer: LoraLayer) -> Tensor:
    weight, a, b = layer.get_base_layer().weight, layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
    scaling = layer.scaling[NAME]
    if not isinstance(weight, DTensor):
        return torch.addmm(weight.to(b.dtype), b, a, alpha=scaling)
    # W and B have the same rows, so that a rank holds the same ones of both.
    rows = torch.addmm(weight.to_local().to(b.dtype), b.to_local(), a.full_tensor(), alpha=scaling)
    return DTensor.from_local(rows, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape,
                              stride=weight.stride())


def adapters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The adapters, detached, as `<layer>.lora_A.weight` and `<layer>.lora_B.weight`: peft's names in files."""
    for name, layer in adapted(model):
        yield f"{name}.lora_A.weight", layer.lora_A[NAME].weight.detach()
        yield f"{name}.lora_B.weight", layer.lora_B[NAME].weight.detach()


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter."""
    return ".lora_A." in name or ".lora_B." in name
