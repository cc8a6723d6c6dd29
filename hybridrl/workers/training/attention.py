"""Causal attention over sequences laid end to end, without a mask and without attending across sequences.

transformers would give packed rows a [T, T] mask and spend T^2 on it. Here each group of sequences of about the
same length is one SDPA call of its own: right padding within the group needs no mask under causal attention,
because no real token looks to its right.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from hybridrl.errors import ModelError

if TYPE_CHECKING:
    from hybridrl.workers.training.context import ContextParallel

ATTENTION = "hybridrl_packed"
# Largest share of a group's longest sequence that is padded: trades wasted products against kernel calls.
PADDED_FRAC = 0.125


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive sequences that share one attention call.

    `slots` [num_tokens] says where each token lies in the [rows * length] rectangle; None when nothing is padded.
    """

    num_tokens: int
    rows: int
    length: int
    slots: Tensor | None


def group_lengths(lengths: list[int], device: torch.device) -> list[Group]:
    """Group sequences given by their lengths, longest first, so that at most PADDED_FRAC of a row is padding."""
    groups, start = [], 0
    while start < len(lengths):
        longest = lengths[start]
        stop = start + 1
        while stop < len(lengths) and lengths[stop] >= longest * (1 - PADDED_FRAC):
            stop += 1
        members = lengths[start:stop]
        slots = None
        if members[-1] < longest:
            slots = torch.cat([torch.arange(n) + i * longest for i, n in enumerate(members)]).to(device)
        groups.append(Group(sum(members), len(members), longest, slots))
        start = stop
    return groups


class Pack:
    """Where the sequences of a packed row lie, and the ranks that its tokens are split over.

    A plain class on purpose: what torch.compile finds in a list or a dataclass becomes part of what it compiled, which
    every other packing would make it compile again.
    """

    def __init__(self, groups: list[Group], context: "ContextParallel | None" = None):
        """`groups` cover the tokens of the whole row in order."""
        self.groups, self.context = groups, context


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
    if pack.context is None:
        return _attend(query, key, value, pack.groups, scaling, sliding_window), None
    query, key, value = pack.context.by_heads(query, key, value)
    return pack.context.by_tokens(_attend(query, key, value, pack.groups, scaling, sliding_window)), None


def _attend(query: Tensor, key: Tensor, value: Tensor, groups: list[Group], scaling: float | None,
            sliding_window: int | None) -> Tensor:
    sizes = [group.num_tokens for group in groups]
    outs = []
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


AttentionInterface.register(ATTENTION, packed_attention)
