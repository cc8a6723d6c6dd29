"""Optimizers over parameter shards: schedule, global gradient norm, steps skipped for non-finite gradients."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridrl.config import TrainingConfig
from hybridrl.errors import ConfigError, TrainingError
from hybridrl.workers.training.adamw_8bit import AdamW8bit
from hybridrl.workers.training.mesh import local
from hybridrl.workers.training.muon import Muon


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


class AdamW(torch.optim.AdamW):
    """torch's, with its state by name."""

    def tensors(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The running averages of a parameter; zero before its first step."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state |= {name: torch.zeros_like(parameter.detach()) for name in ("exp_avg", "exp_avg_sq")}
        return {name: state[name] for name in ("exp_avg", "exp_avg_sq")}


def make_optimizers(parameters: list[nn.Parameter], matrices: list[nn.Parameter],
                    cfg: TrainingConfig, key: str) -> list[AdamW | AdamW8bit | Muon]:
    """The optimizers that `cfg.optimizer` stands for: each parameter belongs to one of them.

    Raises ConfigError when it is not installed or has nothing to do.
    """
    options: dict[str, Any] = dict(lr=cfg.learning_rate, weight_decay=cfg.weight_decay)
    adam = options | dict(betas=(cfg.beta1, cfg.beta2))
    if cfg.optimizer == "adamw_8bit":
        try:
            return [AdamW8bit(parameters, **adam)]
        except ImportError as error:
            raise ConfigError(f'{key}.optimizer=adamw_8bit needs torchao; run pip install "hybridrl[adamw-8bit]" or '
                              'choose adamw.') from error
    if cfg.optimizer == "muon":
        if not matrices:
            raise ConfigError(f"{key}.optimizer=muon needs a model with matrices in its layers; use adamw.")
        taken = set(matrices)
        others = [p for p in parameters if p not in taken]
        return [Muon(matrices, momentum=cfg.muon_momentum, **options),
                *([AdamW(others, fused=True, **adam)] if others else [])]
    return [AdamW(parameters, fused=True, **adam)]


class Optimizer:
    """The optimizer of TrainingConfig with its schedule and safeguards.

    Attributes: steps (taken), skipped_in_a_row.
    """

    def __init__(self, parameters: list[nn.Parameter], cfg: TrainingConfig, group: dist.ProcessGroup | None,
                 matrices: Sequence[nn.Parameter] = (), key: str = "policy.training"):
        """Make the optimizer of `cfg`.

        Args:
            group: the process group that one copy of the parameters is sharded over; None when they are whole.
            matrices: those of the parameters that are 2-dimensional and within layers.
            key: of `cfg` in a recipe's options, for messages.
        """
        self.cfg, self.group, self.parameters, self.key = cfg, group, parameters, key
        self.steps = self.skipped_in_a_row = 0
        self.optimizers = make_optimizers(parameters, list(matrices), cfg, key)

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
            for optimizer in self.optimizers:
                optimizer.param_groups[0]["lr"] = lr
                optimizer.step()
            self.steps += 1
        self.zero_grad()
        if self.skipped_in_a_row > self.cfg.max_skipped_steps:
            raise TrainingError(f"{self.skipped_in_a_row} optimizer steps in a row had non-finite gradients; "
                                f"{self.key}.max_skipped_steps is {self.cfg.max_skipped_steps}.")
        return norm, lr, skipped

    def zero_grad(self) -> None:
        """Free the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def tensors(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """What is kept for each parameter between steps, by name, sharded as the parameter is."""
        return {p: optimizer.tensors(p) for optimizer in self.optimizers for p in optimizer.param_groups[0]["params"]}

    def restore(self, steps: int, skipped_in_a_row: int) -> None:
        """Set the counters; the caller fills `tensors` in place."""
        self.steps, self.skipped_in_a_row = steps, skipped_in_a_row
        for state in self._states():
            if "step" in state:
                state["step"].fill_(steps)

    def move(self, device: torch.device | str) -> None:
        """Bring what is kept to a device."""
        for state in self._states():
            for name, tensor in state.items():
                state[name] = tensor.to(device)

    @property
    def held_bytes(self) -> int:
        """Bytes of what is kept on this rank; 0 before the first step."""
        return sum(local(tensor).nbytes for state in self._states() for tensor in state.values())

    def bytes_to_come(self) -> int:
        """Bytes that the first step will add to those on this rank; 0 after it. Leaves no trace."""
        if self.held_bytes:
            return 0
        size = sum(local(tensor).nbytes for kept in self.tensors().values() for tensor in kept.values())
        for optimizer in self.optimizers:
            optimizer.state.clear()
        return size

    def _states(self) -> list[dict[str, Tensor]]:
        return [state for optimizer in self.optimizers for state in optimizer.state.values()]

    def _norm(self, grads: list[Tensor]) -> float:
        squares = torch.stack(torch._foreach_norm(grads)).double().square().sum()
        if self.group is not None:
            dist.all_reduce(squares, group=self.group)
        return math.sqrt(float(squares)) if torch.isfinite(squares) else float(squares)
