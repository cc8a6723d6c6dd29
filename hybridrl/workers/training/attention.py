"""Causal attention over sequences laid end to end, without attending across sequences and without a [T, T] mask.

transformers would give packed rows such a mask and spend T^2 on it. Three kernels do without:

`sdpa`, everywhere: each group of sequences of about the same length is one SDPA call of its own; right padding within
the group needs no mask under causal attention, because no real token looks to its right. `flash`, on GPUs from Ampere
on, in bfloat16: flash attention for sequences of different lengths, which is part of torch. `flex`, on GPUs:
FlexAttention, compiled, which leaves out the blocks of the [T, T] square that lie across sequences.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from hybridrl.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from hybridrl.workers.training.context import ContextParallel

ATTENTION = "hybridrl_packed"
# Largest share of a group's longest sequence that is padded: trades wasted products against kernel calls.
PADDED_FRAC = 0.125


def choose_kernel(wanted: str, device: torch.device, dtype: torch.dtype, head_size: int,
                  key: str = "policy.training") -> str:
    """The kernel that the option `attention` of `key` asks for; `auto` takes the first that works of flash, flex, sdpa.

    Raises ConfigError, with the reason and what works, when another one is asked for.
    """
    reasons = {"flash": _no_flash(device, dtype, head_size), "flex": _no_flex(device), "sdpa": ""}
    working = [name for name, reason in reasons.items() if not reason]
    if wanted == "auto":
        return working[0]
    if reasons[wanted]:
        raise ConfigError(f"{key}.attention={wanted} {reasons[wanted]}; accepted here: auto, {', '.join(working)}.")
    return wanted


def _no_flash(device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return "needs an NVIDIA GPU of compute capability 8.0 or more"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 or float16, not in {dtype}"
    if head_size > 256 or head_size % 8:
        return f"needs heads of a multiple of 8 elements, at most 256, and this model's have {head_size}"
    return ""


def _no_flex(device: torch.device) -> str:
    if device.type != "cuda":
        return f"has no backward pass on a {device.type} device"
    return "" if find_spec("triton") else "needs triton (pip install triton)"


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive sequences that share one attention call.

    `slots` [num_tokens] says where each token lies in the [rows * length] rectangle; None when nothing is padded.
    """

    num_tokens: int
    rows: int
    length: int
    slots: Tensor | None


@dataclass(frozen=True, slots=True)
class Shared:
    """What sequences have in common, and the model computes once.

    `places` [tokens of all sequences] says where each lies among those that are fed, `firsts` [tokens fed] where each
    of those lies first in the sequences.
    """

    places: Tensor
    firsts: Tensor


class Pack:
    """Where the sequences of a packed row lie, and what each kernel needs to know of them, made when it asks.

    A plain class on purpose: what torch.compile finds in a list or a dataclass becomes part of what it compiled, which
    every other packing would make it compile again.
    """

    def __init__(self, lengths: list[int], device: torch.device, kernel: str = "sdpa",
                 context: "ContextParallel | None" = None, shared: Shared | None = None):
        """Sequences of these lengths, end to end, over the whole row.

        Args:
            kernel: name in KERNELS.
            context: the ranks that the row's tokens are split over.
            shared: which tokens of the sequences the row has once for several; not with a context.
        """
        self.lengths, self.device, self.kernel, self.context = lengths, device, kernel, context
        self.shared = None if shared is None else Shared(shared.places.to(device), shared.firsts.to(device))
        self.masks: dict[int | None, BlockMask] = {}
        """By sliding window."""

    def split_over(self, context: "ContextParallel", fill: int) -> "Pack":
        """The row with `fill` more tokens, a sequence of their own, that ranks share."""
        return Pack([*self.lengths, fill] if fill else self.lengths, self.device, self.kernel, context)

    @cached_property
    def groups(self) -> list[Group]:
        """Calls of SDPA."""
        return group_lengths(self.lengths, self.device)

    @cached_property
    def offsets(self) -> Tensor:
        """[sequences + 1] int32: where each begins, and the end."""
        lengths = torch.tensor([0, *self.lengths], dtype=torch.int32)
        return lengths.cumsum(0, dtype=torch.int32).to(self.device)

    def block_mask(self, window: int | None) -> BlockMask:
        """Which blocks of the square hold pairs of tokens that see each other, causally and within a window."""
        if window not in self.masks:
            sequence = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths)).to(self.device)

            def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                inside = (sequence[query] == sequence[key]) & (query >= key)
                return inside if window is None else inside & (query - key < window)

            make = _compiled(create_block_mask) if self.device.type == "cuda" else create_block_mask
            self.masks[window] = make(seen, None, None, len(sequence), len(sequence), device=self.device)
        return self.masks[window]


