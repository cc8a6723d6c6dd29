"""The same numbers the plain way: one row at a time through transformers, all logits, torch's own AdamW."""

import torch
from transformers import AutoModelForCausalLM

from hybridrl.algorithms.partials import Mean
from hybridrl.batch import make_batch, rows_of


def plain_model(folder):
    """In float64, with attention that stays there: the eager one of transformers takes its softmax in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa",
                                                experts_implementation="eager").eval()


def plain_row(model, prompt, response, temperature):
    """Log-probs and entropies of one row's response tokens."""
    logits = model(torch.cat([prompt, response])[None]).logits[0] / temperature
    logits = logits[len(prompt) - 1:len(prompt) + len(response) - 1]
    log_probs = torch.log_softmax(logits, dim=-1)
    return log_probs.gather(1, response[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def plain_log_probs(model, batch, temperature=1.0):
    """Two lists of 1-D tensors: log-probs and entropies of each row."""
    rows = [plain_row(model, p, r, temperature)
            for p, r in zip(rows_of(batch["prompt_ids"]), rows_of(batch["response_ids"]), strict=True)]
    return [row[0] for row in rows], [row[1] for row in rows]


def random_batch(num_rows=7, seed=0, longest_prompt=8, longest_response=12, vocabulary=64, per_prompt=1):
    """Rows of random lengths (responses may be empty, the first is) with random `advantages` and `rewards`.

    `per_prompt` rows have each prompt, not next to each other.
    """
    g = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=g))

    prompts = [torch.randint(0, vocabulary, (number(1, longest_prompt),), generator=g) for _ in range(num_rows)]
    prompts = [prompts[row % -(-num_rows // per_prompt)] for row in range(num_rows)]
    sizes = [number(0, longest_response) if row else 0 for row in range(num_rows)]
    return make_batch(
        prompt_ids=prompts, response_ids=[torch.randint(0, vocabulary, (n,), generator=g) for n in sizes],
        advantages=[torch.randn(n, generator=g) for n in sizes], rewards=torch.randn(num_rows, generator=g))


def policy_gradient(log_probs, columns, entropies):
    """- sum of advantage * log-prob (- entropy / 10 where given), with a metric per row and one per token."""
    loss = -(log_probs * columns["advantages"]).sum()
    if entropies is not None:
        loss = loss - entropies.sum() / 10
    rows, tokens = columns["rewards"].double(), columns["advantages"].double()
    return loss, {"rewards": Mean(rows.sum(), len(rows)), "advantages": Mean(tokens.sum(), (tokens != 0).sum())}


def plain_update(model, optimizer, batch, temperature=1.0, max_grad_norm=1e9, entropies=False):
    """One step of the same loss; returns (loss, gradient norm)."""
    log_probs, entropy = plain_log_probs(model, batch, temperature)
    loss = -sum((lp * a).sum() for lp, a in zip(log_probs, rows_of(batch["advantages"]), strict=True))
    if entropies:
        loss = loss - sum(e.sum() for e in entropy) / 10
    optimizer.zero_grad()
    loss.backward()
    norm = torch.sqrt(sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None))
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(min(1.0, max_grad_norm / float(norm)))
    optimizer.step()
    return loss.item(), norm.item()
