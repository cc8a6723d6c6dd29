"""Training metrics as parts that merge exactly over pieces and ranks (see `partials`)."""

import torch
from torch import Tensor

from hybridrl.algorithms.columns import check_mask, check_tokens, given
from hybridrl.algorithms.evaluation import pass_at_k_tensor
from hybridrl.algorithms.groups import Groups
from hybridrl.algorithms.kl import K3_CAP, k3_value
from hybridrl.algorithms.masked import LOG_RATIO_LIMIT, exp_clamped, log_ratio
from hybridrl.algorithms.partials import Mean, Partial, max_of, mean_of, min_of, moments_of


@torch.no_grad()
def policy_metrics(
    log_probs: Tensor,
    old_log_probs: Tensor,
    mask: Tensor,
    *,
    ref_log_probs: Tensor | None = None,
    entropies: Tensor | None = None,
) -> dict[str, Partial]:
    """How far the policy moved, over trainable tokens of a piece.

    approx_kl_k1 = mean(old - current), approx_kl_k3 = mean(rho - 1 - log rho), ratio_mean/_min/_max of rho, and
    ref_kl = mean k3 against the reference and ref_kl_capped_frac, the share of tokens at k3's cap, when ref_log_probs
    are given; entropy = mean H when entropies are, else entropy_estimate = mean(-current): unbiased, but noisy.

    Args:
        log_probs, old_log_probs, ref_log_probs, entropies: [B, R] float. mask: [B, R] bool.
    Raises:
        BatchError: shapes or dtypes don't fit.
    """
    optional = given(ref_log_probs=ref_log_probs, entropies=entropies)
    check_tokens(mask, log_probs=log_probs, old_log_probs=old_log_probs, **optional)
    # Differences of both signs may cancel in a mean: float64 before subtracting.
    d = log_ratio(log_probs.double(), old_log_probs.double(), mask)
    ratio = exp_clamped(d)
    metrics: dict[str, Partial] = {
        "approx_kl_k1": mean_of(-d, mask),
        "approx_kl_k3": mean_of(torch.expm1(d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) - d, mask),
        "ratio_mean": mean_of(ratio, mask),
        "ratio_min": min_of(ratio, mask),
        "ratio_max": max_of(ratio, mask),
    }
    if ref_log_probs is not None:
        k3 = k3_value(log_ratio(log_probs.double(), ref_log_probs.double(), mask))
        metrics["ref_kl"] = mean_of(k3, mask)
        metrics["ref_kl_capped_frac"] = mean_of((k3 >= K3_CAP).double(), mask)
    if entropies is not None:
        metrics["entropy"] = mean_of(entropies, mask)
    else:
        metrics["entropy_estimate"] = mean_of(-log_probs, mask & log_probs.isfinite())
    return metrics


@torch.no_grad()
def length_metrics(
    mask: Tensor, *, truncated: Tensor | None = None, max_response_length: int | None = None
) -> dict[str, Partial]:
    """Policy-generated tokens per row: response_length mean/min/max, also without aborted (empty) rows.

    aborted_ratio: share of rows of length 0. truncated_ratio: share with finish reason "length". at_limit_ratio:
    share at or above the configured limit, for engines without finish reasons.

    Args:
        mask: [B, R] bool. truncated: [B] bool, finish reason is the length limit.
        max_response_length: the configured limit, never the padded width.
    """
    check_mask(mask)
    lengths = mask.sum(dim=1)
    rows, full = torch.ones_like(lengths, dtype=torch.bool), lengths > 0
    metrics: dict[str, Partial] = {"aborted_ratio": mean_of((~full).double(), rows)}
    for name, among in (("response_length", rows), ("response_length_nonaborted", full)):
        metrics[f"{name}_mean"] = mean_of(lengths, among)
        metrics[f"{name}_min"], metrics[f"{name}_max"] = min_of(lengths, among), max_of(lengths, among)
    if truncated is not None:
        metrics["truncated_ratio"] = mean_of(truncated.double(), rows)
    if max_response_length is not None:
        metrics["at_limit_ratio"] = mean_of((lengths >= max_response_length).double(), rows)
    return metrics


@torch.no_grad()
def reward_metrics(rewards: Tensor, name: str = "reward") -> dict[str, Partial]:
    """Mean, standard deviation (n - 1), min and max of scorable rewards [B], and the share without a score.

    Call it once with raw outcomes and once with shaped rewards, under different names.
    """
    valid = rewards.isfinite()
    values = torch.where(valid, rewards.double(), 0.0)
    return {
        f"{name}_mean": mean_of(values, valid),
        f"{name}_std": moments_of(values, valid),
        f"{name}_min": min_of(values, valid),
        f"{name}_max": max_of(values, valid),
        f"{name}_unscorable_frac": Mean((~valid).sum(), rewards.numel()),
    }


@torch.no_grad()
def group_metrics(rewards: Tensor, group_ids: Tensor, *, solved_at: float = 1.0) -> dict[str, Partial]:
    """Shares of groups: zero_variance (all equal), all_solved (all at least solved_at), all_failed (none).

    Groups without a scorable member are not counted. Call it on whole groups.

    Args:
        rewards: [B] float, raw outcomes. group_ids: [B] int64.
    """
    groups = Groups.of(rewards, group_ids)
    scored = groups.count() > 0
    low, high = groups.min(groups.rewards), groups.max(groups.rewards)
    return {
        "group_zero_variance": mean_of((low == high).double(), scored),
        "group_all_solved": mean_of((low >= solved_at).double(), scored),
        "group_all_failed": mean_of((high < solved_at).double(), scored),
    }


@torch.no_grad()
def staleness_metrics(versions: Tensor, mask: Tensor, current_version: int) -> dict[str, Partial]:
    """Mean and largest staleness of trainable tokens: trainer version minus the version that sampled them.

    Args:
        versions: [B, R] int64. mask: [B, R] bool.
    """
    staleness = current_version - versions
    return {"staleness_mean": mean_of(staleness, mask), "staleness_max": max_of(staleness, mask)}


@torch.no_grad()
def advantage_metrics(advantages: Tensor, mask: Tensor) -> dict[str, Partial]:
    """Mean, standard deviation, min and max of advantages over trainable tokens."""
    check_tokens(mask, advantages=advantages)
    return {
        "advantage_mean": mean_of(advantages, mask),
        "advantage_std": moments_of(advantages, mask),
        "advantage_min": min_of(advantages, mask),
        "advantage_max": max_of(advantages, mask),
    }


@torch.no_grad()
def pass_at_k_metrics(
    rewards: Tensor, group_ids: Tensor, ks: tuple[int, ...], *, solved_at: float = 1.0
) -> dict[str, Partial]:
    """pass@k = 1 - C(n-c, k) / C(n, k), averaged over prompts with at least k scorable responses.

    Args:
        rewards: [B] float, correct when at least solved_at. group_ids: [B] int64, whole groups.
    """
    groups = Groups.of(rewards, group_ids)
    count, correct = groups.count(), groups.sum((groups.rewards >= solved_at).double())
    return {f"pass@{k}": mean_of(pass_at_k_tensor(count, correct, k), count >= k) for k in ks}
