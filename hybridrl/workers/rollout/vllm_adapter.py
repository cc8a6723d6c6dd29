"""Adapters for a vLLM engine that keeps its base weights."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hybridrl.config import LoRAConfig
from hybridrl.errors import SyncError
from hybridrl.workers.rollout.vllm_weights import Layout
from hybridrl.workers.weights.regions import Write

ADAPTER_ID = 1


def load_adapter(worker: Any, layout: Layout, writes: Iterable[list[Write]],
                 inspect: Callable[[str, Tensor], None] | None, cfg: LoRAConfig) -> None:
    """Run in vLLM's worker: put the adapter in the place of the one before, and check that every part has a layer.

    Raises SyncError naming factors that did not arrive whole, or layers for which vLLM has no adapters.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    factors = _assembled(layout, writes)
    if inspect is not None:
        for name, values in factors.items():
            inspect(name, values)
    layers = {}
    for name, a in factors.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            b = factors[f"{layer}.lora_B.weight"] * cfg.scaling
            layers[layer] = LoRALayerWeights(layer, cfg.rank, cfg.rank, a, b, scaling=1.0)
    adapter, manager = LoRAModel(ADAPTER_ID, cfg.rank, layers), worker.model_runner.lora_manager._adapter_manager
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapter)  # joins what vLLM holds in one, queries and keys for instance
    strays = sorted(set(adapter.loras) - set(manager.modules))
    if strays:
        raise SyncError(f"vLLM has no adapters for {len(strays)} layers: {', '.join(strays[:5])}. "
                        "policy.sync.lora=merged does without them.")
    manager.activate_adapter(ADAPTER_ID)


def _assembled(layout: Layout, writes: Iterable[list[Write]]) -> dict[str, Tensor]:
    sizes = {copy.parameter: copy.target.size for copy in layout.copies}
    missing = {copy.parameter: copy.target.numel for copy in layout.copies}
    factors: dict[str, Tensor] = {}
    for name, target, values in (write for some in writes for write in some):
        if name not in factors:
            factors[name] = torch.empty(sizes[name], dtype=values.dtype, device=values.device)
        target.of(factors[name]).copy_(values)
        missing[name] -= values.numel()
    if late := sorted(name for name, elements in missing.items() if elements):
        raise SyncError(f"weight sync left {len(late)} factors of adapters unwritten: {', '.join(late[:5])}.")
    return factors
