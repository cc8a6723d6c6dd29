"""Packed attention against softmax written out, one sequence at a time."""

import pytest
import torch
from torch import nn

from hybridrl.errors import ModelError
from hybridrl.workers.training.attention import Pack, group_lengths, packed_attention

CPU = torch.device("cpu")
LENGTHS = [17, 16, 15, 9, 9, 9, 3, 1, 1]


def plain_attention(query, key, value, lengths, window=None, scale=None):
    """softmax(q k^T * scale) v for each sequence, positions from the future (or before the window) at -inf."""
    heads_per_key = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(heads_per_key, dim=1) for x in (key, value))
    outs = []
    for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True):
        n = q.shape[2]
        distance = torch.arange(n)[:, None] - torch.arange(n)
        hidden = (distance < 0) | (distance >= (window or n))
        scores = (q @ k.transpose(-1, -2)) * (scale or q.shape[-1] ** -0.5)
        outs.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v)
    return torch.cat(outs, dim=2).transpose(1, 2)


def inputs(lengths, heads=4, key_heads=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    # as models make them: [1, T, heads, size] transposed
    return [torch.randn(1, sum(lengths), h, 8, dtype=torch.float64, generator=g).transpose(1, 2).requires_grad_()
            for h in (heads, key_heads, key_heads)]


@pytest.mark.parametrize("lengths", [LENGTHS, [5], [4, 4, 4], [1], [8, 7]])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 3])
def test_equals_softmax_written_out_with_gradients(lengths, key_heads, window):
    packed, plain = inputs(lengths, key_heads=key_heads), inputs(lengths, key_heads=key_heads)
    out, weights = packed_attention(nn.Module(), *packed, None, scaling=0.3, sliding_window=window,
                                    pack=Pack(group_lengths(lengths, CPU)), dropout=0.0)
    expected = plain_attention(*plain, lengths, window, scale=0.3)
    assert weights is None
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    direction = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    (out * direction).sum().backward()
    (expected * direction).sum().backward()
    for got, want in zip(packed, plain, strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=0, atol=1e-12)


def test_sequences_do_not_see_each_other():
    query, key, value = inputs(LENGTHS)
    groups = group_lengths(LENGTHS, CPU)
    before, _ = packed_attention(nn.Module(), query, key, value, None, pack=Pack(groups))
    with torch.no_grad():
        key[:, :, :17] += 1
        value[:, :, :17] = torch.nan
    after, _ = packed_attention(nn.Module(), query, key, value, None, pack=Pack(groups))
    assert after[:, :17].isnan().all()
    torch.testing.assert_close(after[:, 17:33], before[:, 17:33], rtol=0, atol=0)  # of the same group
    torch.testing.assert_close(after[:, 33:], before[:, 33:], rtol=0, atol=0)


def test_groups_by_hand():
    # at most an eighth of 16 is padding: 14 still joins, 13 does not
    groups = group_lengths([16, 14, 13, 13, 2], CPU)
    assert [(g.rows, g.length, g.num_tokens) for g in groups] == [(2, 16, 30), (2, 13, 26), (1, 2, 2)]
    assert groups[0].slots.tolist() == [*range(16), *range(16, 30)]
    assert groups[1].slots is None
    assert group_lengths([3, 3, 3], CPU)[0].slots is None


@pytest.mark.parametrize(("change", "message"), [
    ({"softcap": 50.0}, "softcap"), ({"s_aux": torch.zeros(4)}, "s_aux"), ({"is_causal": False}, "not causal"),
    ({"pack": None}, "can't be packed")])
def test_attention_it_does_not_compute_is_refused(change, message):
    arguments = {"pack": Pack(group_lengths([4], CPU))} | change
    with pytest.raises(ModelError, match=message):
        packed_attention(nn.Module(), *inputs([4]), None, **arguments)
