"""The experts of every token in vLLM's key-value cache, through the routers' capture hooks.

A row of the table belongs to a slot of the cache and is written in the forward pass that writes the slot. It is as old
and as right as the keys and values there: a prefix that is found in the cache brings its experts along, a chunk of a
prompt writes its own slots, and what is computed again after a preemption or a change of weights is written again.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridrl.errors import ConfigError
from hybridrl.workers.routing import UNKNOWN, Mixture


class RoutingTable:
    """Experts by cache slot, of one vLLM worker in this process.

    Args:
        worker: vLLM's.
        mixture: of the model.
    Raises:
        ConfigError: no layer of the model keeps every token in the cache.
    """

    def __init__(self, worker: Any, mixture: Mixture):
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        self._runner, self._mixture = worker.model_runner, mixture
        config = self._runner.kv_cache_config
        whole = [i for i, group in enumerate(config.kv_cache_groups)
                 if isinstance(group.kv_cache_spec, FullAttentionSpec) and not group.kv_cache_spec.sliding_window]
        if not whole:
            raise ConfigError("policy.routing_replay=rollout needs a model with full attention in some layer: this "
                              "one's cache forgets tokens, and their experts with them.")
        self._group, group = whole[0], config.kv_cache_groups[whole[0]]
        self._layer_name, self._block = group.layer_names[0], group.kv_cache_spec.block_size
        self._experts = torch.full((config.num_blocks * self._block, mixture.layers, mixture.chosen), UNKNOWN,
                                   dtype=torch.int16)
        for number, layer in enumerate(mixture_layers(self._runner.get_model())):
            layer.router.set_capture_fn(partial(self._capture, number))

    def _capture(self, layer: int, experts: Tensor) -> None:
        from vllm.forward_context import get_forward_context

        slots = get_forward_context().slot_mapping
        if self._layer_name in slots:  # a warm-up has none
            of_tokens = slots[self._layer_name][:len(experts)]
            written = of_tokens >= 0  # padding has none either
            self._experts[of_tokens[written], layer] = experts[:len(of_tokens)][written].to(torch.int16)

    def take(self, request_id: str, tokens: int) -> Tensor:
        """[tokens, layers, chosen], as they travel, of the first tokens of a request that runs or ended this step."""
        request = self._runner.requests.get(request_id)
        if request is None:
            return self._mixture.packed(self._mixture.unknown(tokens))
        position, blocks = torch.arange(tokens), torch.tensor(request.block_ids[self._group])
        slots = blocks[position // self._block] * self._block + position % self._block
        return self._mixture.packed(self._experts[slots].to(torch.int32))


def mixture_layers(model: torch.nn.Module) -> list[Any]:
    """vLLM's mixtures in a model, in order of layers."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    return [layer for layer in model.modules() if isinstance(layer, MoERunner)]
