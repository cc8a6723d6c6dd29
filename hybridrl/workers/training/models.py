"""Models as modules: a Hugging Face causal language model that returns log-probs, or values, loaded and sharded.

`forward` is the one way in, so that FSDP's hooks around it gather every weight it uses, the head included.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from hybridrl.config import LoRAConfig, ModelConfig, TrainingConfig
from hybridrl.errors import ModelError
from hybridrl.models import resolve_model
from hybridrl.workers.routing import Mixture, Routing, decoder_layers, route
from hybridrl.workers.training.attention import Pack
from hybridrl.workers.training.compiled import compile_layers
from hybridrl.workers.training.context import ContextParallel, check_heads
from hybridrl.workers.training.first_rank import on_first_rank
from hybridrl.workers.training.log_probs import token_log_probs
from hybridrl.workers.training.lora import add_adapters
from hybridrl.workers.training.reading import implementation, read, read_config
from hybridrl.workers.training.recompute import recompute


class PolicyModel(nn.Module):
    """Log-probs of the response tokens of one packed row."""

    loads: Any = AutoModelForCausalLM
    """The transformers class that reads a folder for it."""
    context: ContextParallel | None = None
    """The ranks that share rows; None where each has its own."""
    mixture: Mixture | None = None
    """The shape of its routing; None for a dense model."""

    def __init__(self, causal_lm: PreTrainedModel, stored_dtype: torch.dtype):
        super().__init__()
        self.causal_lm = causal_lm
        self.stored_dtype = stored_dtype
        """Dtype of the folder it was loaded from."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, predictors: Tensor, targets: Tensor,
                pack: Pack, temperature: float, chunk: int, entropies: bool,
                routing: Routing | None = None) -> tuple[Tensor | None, ...]:
        """Shapes as in MicroBatch, or [N, K] targets; returns what `outputs` does, for all N response tokens.

        A `routing` of the T tokens says which experts they go to, and keeps which they would; not with a context.
        """
        if self.context is None:
            hidden = self._hidden(input_ids, position_ids, pack, routing)[predictors]
            return self.outputs(hidden, targets, temperature, chunk, entropies)
        share = self.context.share(input_ids, position_ids, predictors, targets, pack)
        hidden = self._hidden(share.input_ids, share.position_ids, share.pack)[share.predictors]
        outputs = self.outputs(hidden, share.targets, temperature, chunk, entropies)
        return tuple(None if out is None else self.context.join(out, share.counts) for out in outputs)

    def outputs(self, hidden: Tensor, targets: Tensor, temperature: float, chunk: int,
                entropies: bool) -> tuple[Tensor | None, ...]:
        """Log-probs [N] and entropies [N] or None, from the hidden states [N, H] that predict the targets [N]."""
        head = self.causal_lm.get_output_embeddings()
        return token_log_probs(hidden, head.weight, head.bias, targets, temperature, chunk, entropies)

    def _hidden(self, input_ids: Tensor, position_ids: Tensor, pack: Pack, routing: Routing | None = None) -> Tensor:
        """Final hidden states [T, H]."""
        follow = {} if routing is None else {"routing": routing}
        return self.causal_lm.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False,
                                         pack=pack, **follow).last_hidden_state[0]

    @property
    def head_size(self) -> int:
        """Elements of an attention head."""
        config = self.causal_lm.config.get_text_config()
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def layers(self) -> list[nn.Module]:
        """The decoder layers: the units of sharding and of activation checkpointing."""
        return decoder_layers(self.causal_lm)

    def matrices(self) -> list[nn.Parameter]:
        """The trained parameters of two dimensions within the layers: neither embeddings nor heads."""
        return [p for layer in self.layers() for p in layer.parameters() if p.requires_grad and p.dim() == 2]

    def adapt(self, cfg: LoRAConfig, dtype: torch.dtype, key: str = "policy.training") -> None:
        """Train adapters in `dtype` instead of the model's own weights."""
        add_adapters(self.causal_lm, self.layers(), cfg, dtype, key)


