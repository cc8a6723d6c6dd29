"""Slow loops in plain Python that follow the formulas literally; the tests compare the library with them."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor


def is_score(x: float) -> bool:
    return math.isfinite(x)


def fold(token_rewards: Tensor, mask: Tensor) -> list[list[float]]:
    out = []
    for row, flags in zip(token_rewards.tolist(), mask.tolist(), strict=True):
        folded, home = [0.0] * len(row), None
        for t, (reward, on) in enumerate(zip(row, flags, strict=True)):
            home = t if on else home
            if home is not None:
                folded[home] += reward
        out.append(folded)
    return out


def place(rewards: Tensor, mask: Tensor) -> list[list[float]]:
    out = []
    for reward, flags in zip(rewards.tolist(), mask.tolist(), strict=True):
        row = [0.0] * len(flags)
        on = [t for t, flag in enumerate(flags) if flag]
        if on and is_score(reward):
            row[on[-1]] = reward
        out.append(row)
    return out


def returns(folded: list[list[float]], mask: Tensor, gamma: float) -> list[list[float]]:
    out = []
    for row, flags in zip(folded, mask.tolist(), strict=True):
        total, result = 0.0, [0.0] * len(row)
        for t in reversed(range(len(row))):
            if flags[t]:
                total = row[t] + gamma * total
                result[t] = total
        out.append(result)
    return out


def mean(xs: list[float]) -> float:
    return math.fsum(xs) / len(xs)


def std(xs: list[float]) -> float:
    if len(xs) < 2:
        return 0.0
    m = mean(xs)
    return math.sqrt(math.fsum((x - m) ** 2 for x in xs) / (len(xs) - 1))


def members(columns: dict[str, Any], row: int) -> list[int]:
    """Scorable rows of the row's group."""
    rewards, ids = columns["rewards"].tolist(), columns["group_ids"].tolist()
    return [i for i in range(len(ids)) if ids[i] == ids[row] and is_score(rewards[i])]


def spread(scalars: list[float], mask: Tensor) -> Tensor:
    return torch.tensor(scalars, dtype=torch.float64)[:, None] * mask.double()


def whiten(x: list[list[float]], mask: Tensor, valid: list[bool]) -> Tensor:
    spots = [(b, t) for b, row in enumerate(mask.tolist()) for t, on in enumerate(row) if on and valid[b]]
    values = [x[b][t] for b, t in spots]
    out = torch.zeros(mask.shape, dtype=torch.float64)
    if len(values) < 2 or max(values) == min(values):
        return out
    m, v = mean(values), std(values) ** 2
    for b, t in spots:
        out[b, t] = (x[b][t] - m) / math.sqrt(v + 1e-8)
    return out


def group_scalars(columns: dict[str, Any], rule: str, **options: Any) -> list[float]:
    """Row scalars of the group estimators."""
    rewards, lengths = columns["rewards"].tolist(), columns["mask"].sum(1).tolist()
    scored = [r for r in rewards if is_score(r)]
    informative = []
    for i in range(len(rewards)):
        group = [rewards[j] for j in members(columns, i)]
        if is_score(rewards[i]) and max(group) > min(group):
            informative.append(i)
    out = []
    for i, r in enumerate(rewards):
        peers = members(columns, i)
        group = [rewards[j] for j in peers]
        if not is_score(r) or (max(group) == min(group)):
            out.append(0.0)
            continue
        mu = mean(group)
        if rule == "grpo":
            s = {"group": std(group), "batch": std(scored), "none": None}[options.get("std", "group")]
            out.append(r - mu if s is None else (r - mu) / (s + 1e-6))
        elif rule == "dr_grpo":
            out.append(r - mu)
        elif rule == "rloo":
            others = [rewards[j] for j in peers if j != i]
            out.append(r - mean(others))
        elif rule == "opo":
            weight = sum(lengths[j] for j in peers)
            out.append(r - sum(lengths[j] * rewards[j] for j in peers) / weight if weight else 0.0)
        elif rule == "gpg":
            out.append(len(scored) / len(informative) * (r - mu) / options.get("scale", 1.0))
        elif rule == "maxrl":
            out.append((r - mu) / mu if mu > 0 else 0.0)
        elif rule == "pass_at_k_marginal":
            without = [rewards[j] for j in peers if j != i]
            out.append(max(group) - max(without))
        elif rule == "pass_at_k":
            out.append(subset_pass_at_k([rewards[j] for j in peers], peers.index(i), options["k"]))
        else:
            raise ValueError(rule)
    return out


def subset_pass_at_k(group: list[float], i: int, k: int) -> float:
    """Average over all k-subsets with member i of the standardized best reward, by enumeration."""
    best = [(max(group[j] for j in s), i in s) for s in itertools.combinations(range(len(group)), k)]
    p = mean([b for b, _ in best])
    s = math.sqrt(p * (1 - p))
    return mean([(b - p) / s for b, has in best if has]) if s > 1e-12 else 0.0


