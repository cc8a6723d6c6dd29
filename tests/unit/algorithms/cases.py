"""Random batches with everything that goes wrong: uneven groups, empty rows, several turns, garbage when masked."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

GARBAGE = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30])

TOKEN_COLUMNS = (
    "log_probs",
    "old_log_probs",
    "rollout_log_probs",
    "ref_log_probs",
    "teacher_log_probs",
    "values",
    "old_values",
    "returns",
    "entropies",
    "advantages",
    "sum_squared_probs",
)


def make_columns(seed: int, rows: int = 7, width: int = 9, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """A batch of every column an algorithm reads, clean at masked positions."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    lengths = torch.randint(0, width + 1, (rows,), generator=g)
    mask = torch.arange(width) < lengths[:, None]
    if seed % 3:
        mask &= torch.rand(rows, width, generator=g) > 0.3
    old = -torch.rand(rows, width, generator=g, dtype=torch.float64) * 4 - 0.05
    rewards = torch.randint(0, 2, (rows,), generator=g).double() if seed % 2 else normal(rows)
    if seed % 5 == 0:
        rewards[seed % rows] = torch.nan
    made = {
        "mask": mask,
        "group_ids": torch.randint(0, max(1, rows // 3), (rows,), generator=g) * 1000 - 7,
        "rewards": rewards,
        "greedy_rewards": normal(rows),
        "bootstrap_values": normal(rows),
        "reward_components": normal(rows, 3),
        "old_log_probs": old,
        "log_probs": old + 0.4 * normal(rows, width),
        "rollout_log_probs": old + 0.2 * normal(rows, width),
        "ref_log_probs": old + 0.3 * normal(rows, width),
        "teacher_log_probs": old + 0.3 * normal(rows, width),
        "values": normal(rows, width),
        "old_values": normal(rows, width),
        "returns": normal(rows, width),
        "entropies": torch.rand(rows, width, generator=g, dtype=torch.float64),
        "advantages": normal(rows, width),
        "sum_squared_probs": old.exp().square() + 0.1 * torch.rand(rows, width, generator=g, dtype=torch.float64),
    }
    return {k: zero_masked(v, mask).to(dtype) if k in TOKEN_COLUMNS else to(v, dtype) for k, v in made.items()}


def to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in dtype if it is floating point."""
    return x.to(dtype) if x.is_floating_point() else x


def zero_masked(x: Tensor, mask: Tensor) -> Tensor:
    """x with zeros where mask is false."""
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype))


def with_garbage(columns: dict[str, Any]) -> dict[str, Any]:
    """The same batch with NaN, infinities and huge numbers at masked positions of token columns."""
    mask = columns["mask"]
    junk = GARBAGE.repeat(mask.numel() // len(GARBAGE) + 1)[: mask.numel()].reshape(mask.shape)
    out = dict(columns)
    for name in TOKEN_COLUMNS:
        out[name] = torch.where(mask, columns[name], junk.to(columns[name].dtype))
    return out


def padded(columns: dict[str, Any], extra_columns: int, extra_rows: int) -> dict[str, Any]:
    """Padded on the right, and with rows at the end that have an empty mask and no score."""
    out = {}
    for name, x in columns.items():
        if not isinstance(x, Tensor):
            out[name] = x
            continue
        shape = list(x.shape)
        shape[0] += extra_rows
        if name in TOKEN_COLUMNS or name == "mask":
            shape[1] += extra_columns
        filler: Any = False if x.dtype == torch.bool else 0
        if name in ("rewards", "reward_components"):
            filler = torch.nan
        if name == "group_ids":
            filler = 99
        grown = torch.full(shape, filler, dtype=x.dtype)
        grown[tuple(slice(0, n) for n in x.shape)] = x
        out[name] = grown
    return out


def take_rows(columns: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """The rows `rows` of every column, in that order."""
    return {name: x[rows] if isinstance(x, Tensor) else x for name, x in columns.items()}


def random_pieces(rows: int, seed: int) -> list[Tensor]:
    """A random partition of the rows, empty pieces included."""
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(rows, generator=g)
    cuts = sorted(torch.randint(0, rows + 1, (4,), generator=g).tolist())
    return [order[a:b] for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]


batches = st.builds(make_columns, seed=st.integers(0, 10_000), rows=st.integers(1, 8), width=st.integers(1, 9))
