"""One model on the devices with its optimizer: how it is loaded, handed out, saved, exported, and moved aside."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from hybridrl.config import ModelConfig, TrainingConfig, check
from hybridrl.errors import PhaseError, TrainingError
from hybridrl.workers.training.attention import choose_kernel
from hybridrl.workers.training.checkpoint import load_state, save_state
from hybridrl.workers.training.context import ContextParallel
from hybridrl.workers.training.costs import model_costs
from hybridrl.workers.training.export import export_adapter, export_model
from hybridrl.workers.training.lora import adapted, adapters, merged
from hybridrl.workers.training.mesh import local, make_mesh
from hybridrl.workers.training.models import PolicyModel, compute_dtype, load_model
from hybridrl.workers.training.optimizer import Optimizer


class ShardedModel:
    """One model, sharded over all ranks or groups of them, with its optimizer.

    The default process group must be initialised, also for one rank. All methods but `num_parameters` and
    `memory` are collective: every rank calls them in the same order.
    """

    def __init__(self, model: ModelConfig, cfg: TrainingConfig, device: torch.device, trainable: bool = True,
                 dtype: torch.dtype = torch.float32, module: type[PolicyModel] = PolicyModel,
                 key: str = "policy.training"):
        """Load the folder `model.path`.

        Args:
            trainable: False makes a frozen model without optimizer (a reference), kept in the compute dtype.
            dtype: of the master weights.
            module: PolicyModel, or ValueModel for a critic.
            key: of `cfg` in a recipe's options, for messages.
        Raises:
            ModelError: the folder is missing, half-written, does not fit its config, or can't be split as `cfg` says.
            ConfigError: groups of ranks in `cfg` that don't divide the ranks, a target of `lora` that names no layer.
        """
        self.cfg, self.device, self.trainable, self.key = cfg, device, trainable, key
        self.mesh = make_mesh(device, cfg.shard_ranks, key)
        self.context = ContextParallel(device, cfg.context_parallel, key) if cfg.context_parallel > 1 else None
        self.offloaded: set[str] = set()
        """Which of `parameters` and `optimizer` are in CPU memory."""
        check_offload(cfg, device, key)
        self.model = load_model(module, model, self.mesh, device, dtype, trainable, cfg, self.context, key)
        self.costs = model_costs(self.model)
        self.kernel = choose_kernel(cfg.attention, device, compute_dtype(device) or dtype, self.model.head_size, key)
        self.shares = (device.type == "cpu" and dtype == torch.float32
                       and self.context is None and self.model.mixture is None)
        """Whether a micro-batch feeds a prompt that rows have in common once. Experts are kept by the fed tokens of
        each row; and where a gradient is rounded on its way, to bfloat16 on GPUs, to float32 in the norms of a float64
        model, it would be rounded after it is added up over rows rather than before."""
        self.sharded = any(isinstance(p, DTensor) for p in self.model.parameters())
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.accumulates = self.sharded and 4 * sum(p.numel() for p in trained) <= cfg.whole_gradient_gib * 2**30
        """Whether gradients stay whole on each rank until the last micro-batch."""
        group = self.mesh.get_group("shard") if self.sharded else None
        self.optimizer = Optimizer(trained, cfg, group, self.model.matrices(), key) if trainable else None

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; tied ones count once."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def adapted(self) -> list[str]:
        """Names of the layers that have an adapter, in the transformers model."""
        return [name for name, _ in adapted(self.model.causal_lm)]

    def weights(self) -> Iterator[tuple[str, DTensor]]:
        """Parameters by their name in the transformers model, as detached DTensors that share memory with the engine.

        Model order; a tied parameter comes once, under the name of its first use. A weight with an adapter comes
        with it merged in, made when it is drawn: every rank draws all. Buffers that belong to a saved model (the bias
        of some routers) come last, whole on every rank.
        """
        yield from self._distributed(merged(self.model.causal_lm))
        saved = self.model.causal_lm.state_dict().keys()
        for name, buffer in self.model.causal_lm.named_buffers():
            if name in saved:
                yield name, DTensor.from_local(buffer, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)

    def adapters(self) -> Iterator[tuple[str, DTensor]]:
        """The adapters alone, `<layer>.lora_A.weight` [rank, inputs] and `<layer>.lora_B.weight` [outputs, rank]."""
        yield from self._distributed(adapters(self.model.causal_lm))

    def _distributed(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, DTensor]]:
        for name, value in tensors:
            if not isinstance(value, DTensor):
                value = DTensor.from_local(value, self.mesh, [Shard(0)], run_check=False)
            yield name, value.to(self.device) if self.cfg.offload == "always" else value

    def save(self, folder: Path, numbers: Mapping[str, int] | None = None) -> None:
        """Write what is trained, the optimizer's state and the step counters into a new folder, each rank its shards.

        Args:
            numbers: further ones to keep, for the caller of `load`.
        Raises CheckpointError on every rank when any of them can't write, and TrainingError for a frozen model.
        """
        self._need("parameters", "optimizer")
        optimizer = self._trained()
        save_state(Path(folder), self._state(),
                   {"steps": optimizer.steps, "skipped": optimizer.skipped_in_a_row, **(numbers or {})})

    def load(self, folder: Path) -> dict[str, int]:
        """Read what `save` wrote, on any number of ranks; the next update is the one that would have followed.

        Returns the numbers that were saved.
        Raises CheckpointError naming a missing or truncated file, or what does not fit this model.
        """
        self._need("parameters", "optimizer")
        optimizer = self._trained()
        numbers = load_state(Path(folder), self._state())
        optimizer.restore(numbers["steps"], numbers["skipped"])
        return numbers

    def export(self, folder: Path, tokenizer: Any) -> None:
        """Write the model and its tokenizer as a Hugging Face folder, in the dtype of the folder it came from.

        Adapters are merged; with `lora.export_adapter` they are also in peft's format in `folder/adapter`, in float32.
        Raises ModelError on every rank when rank 0 can't write.
        """
        self._need("parameters")
        dtype = self.model.stored_dtype
        export_model(Path(folder), _whole_on_first(self.weights(), dtype), self.model.causal_lm, dtype, tokenizer)
        if self.cfg.lora.export_adapter:
            export_adapter(Path(folder) / "adapter", _whole_on_first(self.adapters(), torch.float32),
                           self.model.causal_lm.peft_config)

    def offload(self, parameters: bool = True) -> None:
        """Move the optimizer's state, and `parameters` too unless told otherwise, to CPU memory; frees gradients.

        Updates and checkpoints need `onload` first; log-probs, weights and exports do when parameters were moved.
        Does nothing on CPU, with `offload=never`, and with `offload=always`, where all of it is there already.
        """
        if self.device.type != "cuda" or self.cfg.offload not in ("auto", "rollout"):
            return
        if self.optimizer is not None:
            self.optimizer.zero_grad()
            self.optimizer.move("cpu")
        if parameters:
            self.model.to("cpu")
        self.offloaded |= {"optimizer", "parameters"} if parameters else {"optimizer"}
        torch.cuda.empty_cache()

    def onload(self) -> None:
        """Bring back what `offload` moved."""
        if self.offloaded:
            self.model.to(self.device)
            if self.optimizer is not None:
                self.optimizer.move(self.device)
            self.offloaded.clear()

    def memory(self) -> dict[str, int]:
        """Bytes on this rank: `parameters`, `gradients`, `optimizer`; on CUDA also `allocated` and `peak`."""
        parameters = list(self.model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        sizes = {"parameters": sum(local(p).nbytes for p in parameters),
                 "gradients": sum(local(g).nbytes for g in gradients),
                 "optimizer": self.optimizer.held_bytes if self.optimizer else 0}
        if self.device.type == "cuda":
            sizes |= {"allocated": torch.cuda.memory_allocated(self.device),
                      "peak": torch.cuda.max_memory_allocated(self.device)}
        return sizes

    def _need(self, *parts: str) -> None:
        if self.offloaded & set(parts):
            raise PhaseError(f"{' and '.join(sorted(self.offloaded))} of training are offloaded; "
                             f"onload() brings them back.")

    def _trained(self) -> Optimizer:
        if self.optimizer is None:
            raise TrainingError("this model was loaded with trainable=False: it has no optimizer.")
        return self.optimizer

    def _state(self) -> dict[str, Tensor]:
        kept = self._trained().tensors()
        state: dict[str, Tensor] = {}
        for name, parameter in self.model.causal_lm.named_parameters():
            if parameter.requires_grad:
                state[f"model/{name}"] = parameter.detach()
                state |= {f"optimizer/{name}/{key}": tensor for key, tensor in kept[parameter].items()}
        return state


def _whole_on_first(tensors: Iterable[tuple[str, DTensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """The whole tensors on rank 0, on CPU; nothing elsewhere. Collective."""
    state = {}
    for name, value in tensors:
        whole = value.full_tensor()
        if dist.get_rank() == 0:
            state[name] = whole.to("cpu", dtype)
    return state


def check_offload(cfg: TrainingConfig, device: torch.device, key: str) -> None:
    """Raise ConfigError for an offload that was asked for on a device without memory of its own."""
    check(device.type == "cuda" or cfg.offload in ("auto", "never"), f"{key}.offload", cfg.offload,
          f"auto or never on a {device.type} device, which has no memory of its own to free")
