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
        targets: [N] int64.
        temperature: positive; divides the logits.
        chunk: tokens whose logits are held at a time.
        entropies: compute them too.
    Returns:
        log-probs [N] and entropies [N] or None, float32 (float64 for float64 inputs), both differentiable.
    """
    log_probs, entropy = _TokenLogProbs.apply(hidden, weight, bias, targets, temperature, chunk, entropies)
    return log_probs, entropy if entropies else None


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk, entropies):
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = hidden.new_empty(len(hidden), dtype=dtype)
        normalizers = torch.empty_like(log_probs)
        entropy = hidden.new_empty(len(hidden) if entropies else 0, dtype=dtype)
        logits = None
        for part in _chunks(len(hidden), chunk):
            logits = None  # frees the previous chunk before the next is made
            logits = _logits(hidden[part], weight, bias, temperature)
            normalizers[part] = torch.logsumexp(logits, dim=-1)
            log_probs[part] = logits.gather(1, targets[part, None])[:, 0] - normalizers[part]
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

    d log p_y / d z_j = [j = y] - p_j and d H / d z_j = -p_j (log p_j + H).
    """
    grad = logits.sub_(normalizers[:, None])
    if entropy is None or grad_entropy is None:
        grad.exp_().mul_(-grad_log_probs[:, None])
    else:
        probs = grad.exp()
        grad.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_log_probs[:, None]).mul_(probs)
    return grad.scatter_add_(1, targets[:, None], grad_log_probs[:, None])