class ValueHead(nn.Module):
    """One number from each hidden state; all zero at first."""

    def __init__(self, hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """[N, H] to [N], in float32 or better: bfloat16 is too coarse for the difference of two values."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return hidden.to(wide) @ self.weight.to(wide)


class ValueModel(PolicyModel):
    """A critic: a value head in the place of the language-model head, tied or not."""

    def __init__(self, causal_lm: PreTrainedModel, stored_dtype: torch.dtype):
        super().__init__(causal_lm, stored_dtype)
        embedding = causal_lm.get_input_embeddings().weight
        causal_lm.set_output_embeddings(ValueHead(causal_lm.config.hidden_size, embedding.dtype))

    def adapt(self, cfg: LoRAConfig, dtype: torch.dtype, key: str = "policy.training") -> None:
        """Train adapters and the value head."""
        super().adapt(cfg, dtype, key)
        self.causal_lm.get_output_embeddings().to(dtype).requires_grad_()

    def outputs(self, hidden: Tensor, targets: Tensor, temperature: float, chunk: int,
                entropies: bool) -> tuple[Tensor | None, ...]:
        """The value [N] of the state before each response token; which token follows, `targets`, is not read."""
        return self.causal_lm.get_output_embeddings()(hidden), None


def load_model(module: type[PolicyModel], cfg: ModelConfig, mesh: DeviceMesh, device: torch.device,
               dtype: torch.dtype, trainable: bool, training: TrainingConfig,
               context: ContextParallel | None = None, key: str = "policy.training") -> PolicyModel:
    """Load a model folder, sharded over the mesh.

    Rank 0 reads the weights in their stored dtype and hands out shards one parameter at a time: nobody else
    ever holds a whole model. One CPU rank keeps plain tensors, which saves FSDP's copies.

    Args:
        module: what the model returns; a head of its own starts as the class makes it.
        dtype: of the parameters that are trained; compute is bfloat16 on CUDA and this dtype elsewhere, and frozen
            parameters are kept in the dtype of compute.
        training: adapters and activation checkpointing, both of a trainable model alone; compiled layers; where
            parameters live.
        context: the ranks that share rows.
        key: of `training` in a recipe's options, for messages.
    Raises:
        ModelError: on every rank, naming what is wrong with the folder. ConfigError: adapters for no layer.
    """
    lora = adapters_of(training, trainable)
    kept = compute_dtype(device) or dtype if lora.rank or not trainable else dtype
    folder = resolve_model(cfg.path)
    config = read_config(cfg)
    if context is not None:
        check_heads(config.get_text_config().num_attention_heads, context.size, key)
    stored_dtype = config.dtype or torch.float32
    if mesh.size() == 1 and device.type == "cpu":
        model = module(read(module.loads, cfg, dtype), stored_dtype)
        prepare(model, trainable, training, dtype, key)
        return model
    with torch.device("meta"):
        model = module(module.loads.from_config(
            config, dtype=kept, trust_remote_code=cfg.trust_remote_code, **implementation(kept)), stored_dtype)
    if (folder / "generation_config.json").exists():
        model.causal_lm.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    prepare(model, trainable, training, dtype, key)
    source, dtypes = _read_on_first(module, cfg, lora)
    shard(model, mesh, device, training.offload == "always")
    _hand_out(model.causal_lm, source, dtypes, mesh, device)
    model.context = context
    return model


def adapters_of(training: TrainingConfig, trainable: bool) -> LoRAConfig:
    """The adapters of a model: those of its options, none of a frozen one."""
    return training.lora if trainable else LoRAConfig()


def prepare(model: PolicyModel, trainable: bool, training: TrainingConfig, dtype: torch.dtype, key: str) -> None:
    """Put in what `training` asks for: adapters, compiled layers, recomputation. Works without values, too."""
    lora = adapters_of(training, trainable)
    # eval() only turns dropout and router noise off here: log-probs and updates must see the same function.
    model.eval().requires_grad_(trainable)
    if lora.rank:
        model.adapt(lora, dtype, key)
    if training.compile:
        compile_layers(model.layers(), key)
    model.mixture = route(model.causal_lm)
    if trainable:
        recompute(model.layers(), training.gradient_checkpointing)


def compute_dtype(device: torch.device) -> torch.dtype | None:
    """Dtype of forward and backward passes; None is that of the parameters."""
    return torch.bfloat16 if device.type == "cuda" else None


def shard(model: PolicyModel, mesh: DeviceMesh, device: torch.device, offload: bool = False) -> None:
    """Shard a meta model by layer, and allocate this rank's shards without values: on `device`, or in CPU memory.

    With `offload` parameters come to the device one layer at a time, for as long as it computes, and gradients go back.
    """
    compute = compute_dtype(device)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32 if compute else None)
    where = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    for layer in model.layers():
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=where)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=where)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            # The loss already carries global coefficients: gradients are summed over ranks, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu" if offload else device)
    for module in model.modules():  # FSDP moves parameters alone
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))


def _read_on_first(module: type[PolicyModel], cfg: ModelConfig,
                   lora: LoRAConfig) -> tuple[dict[str, Tensor], dict[str, torch.dtype]]:
    """Rank 0: all parameters and buffers by name, in stored dtypes; elsewhere none. On all ranks: their dtypes."""
    source: dict[str, Tensor] = {}

    def fill() -> dict[str, torch.dtype]:
        whole = module(read(module.loads, cfg, "auto"), torch.float32)
        if lora.rank:
            whole.adapt(lora, torch.float32)
        model = whole.causal_lm
        source.update({**dict(model.named_parameters()), **dict(model.named_buffers())})
        return {name: tensor.dtype for name, tensor in source.items()}

    return source, on_first_rank(fill, ModelError)


@torch.no_grad()
def _hand_out(model: PreTrainedModel, source: dict[str, Tensor], dtypes: dict[str, torch.dtype],
              mesh: DeviceMesh, device: torch.device) -> None:
    def whole(name: str, like: Tensor) -> Tensor:
        if dist.get_rank() == 0:
            return source.pop(name).to(device)
        return torch.empty(like.shape, dtype=dtypes[name], device=device)

    for name, parameter in model.named_parameters():
        parameter.copy_(distribute_tensor(whole(name, parameter), mesh, parameter.placements))
    for name, buffer in model.named_buffers():  # rotary frequencies, for instance: in no file, and lost on meta
        values = whole(name, buffer)
        dist.broadcast(values, src=0)
        buffer.copy_(values)
