"""AdamW over parameter shards: schedule, global gradient norm, steps skipped for non-finite gradients."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridrl.config import TrainingConfig
from hybridrl.errors import TrainingError


def learning_rate(cfg: TrainingConfig, step: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Warm-up: peak * (step + 1) / warmup_steps. Then, with x = (step - warmup_steps) / (total_steps - warmup_steps)
    capped at 1: constant 1, linear 1 - x, cosine (1 + cos(pi x)) / 2, times the peak.
    """
    if step < cfg.warmup_steps:
        return cfg.learning_rate * (step + 1) / cfg.warmup_steps
    if cfg.schedule == "constant":
        return cfg.learning_rate
    done = min(1.0, (step - cfg.warmup_steps) / (cfg.total_steps - cfg.warmup_steps))
    factor = 1 - done if cfg.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return cfg.learning_rate * factor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Optimizer:
    """AdamW with the schedule and the safeguards of TrainingConfig.

    Attributes: steps (taken), skipped_in_a_row.
    """

    def __init__(self, parameters: list[nn.Parameter], cfg: TrainingConfig, group: dist.ProcessGroup | None):
        """`group` is the process group that one copy of the parameters is sharded over; None when they are whole."""
        self.cfg, self.group = cfg, group
        self.steps = self.skipped_in_a_row = 0
        self.adamw = torch.optim.AdamW(parameters, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2),
                                       weight_decay=cfg.weight_decay, fused=True)
        self.parameters = parameters

    @torch.no_grad()
    def step(self) -> tuple[float, float, bool]:
        """Clip, step, clear gradients; returns the norm before clipping, the learning rate and whether it was skipped.

        Raises TrainingError after more than `max_skipped_steps` skipped steps in a row.
        """
        grads = [local(p.grad) for p in self.parameters if p.grad is not None]
        norm, lr = self._norm(grads), learning_rate(self.cfg, self.steps)
        skipped = not math.isfinite(norm)
        if skipped:
            self.skipped_in_a_row += 1
        else:
            self.skipped_in_a_row = 0
            if norm > self.cfg.max_grad_norm:
                torch._foreach_mul_(grads, self.cfg.max_grad_norm / norm)
            self.adamw.param_groups[0]["lr"] = lr
            self.adamw.step()
            self.steps += 1
        self.adamw.zero_grad(set_to_none=True)
        if self.skipped_in_a_row > self.cfg.max_skipped_steps:
            raise TrainingError(f"{self.skipped_in_a_row} optimizer steps in a row had non-finite gradients; "
                                f"training.max_skipped_steps is {self.cfg.max_skipped_steps}.")
        return norm, lr, skipped

    def moments(self) -> dict[nn.Parameter, tuple[Tensor, Tensor]]:
        """AdamW's running averages of gradient and square by parameter; zeros are made before the first step."""
        state = self.adamw.state
        for parameter in self.parameters:
            if parameter not in state:
                state[parameter] = {"step": torch.zeros((), device=parameter.device),
                                    "exp_avg": torch.zeros_like(parameter.detach()),
                                    "exp_avg_sq": torch.zeros_like(parameter.detach())}
        return {p: (state[p]["exp_avg"], state[p]["exp_avg_sq"]) for p in self.parameters}

    def restore(self, steps: int, skipped_in_a_row: int) -> None:
        """Set the counters; the running averages are filled in place by the caller."""
        self.steps, self.skipped_in_a_row = steps, skipped_in_a_row
        for state in self.adamw.state.values():
            state["step"].fill_(steps)

    def move(self, device: torch.device | str) -> None:
        """Bring the running averages to a device."""
        for state in self.adamw.state.values():
            for name, tensor in state.items():
                state[name] = tensor.to(device)

    def _norm(self, grads: list[Tensor]) -> float:
        squares = torch.stack(torch._foreach_norm(grads)).double().square().sum()
        if self.group is not None:
            dist.all_reduce(squares, group=self.group)
        return math.sqrt(float(squares)) if torch.isfinite(squares) else float(squares)
