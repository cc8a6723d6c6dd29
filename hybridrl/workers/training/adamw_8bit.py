"""AdamW with running averages in 8 bits, on shards, with the quantised tensors of torchao."""

import torch
import torch.distributed.tensor as dtensor
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridrl.workers.training.mesh import local

BLOCKS = range(256, 31, -1)
"""Elements that may share a scale, best first."""
SMALLEST = 4096
"""Parameters with fewer elements keep their averages in float32."""
SIGNED = {"exp_avg": True, "exp_avg_sq": False}


class AdamW8bit(torch.optim.Optimizer):
    """As torch.optim.AdamW; the running averages take about 2 bytes a parameter instead of 8.

    A block of elements shares a scale and lies within a row, so that values depend neither on how rows are sharded
    nor on the number of ranks that load a checkpoint. Parameters without such blocks, small ones and vectors keep
    float32 averages.
    Source: arXiv:2110.02861, section 2.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, betas: tuple[float, float], weight_decay: float):
        """Raises ImportError when torchao is not installed."""
        from torchao.optim.adam import single_param_adam
        from torchao.optim.quant_utils import create_dynamic_map
        from torchao.optim.subclass_8bit import OptimState8bit

        super().__init__(parameters, dict(lr=lr, betas=betas, weight_decay=weight_decay))
        self._quantised = OptimState8bit
        self._values = {name: torch.tensor(create_dynamic_map(signed)) for name, signed in SIGNED.items()}
        # One kernel on CUDA; compiling for a CPU takes longer than it saves.
        self._update = torch.compile(single_param_adam, fullgraph=True, dynamic=False) \
            if parameters[0].is_cuda else single_param_adam

    def tensors(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state of a parameter, sharded as it is; zero before its first step."""
        state, block = self.state[parameter], block_size(parameter.shape)
        if not state:
            state["step"] = torch.zeros(())
            for name in SIGNED:
                if block:
                    blocks = torch.Size((parameter.shape[0], parameter[0].numel() // block))
                    state[f"{name}/codes"] = zeros(parameter, parameter.shape, torch.uint8)
                    state[f"{name}/scale"] = zeros(parameter, blocks, torch.float32)
                else:
                    state[name] = zeros(parameter, parameter.shape, torch.float32)
        return {name: tensor for name, tensor in state.items() if name != "step"}

    @torch.no_grad()
    def step(self) -> None:
        """One step of every parameter that has a gradient."""
        (group,) = self.param_groups
        lr = torch.tensor(group["lr"])
        for p in group["params"]:
            if p.grad is not None and local(p).numel():
                self.tensors(p)
                self.state[p]["step"] += 1
                self._update(local(p), local(p.grad), self.state[p]["step"], self._average(p, "exp_avg"),
                             self._average(p, "exp_avg_sq"), None, lr, *group["betas"], group["weight_decay"], 1e-8,
                             True, False)

    def _average(self, parameter: nn.Parameter, name: str) -> Tensor:
        """This rank's part of a running average, as a tensor that quantises what is copied into it."""
        state = self.state[parameter]
        if name in state:
            return local(state[name])
        codes, scale = local(state[f"{name}/codes"]), local(state[f"{name}/scale"])
        return self._quantised(codes, scale.view(-1), self._values[name].to(codes.device), SIGNED[name], torch.float32)


def block_size(shape: torch.Size) -> int:
    """Elements of a row that share a scale; 0 where a parameter is kept in float32."""
    row = shape.numel() // shape[0] if len(shape) > 1 and shape.numel() >= SMALLEST else 0
    return next((block for block in BLOCKS if row and row % block == 0), 0)


def zeros(parameter: nn.Parameter, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Zeros whose rows are sharded as those of the parameter."""
    if isinstance(parameter, DTensor):
        made = dtensor.zeros(shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=parameter.placements)
        return made.to(parameter.device)  # which is the CPU with offload=always
    return torch.zeros(shape, dtype=dtype, device=parameter.device)