def gae(columns: dict[str, Any], folded: list[list[float]], gamma: float, lam: list[float]) -> tuple[Tensor, Tensor]:
    values, mask = columns["values"].tolist(), columns["mask"].tolist()
    boot = columns["bootstrap_values"].tolist() if "bootstrap_values" in columns else [0.0] * len(mask)
    a, g = torch.zeros(columns["mask"].shape).double(), torch.zeros(columns["mask"].shape).double()
    for b, flags in enumerate(mask):
        next_value, running = boot[b], 0.0
        for t in reversed(range(len(flags))):
            if flags[t]:
                delta = folded[b][t] + gamma * next_value - values[b][t]
                running = delta + gamma * lam[b] * running
                a[b, t], g[b, t], next_value = running, running + values[b][t], values[b][t]
    return a, g


def coefficients(mode: str, columns: dict[str, Any], limit: int = 0) -> Tensor:
    mask = columns["mask"]
    total, n = mask.sum().item(), mask.sum(1).tolist()
    rows = sum(x > 0 for x in n)
    out = torch.zeros(mask.shape).double()
    ids = columns["group_ids"].tolist()
    per_prompt = {q: sum(n[i] for i in range(len(n)) if ids[i] == q) for q in ids}
    prompts = sum(x > 0 for x in per_prompt.values())
    for b, row in enumerate(mask.tolist()):
        for t, on in enumerate(row):
            if on:
                out[b, t] = {
                    "token-mean": lambda b=b: 1 / total,
                    "seq-mean-token-sum": lambda b=b: 1 / rows,
                    "seq-mean-token-mean": lambda b=b: 1 / (rows * n[b]),
                    "seq-mean-token-sum-norm": lambda b=b: 1 / (rows * limit),
                    "prompt-mean": lambda b=b: 1 / (prompts * per_prompt[ids[b]]),
                }[mode]()
    return out


def clip(x: float, lo: float, hi: float) -> float:
    return min(max(x, lo), hi)


def token_loss(name: str, a: float, new: float, old: float, **o: Any) -> tuple[float, float]:
    """Value and derivative with respect to the log-prob of the token-local losses."""
    d = clip(new - old, -20, 20)
    rho, alive = math.exp(d), abs(new - old) <= 20
    if name == "ppo_clip":
        lo, hi, c = o.get("clip_low", 0.2), o.get("clip_high", 0.2), o.get("dual_clip")
        plain, clipped = -a * rho, -a * clip(rho, 1 - lo, 1 + hi)
        value, slope = (plain, -a * rho * alive) if plain >= clipped else (clipped, 0.0)
        if c is not None and a < 0 and -c * a < value:
            value, slope = -c * a, 0.0
        return value, slope
    if name in ("gpg", "reinforce"):
        return -a * new, -a
    if name == "cispo":
        w = clip(rho, o.get("ratio_min", 0.0), o.get("ratio_max", 5.0))
        return -w * a * new, -w * a
    if name == "sapo":
        tau = o.get("tau_positive", 1.0) if a > 0 else o.get("tau_negative", 1.05)
        s = 1 / (1 + math.exp(-tau * (rho - 1)))
        return -a * 4 / tau * s, -a * 4 * s * (1 - s) * rho * alive
    if name == "dppo":
        p, q = math.exp(new), math.exp(old)
        rise = p - q
        if o.get("divergence", "tv") == "kl":
            kl = sum(x * math.log(x / y) for x, y in ((q, p), (max(1 - q, 1e-8), max(1 - p, 1e-8))))
            rise = math.copysign(kl, rise)
        drop = (a > 0 and rise > o.get("delta_high", 0.2)) or (a < 0 and -rise > o.get("delta_low", 0.2))
        w = 0.0 if drop else min(rho, o.get("ratio_max", 20.0))
        return -w * a * new, -w * a
    raise ValueError(name)


def row_loss(
    name: str, a: list[float], new: list[float], old: list[float], **o: Any
) -> tuple[list[float], list[float]]:
    """Per-token values, and derivatives of their row mean times n, of losses with a row ratio."""
    d, n = [x - y for x, y in zip(new, old, strict=True)], len(new)
    if name == "gspo":
        s = math.exp(clip(mean(d), -20, 20))
        lo, hi = o.get("clip_low", 3e-4), o.get("clip_high", 4e-4)
        plain, cut = [-x * s for x in a], [-x * clip(s, 1 - lo, 1 + hi) for x in a]
        values = [max(p, c) for p, c in zip(plain, cut, strict=True)]
        return values, [p if p >= c else 0.0 for p, c in zip(plain, cut, strict=True)]
    if name == "gmpo":
        lo, hi = o.get("clip_low", 0.4), o.get("clip_high", 0.4)
        z = [min(x, hi) if y > 0 else max(x, -lo) for x, y in zip(d, a, strict=True)]
        free = [x <= hi if y > 0 else x >= -lo for x, y in zip(d, a, strict=True)]
        value = -mean(a) * math.exp(clip(mean(z), -20, 20))
        return [value] * n, [value * f for f in free]
    raise ValueError(name)


def subset_max_at_k(group: list[float], i: int, k: int, subtract: bool) -> float:
    """n / C(n, k) times the sum over k-subsets with i of the best, minus the best without i."""
    total, n = 0.0, len(group)
    for s in itertools.combinations(range(n), k):
        if i in s:
            total += max(group[j] for j in s)
            if subtract and k > 1:
                total -= max(group[j] for j in s if j != i)
    return n * total / math.comb(n, k)
