"""The tensors that enter an algorithm: how a batch gives them, and checks of their shape, dtype and presence.

Every public function calls these checks first, so a wrong batch fails with the name of the argument.
"""

from typing import TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from hybridrl.batch import FIELDS, is_ragged, lengths, padded, require
from hybridrl.errors import BatchError

T = TypeVar("T")


def padded_columns(batch: TensorDict) -> dict[str, Tensor]:
    """The tensor columns of a batch under the names that the tables use: response columns padded to [B, R].

    `response_mask` is called `mask` there. Columns of prompts, of fed tokens and of objects are left out.
    """
    require(batch, "response_mask")
    sizes = lengths(batch["response_mask"])
    columns = {}
    for name in batch.keys():
        column = batch.get(name)
        if not isinstance(column, Tensor) or (name in FIELDS and FIELDS[name].shape in ("T", "FLK")):
            continue
        if not is_ragged(column):
            columns[name] = column
        elif torch.equal(lengths(column), sizes):
            columns[name] = padded(column)
    columns["mask"] = columns.pop("response_mask")
    return columns


def given(**tensors: Tensor | None) -> dict[str, Tensor]:
    """The optional columns that are not None, for the checks below."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def check_mask(mask: Tensor) -> None:
    """Raise BatchError unless `mask` is a [B, R] bool tensor."""
    if not isinstance(mask, Tensor):
        raise BatchError(f"'mask' must be a bool tensor [B, R], got {type(mask).__name__}.")
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise BatchError(f"'mask' must be bool [B, R], got {mask.dtype} {list(mask.shape)}.")


def check_tokens(mask: Tensor, **tensors: Tensor) -> None:
    """Raise BatchError unless each tensor is floating point with the shape of `mask`."""
    check_mask(mask)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.shape != mask.shape:
            raise BatchError(f"{name!r} must be floating point {list(mask.shape)} like 'mask', got {_got(tensor)}.")


def check_flags(mask: Tensor, **tensors: Tensor) -> None:
    """Raise BatchError unless each tensor is bool with the shape of `mask`."""
    check_mask(mask)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.bool or tensor.shape != mask.shape:
            raise BatchError(f"{name!r} must be bool {list(mask.shape)} like 'mask', got {_got(tensor)}.")


def check_rows(mask: Tensor, **tensors: Tensor) -> None:
    """Raise BatchError unless each tensor is floating point [B]."""
    check_mask(mask)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.shape != mask.shape[:1]:
            raise BatchError(f"{name!r} must be floating point [{mask.shape[0]}], one a row, got {_got(tensor)}.")


def check_components(mask: Tensor, **tensors: Tensor) -> None:
    """Raise BatchError unless each tensor is floating point [B, K]."""
    check_mask(mask)
    for name, tensor in tensors.items():
        fits = isinstance(tensor, Tensor) and tensor.dim() == 2 and len(tensor) == len(mask)
        if not fits or not tensor.is_floating_point():
            raise BatchError(f"{name!r} must be floating point [{mask.shape[0]}, K], got {_got(tensor)}.")


def check_ids(mask: Tensor, **tensors: Tensor) -> None:
    """Raise BatchError unless each tensor is an integer tensor [B]."""
    check_mask(mask)
    for name, tensor in tensors.items():
        integer = isinstance(tensor, Tensor) and not tensor.is_floating_point() and tensor.dtype != torch.bool
        if not integer or tensor.shape != mask.shape[:1]:
            raise BatchError(f"{name!r} must be an integer tensor [{mask.shape[0]}], got {_got(tensor)}.")


def need(user: str, name: str, value: T | None) -> T:
    """The value of an optional column, or BatchError when `user` can't do without it and it is None."""
    if value is None:
        raise BatchError(f"{user} needs {name!r}, got None.")
    return value


def _got(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
