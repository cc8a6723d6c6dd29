"""vLLM's own side of a weight sync: where its parameters take their elements from, and writing them.

On CPU vLLM packs GEMM weights and drops the plain ones. Both functions therefore use the machinery of its
layerwise reload: a layer's parameters are restored to the form in which they are loaded, on the meta device or in
memory, and packed again once they are filled.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybridrl.errors import ModelError, SyncError
from hybridrl.workers.weights.recorder import Recorder
from hybridrl.workers.weights.regions import Copy, Region, Write


@dataclass(frozen=True, slots=True)
class Layout:
    """How a checkpoint fills one rank's parameters; they are named `layer.parameter`, a shared one by each layer."""

    copies: list[Copy]
    fills: list[tuple[str, Region, float]]
    """Elements that are set to a constant: vocabulary padding."""


def find_layout(worker: Any, weights: Mapping[str, Tensor],
                rename: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> Layout:
    """Run the model's loaders once, on tensors without values, and note what they copy where.

    Raises ModelError for a loader that computes, SyncError naming parameters that are not filled.
    """
    from vllm.config import set_current_vllm_config

    model = worker.model_runner.get_model()
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        restore(model)
        try:
            return record_loading(model, weights, rename)
        finally:
            _put_back(model)


def record_loading(model: nn.Module, weights: Mapping[str, Tensor],
                   rename: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> Layout:
    """The layout of a model whose parameters are as they are loaded; nothing is written."""
    parameters = parameters_of(model)
    with Recorder(weights, {name: getattr(layer, attribute)
                            for name, (layer, attribute) in parameters.items()}) as recorder:
        model.load_weights(iter(rename(weights).items()))
    if recorder.computed:
        raise ModelError(f"vLLM computes new values while it loads {', '.join(sorted(recorder.computed)[:3])}, which a "
                         "weight sync can't follow. policy.rollout.engine=transformers runs this model.")
    _check_filled(parameters, recorder)
    return Layout(recorder.copies, recorder.fills)


def reload(worker: Any, layout: Layout, writes: Iterable[list[Write]],
           inspect: Callable[[str, Tensor], None] | None) -> None:
    """Make the writes; each layer is packed as soon as it is complete, so that few are held twice.

    Raises SyncError naming layers that did not receive everything.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

    model = worker.model_runner.get_model()
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        restore(model)
        try:
            layers = Layers(layout, parameters_of(model), inspect)
            for write in (write for some in writes for write in some):
                layers.write(write)
            layers.check_complete()
        finally:  # layers that are not complete get their old parameters back
            finalize_layerwise_reload(model, worker.model_runner.model_config)


class Layers:
    """The layers that are being filled."""

    def __init__(self, layout: Layout, parameters: dict[str, tuple[nn.Module, str]],
                 inspect: Callable[[str, Tensor], None] | None):
        self.parameters, self.inspect = parameters, inspect
        self.fills = layout.fills
        self.missing: dict[nn.Module, dict[str, int]] = {}
        """Elements that each parameter of a layer still waits for."""
        for copy in layout.copies:
            waits = self.missing.setdefault(parameters[copy.parameter][0], {})
            waits[copy.parameter] = waits.get(copy.parameter, 0) + copy.target.numel

    def write(self, write: Write) -> None:
        layer, attribute = self.parameters[write.parameter]
        if getattr(layer, attribute).is_meta:
            self.open(layer)
        write.target.of(getattr(layer, attribute)).copy_(write.values)
        waits = self.missing[layer]
        waits[write.parameter] -= write.values.numel()
        if not any(waits.values()):
            self.close(layer)

    def check_complete(self) -> None:
        missing = [f"{name} ({elements} elements)" for waits in self.missing.values()
                   for name, elements in waits.items() if elements]
        _refuse(missing)

    def open(self, layer: nn.Module) -> None:
        """Give a layer memory for its parameters as they are loaded: that of the packed ones where it fits."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import materialize_layer
        from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

        info = get_layerwise_info(layer)
        for name, restored in list(layer._parameters.items()):
            packed = info.kernel_tensors[0].get(name)
            if restored is not None and restored.is_meta and packed is not None and _alike(packed, restored):
                tensor = packed.detach()
                tensor.__class__, tensor.__dict__ = restored.__class__, restored.__dict__.copy()
                setattr(layer, name, tensor)
        if any(tensor.is_meta for tensor in get_layer_tensors(layer).values()):
            materialize_layer(layer, info)
        for name, region, value in self.fills:
            owner, attribute = self.parameters[name]
            if owner is layer:
                region.of(getattr(layer, attribute)).fill_(value)

    def close(self, layer: nn.Module) -> None:
        """Have a filled layer packed into the form in which it computes."""
        from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info

        if self.inspect is not None:
            for name in self.missing[layer]:
                self.inspect(name, getattr(layer, self.parameters[name][1]))
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and next(layer.parameters()).device.type == "cpu":
            method.moe_kernel = None  # a CPU kernel that exists already is not given the packed weights
        _layerwise_process(layer, get_layerwise_info(layer))


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def parameters_of(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Every parameter as (layer, attribute); a shared one once for each layer, for each layer packs its own."""
    return {f"{path}.{attribute}".removeprefix("."): (layer, attribute) for path, layer in model.named_modules()
            for attribute, parameter in layer._parameters.items() if parameter is not None}


def restore(model: nn.Module) -> None:
    """Put every layer's parameters, on the meta device, into the form in which they are loaded, and keep the others.

    vLLM's `initialize_layerwise_reload` without its wrapped loaders: only `find_layout` runs loaders.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
    from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_size

    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.kernel_tensors = get_layer_params_buffers(layer)
        info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
        restore_layer_on_meta(layer, info)
        info.load_numel_total = get_layer_size(layer)


def _put_back(model: nn.Module) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        _place_kernel_tensors(layer, info)
        info.reset()


def _check_filled(parameters: dict[str, tuple[nn.Module, str]], recorder: Recorder) -> None:
    from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

    tensors = {name: getattr(layer, attribute) for name, (layer, attribute) in parameters.items()}
    storages = {name: tensor.untyped_storage()._cdata for name, tensor in tensors.items()}
    filled = dict.fromkeys(storages.values(), 0)
    for name, region in [(c.parameter, c.target) for c in recorder.copies] + [fill[:2] for fill in recorder.fills]:
        filled[storages[name]] += region.numel
    _refuse([f"{name} ({filled[storages[name]]} of {get_tensor_load_numel(tensor)} elements)"
             for name, tensor in tensors.items() if filled[storages[name]] < get_tensor_load_numel(tensor)])


def _refuse(missing: list[str]) -> None:
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise SyncError(f"weight sync left {len(missing)} engine weights unwritten: {shown}.")
