"""Log-probabilities of given tokens and entropies, from hidden states, a chunk of logits at a time.

Neither pass holds a [tokens, vocabulary] tensor for more than `chunk` tokens. The backward pass computes the
logits of each chunk again; those of the last chunk are kept from the forward pass, so that up to `chunk` tokens
cost nothing twice.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def token_log_probs(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float,
                    chunk: int, entropies: bool = False) -> tuple[Tensor, Tensor | None]:
    """log softmax((hidden @ weight.T + bias) / temperature) at `targets`, and the entropy of that distribution.

    Args:
        hidden: [N, H]; N may be 0.
        weight: [V, H], bias [V] or None: the language-model head, in the dtype of `hidden`.
        targets: [N] int64, or [N, K]: K tokens of interest at each place.
        temperature: positive; divides the logits.
        chunk: tokens whose logits are held at a time.
        entropies: compute them too.
    Returns:
        log-probs, shaped as `targets`, and entropies [N] or None, float32 (float64 for float64 inputs), both
        differentiable.
    """
    several = targets[:, None] if targets.dim() == 1 else targets
    log_probs, entropy = _TokenLogProbs.apply(hidden, weight, bias, several, temperature, chunk, entropies)
    return log_probs.view(targets.shape), entropy if entropies else None


@torch.no_grad()
def top_log_probs(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float,
                  chunk: int, k: int, vocabulary: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """As `token_log_probs` without gradient, and the k likeliest tokens at each place (of the first `vocabulary` ids).

    Returns:
        log-probs of `targets` [N], the k largest log-probs [N, k] in falling order, their token ids [N, k] int64.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    log_probs = hidden.new_empty(len(hidden), dtype=dtype)
    best, ids = log_probs.new_empty(len(hidden), k), targets.new_empty(len(hidden), k)
    for part in _chunks(len(hidden), chunk):
        logits = _logits(hidden[part], weight, bias, temperature)
        normalizers = torch.logsumexp(logits, dim=-1)
        log_probs[part] = logits.gather(1, targets[part, None])[:, 0] - normalizers
        best[part], ids[part] = logits[:, :vocabulary].topk(k, dim=-1)
        best[part] -= normalizers[:, None]
    return log_probs, best, ids


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk, entropies):
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = hidden.new_empty(targets.shape, dtype=dtype)
        normalizers = hidden.new_empty(len(hidden), dtype=dtype)
        entropy = hidden.new_empty(len(hidden) if entropies else 0, dtype=dtype)
        logits = None
        for part in _chunks(len(hidden), chunk):
            logits = None  # frees the previous chunk before the next is made
            logits = _logits(hidden[part], weight, bias, temperature)
            normalizers[part] = torch.logsumexp(logits, dim=-1)
            log_probs[part] = logits.gather(1, targets[part]) - normalizers[part, None]
            if entropies:
                shifted = logits - normalizers[part, None]
                entropy[part] = -torch.linalg.vecdot(shifted.exp(), shifted)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers, entropy)
        ctx.last_logits, ctx.options = logits, (temperature, chunk, entropies)
        if not entropies:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, bias, targets, normalizers, entropy = ctx.saved_tensors
        temperature, chunk, entropies = ctx.options
        grad_hidden = torch.empty_like(hidden)
        # Chunks are summed in float32 or better, whatever the dtype of the weights.
        grad_weight = torch.zeros_like(weight, dtype=normalizers.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=normalizers.dtype) if bias is not None else None
        logits, ctx.last_logits = ctx.last_logits, None
        for part in reversed(_chunks(len(hidden), chunk)):
            if logits is None:
                logits = _logits(hidden[part], weight, bias, temperature)
            grad = _logits_grad(logits, targets[part], normalizers[part], grad_log_probs[part],
                                entropy[part] if entropies else None, grad_entropy[part] if entropies else None)
            grad = grad.div_(temperature).to(hidden.dtype)
            logits = None
            torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                if grad_weight.dtype == hidden.dtype:
                    grad_weight.addmm_(grad.T, hidden[part])
                else:
                    grad_weight.add_(grad.T @ hidden[part])
            if grad_bias is not None:
                grad_bias.add_(grad.sum(0, dtype=grad_bias.dtype))
        cast = (None if g is None else g.to(hidden.dtype) for g in (grad_weight, grad_bias))
        return grad_hidden, *cast, None, None, None, None


def _chunks(total: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, total)) for start in range(0, total, chunk)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32))
    return logits if temperature == 1 else logits.div_(temperature)


def _logits_grad(logits: Tensor, targets: Tensor, normalizers: Tensor, grad_log_probs: Tensor,
                 entropy: Tensor | None, grad_entropy: Tensor | None) -> Tensor:
    """d loss / d logits, written over `logits`.

    d log p_y / d z_j = [j = y] - p_j, summed over the targets y of a place, and d H / d z_j = -p_j (log p_j + H).
    """
    grad = logits.sub_(normalizers[:, None])
    total = grad_log_probs.sum(1, keepdim=True)
    if entropy is None or grad_entropy is None:
        grad.exp_().mul_(-total)
    else:
        probs = grad.exp()
        grad.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(total).mul_(probs)
    return grad.scatter_add_(1, targets, grad_log_probs)