def group_lengths(lengths: list[int], device: torch.device) -> list[Group]:
    """Group neighbours among sequences, best given longest first, so that at most PADDED_FRAC of a row is padding."""
    groups, start = [], 0
    while start < len(lengths):
        longest = lengths[start]
        stop = start + 1
        while stop < len(lengths) and longest * (1 - PADDED_FRAC) <= lengths[stop] <= longest:
            stop += 1
        members = lengths[start:stop]
        slots = None
        if min(members) < longest:
            slots = torch.cat([torch.arange(n) + i * longest for i, n in enumerate(members)]).to(device)
        groups.append(Group(sum(members), len(members), longest, slots))
        start = stop
    return groups


@torch.compiler.disable
def packed_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                     scaling: float | None = None, sliding_window: int | None = None,
                     pack: Pack | None = None, **kwargs) -> tuple[Tensor, None]:
    """Attention function in the form that transformers models call; `pack` reaches it through their kwargs.

    Args:
        query: [1, heads, T, size]; key and value: [1, key heads, T, size], T of this rank.
        pack: the packed row.
    Returns:
        [1, T, heads, size] and None (no attention weights).
    Raises:
        ModelError: the model changes attention in a way that this function does not compute.
    """
    if pack is None:
        raise ModelError(f"{type(module).__name__} passes no keyword arguments on to attention; it can't be packed.")
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ModelError(f"{type(module).__name__} uses {name} in attention, which training does not support.")
    if kwargs.get("is_causal") is False:
        raise ModelError(f"{type(module).__name__} is not causal; training supports causal models.")
    attend = KERNELS[pack.kernel]
    if pack.context is not None:
        query, key, value = pack.context.by_heads(query, key, value)
        return pack.context.by_tokens(attend(query, key, value, pack, scaling, sliding_window)), None
    if pack.shared is not None:
        query, key, value = (x.transpose(1, 2).index_select(1, pack.shared.places).transpose(1, 2)
                             for x in (query, key, value))
        return attend(query, key, value, pack, scaling, sliding_window).index_select(1, pack.shared.firsts), None
    return attend(query, key, value, pack, scaling, sliding_window), None


def _flash(query: Tensor, key: Tensor, value: Tensor, pack: Pack, scaling: float | None,
           window: int | None) -> Tensor:
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    longest = max(pack.lengths)
    left = -1 if window is None or window >= longest else window - 1  # a window counts the token itself
    return varlen_attn(q, k, v, pack.offsets, pack.offsets, longest, longest, scale=scaling,
                       window_size=(left, 0), enable_gqa=q.shape[1] != k.shape[1])[None]


def _flex(query: Tensor, key: Tensor, value: Tensor, pack: Pack, scaling: float | None,
          window: int | None) -> Tensor:
    attend = _compiled(flex_attention) if query.device.type == "cuda" else flex_attention
    window = None if window is None or window >= max(pack.lengths) else window
    return attend(query, key, value, block_mask=pack.block_mask(window), scale=scaling,
                  enable_gqa=query.shape[1] != key.shape[1]).transpose(1, 2)


@cache
def _compiled(function: Any) -> Any:
    """For any number of tokens."""
    return torch.compile(function, dynamic=True)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, pack: Pack, scaling: float | None,
          sliding_window: int | None) -> Tensor:
    groups, outs = pack.groups, []
    sizes = [group.num_tokens for group in groups]
    for group, q, k, v in zip(groups, *(x[0].transpose(0, 1).split(sizes) for x in (query, key, value)), strict=True):
        mask = _window_mask(group.length, sliding_window, query.device)
        out = scaled_dot_product_attention(
            _rectangle(q, group), _rectangle(k, group), _rectangle(v, group), attn_mask=mask,
            is_causal=mask is None, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
        out = out.transpose(1, 2).flatten(0, 1)
        outs.append(out if group.slots is None else out.index_select(0, group.slots))
    return torch.cat(outs)[None]


def _rectangle(tokens: Tensor, group: Group) -> Tensor:
    """[num_tokens, heads, size] as [rows, heads, length, size]."""
    if group.slots is not None:
        tokens = tokens.new_zeros(group.rows * group.length, *tokens.shape[1:]).index_copy(0, group.slots, tokens)
    return tokens.unflatten(0, (group.rows, group.length)).transpose(1, 2)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    if window is None or length <= window:
        return None
    position = torch.arange(length, device=device)
    distance = position[:, None] - position
    return (distance >= 0) & (distance < window)


KERNELS = {"flash": _flash, "flex": _flex, "sdpa": _sdpa}

AttentionInterface.register(ATTENTION, packed_attention)
