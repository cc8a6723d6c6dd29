"""Packed attention against softmax written out, one sequence at a time."""

import pytest
import torch
from torch import nn

from hybridrl.errors import ConfigError, ModelError
from hybridrl.workers.training import attention
from hybridrl.workers.training.attention import Pack, choose_kernel, group_lengths, packed_attention

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
                                    pack=Pack(lengths, CPU), dropout=0.0)
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
    pack = Pack(LENGTHS, CPU)
    before, _ = packed_attention(nn.Module(), query, key, value, None, pack=pack)
    with torch.no_grad():
        key[:, :, :17] += 1
        value[:, :, :17] = torch.nan
    after, _ = packed_attention(nn.Module(), query, key, value, None, pack=pack)
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
    # a longer one behind (what fills up a row) opens a group of its own
    assert [(g.rows, g.length) for g in Pack([8, 1, 3], CPU).groups] == [(1, 8), (1, 1), (1, 3)]


@pytest.mark.parametrize(("change", "message"), [
    ({"softcap": 50.0}, "softcap"), ({"s_aux": torch.zeros(4)}, "s_aux"), ({"is_causal": False}, "not causal"),
    ({"pack": None}, "can't be packed")])
def test_attention_it_does_not_compute_is_refused(change, message):
    arguments = {"pack": Pack([4], CPU)} | change
    with pytest.raises(ModelError, match=message):
        packed_attention(nn.Module(), *inputs([4]), None, **arguments)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("lengths", [LENGTHS, [5], [8, 7]])
@pytest.mark.parametrize("key_heads", [4, 1])
@pytest.mark.parametrize("window", [None, 3, 17])
def test_flex_attention_sees_the_same_pairs(lengths, key_heads, window):
    """Not compiled, which a CPU does without gradients."""
    query, key, value = (x.detach() for x in inputs(lengths, key_heads=key_heads))
    out, _ = packed_attention(nn.Module(), query, key, value, None, scaling=0.3, sliding_window=window,
                              pack=Pack(lengths, CPU, "flex"))
    expected = plain_attention(query, key, value, lengths, window, scale=0.3)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def varlen_by_hand(query, key, value, starts, key_starts, longest, longest_key, *, scale, window_size, enable_gqa):
    """What torch documents: [T, heads, size], a window of (left, right) tokens beside the token itself, -1 for all."""
    assert starts.dtype == torch.int32 and starts is key_starts
    assert longest == longest_key == starts.diff().max() and enable_gqa == (query.shape[1] != key.shape[1])
    left, right = window_size
    assert right == 0
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    return plain_attention(q, k, v, starts.diff().tolist(), None if left < 0 else left + 1, scale)[0]


@pytest.mark.parametrize("lengths", [LENGTHS, [5], [8, 7]])
@pytest.mark.parametrize("key_heads", [4, 1])
@pytest.mark.parametrize("window", [None, 3, 17])
def test_flash_attention_is_asked_for_the_same_pairs(monkeypatch, lengths, key_heads, window):
    monkeypatch.setattr(attention, "varlen_attn", varlen_by_hand)
    query, key, value = inputs(lengths, key_heads=key_heads)
    out, _ = packed_attention(nn.Module(), query, key, value, None, scaling=0.3, sliding_window=window,
                              pack=Pack(lengths, CPU, "flash"))
    torch.testing.assert_close(out, plain_attention(query, key, value, lengths, window, scale=0.3), rtol=0, atol=1e-12)


def test_the_kernel_of_a_cpu_is_sdpa():
    assert choose_kernel("auto", CPU, torch.float32, 64) == choose_kernel("sdpa", CPU, torch.float32, 64) == "sdpa"
    for name, reason in (("flash", "needs an NVIDIA GPU"), ("flex", "has no backward pass on a cpu device")):
        with pytest.raises(ConfigError, match=f"policy.training.attention={name} {reason}.*accepted here: auto, sdpa"):
            choose_kernel(name, CPU, torch.float32, 64)


def test_kernels_of_a_gpu(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "find_spec", lambda name: True)
    assert choose_kernel("auto", gpu, torch.bfloat16, 128) == "flash"
    assert choose_kernel("auto", gpu, torch.bfloat16, 100) == choose_kernel("auto", gpu, torch.float32, 128) == "flex"
    with pytest.raises(ConfigError, match="heads of a multiple of 8 elements, at most 256, and this model's have 100"):
        choose_kernel("flash", gpu, torch.bfloat16, 100)
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    assert choose_kernel("auto", gpu, torch.float32, 128) == "sdpa"
    with pytest.raises(ConfigError, match=r"attention=flex needs triton .*accepted here: auto, flash, sdpa"):
        choose_kernel("flex", gpu, torch.bfloat16, 128)
