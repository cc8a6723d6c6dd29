"""The largest micro-batch that can occur, before the first rollout: does it fit, and what is left?

Memory of a micro-batch is a constant (gradients, a chunk of logits) plus a share per token. So it is measured on small
ones of growing size, and a larger one is tried only where the line through the last two says that it fits: a device
that is too small makes an error here, not a dead process. Weights, optimizer state and random generators stay as they
are.
"""

import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from hybridrl.batch import from_lengths, make_batch
from hybridrl.errors import ConfigError
from hybridrl.workers.memory import free_bytes, gib, give_back, held_bytes, peak_memory
from hybridrl.workers.training.engine import TrainingEngine

FIRST_TOKENS = 256
"""Tokens of the first micro-batch tried."""
STEADY_TOKENS = 2048
"""From here on, and from 4 chunks of logits on, the line is trusted however far it goes."""
MARGIN = 0.95
"""Share of what the line says that is called fitting."""
CANDIDATES = "candidate_ids"
"""The column of what an update with candidates needs."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes that a micro-batch of so many tokens needs on a rank, beyond what was held before."""

    tokens: int
    bytes: float


def dry_run(engine: TrainingEngine, rows: int, prompt_tokens: int, response_tokens: int, temperature: float = 1.0,
            entropies: bool = False, candidates: int = 0) -> str:
    """Take the largest possible micro-batch through log-probs and through forward and backward passes; collective.

    Args:
        rows: of a batch; sequences have up to `prompt_tokens` and `response_tokens`.
        temperature, entropies: as of an update.
        candidates: tokens at each place whose log-probs an update computes beside those of the sampled one.
    Returns:
        What it took and what is left, as a line.
    Raises:
        ConfigError: on every rank, when it does not fit: names `micro_batch_tokens` and its largest value that does.
    """
    longest, budget = prompt_tokens + response_tokens - 1, engine.cfg.micro_batch_tokens * engine.cfg.context_parallel
    largest = min(max(budget, longest), rows * longest)
    free = _over_ranks(free_bytes(engine.device) / _sharers(engine.device), dist.ReduceOp.MIN)
    give_back(engine.device)  # or small micro-batches would fit into what is free within the process
    base, to_come = held_bytes(engine.device), engine.optimizer.bytes_to_come() if engine.optimizer else 0
    found: list[Measured] = []
    tokens = min(FIRST_TOKENS, largest)
    while True:
        batch = _longest_rows(tokens, prompt_tokens, response_tokens, candidates)
        found.append(Measured(tokens, to_come + _used(engine, batch, base, temperature, entropies)))
        if tokens == largest and found[-1].bytes <= free:
            return (f"dry run: a micro-batch of {tokens} tokens takes {gib(found[-1].bytes)} on a rank, {gib(to_come)} "
                    f"of it optimizer state still to come; {gib(free - found[-1].bytes)} of {gib(free)} are left")
        fits = _fitting(found, free)
        steady = _grows(found) and tokens >= max(STEADY_TOKENS, 4 * engine.cfg.logits_chunk_tokens)
        if found[-1].bytes > free or fits <= tokens * 1.02 or (steady and fits < largest):
            known = max((m.tokens for m in found if m.bytes <= free), default=0)
            raise ConfigError(_too_large(engine, max(known, int(MARGIN * fits)) if steady else known, free, largest,
                                         longest))
        tokens = largest if steady else min(fits, 2 * tokens, largest)


def _used(engine: TrainingEngine, batch: TensorDict, base: int, temperature: float, entropies: bool) -> float:
    """Bytes at most beyond `base`, on the rank that needs most; infinite when the device had no more."""
    try:
        with peak_memory(engine.device) as peak:
            engine.log_probs(batch, temperature, entropies)
            if engine.trainable:
                engine.backward(batch, _sum_of_all, temperature, entropies,
                                CANDIDATES if CANDIDATES in batch.keys() else "")
        used = float(peak.bytes - base)
    except torch.OutOfMemoryError:
        used = torch.inf
    finally:
        if engine.optimizer is not None:
            engine.optimizer.zero_grad()
    return max(0.0, _over_ranks(used, dist.ReduceOp.MAX))


def _sum_of_all(log_probs: Tensor, columns: dict[str, Tensor], entropies: Tensor | None) -> tuple[Tensor, dict]:
    others = columns.get("candidate_log_probs")
    return sum((part.sum() for part in (entropies, others) if part is not None), log_probs.sum()), {}


def _longest_rows(tokens: int, prompt_tokens: int, response_tokens: int, candidates: int = 0) -> TensorDict:
    """Rows of the longest kind that feed `tokens` in all; the last one may be shorter.

    No two have the same prompt, whose tokens would then be fed once: their numbers in binary are their prompts.
    """
    longest = prompt_tokens + response_tokens - 1
    fed = [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])
    responses = [min(response_tokens, n) for n in fed]
    batch = make_batch(prompt_ids=[[row >> bit & 1 for bit in range(n + 1 - r)]
                                   for row, (n, r) in enumerate(zip(fed, responses, strict=True))],
                       response_ids=[[0] * r for r in responses])
    if candidates:
        batch.set(CANDIDATES, from_lengths(torch.zeros(sum(responses), candidates, dtype=torch.int64),
                                           torch.tensor(responses)))
    return batch


def _grows(found: list[Measured]) -> bool:
    """Whether each of the last two micro-batches took more than the one before, so that a line can be trusted."""
    return len(found) > 2 and found[-1].bytes > found[-2].bytes > found[-3].bytes


def _fitting(found: list[Measured], free: float) -> int:
    """Most tokens within `free` bytes, by the line through the last two measurements, or through 0 and the only one."""
    last, before = found[-1], found[-2] if len(found) > 1 else Measured(0, 0.0)
    slope = max((last.bytes - before.bytes) / (last.tokens - before.tokens), 1e-9)
    return int(min(last.tokens + (free - last.bytes) / slope, 2**62)) if last.bytes < torch.inf else before.tokens


def _too_large(engine: TrainingEngine, fits: int, free: float, largest: int, longest: int) -> str:
    key, shared = f"{engine.key}.micro_batch_tokens", engine.cfg.context_parallel
    have = f"{gib(free)} are free on a rank, and {fits} tokens are what fits"
    if fits < longest:
        return (f"{key} can't be made to fit: a single sequence may have {longest + 1} tokens, {have}. Shorter prompts "
                f"or responses, gradient_checkpointing=layers or more ranks help.")
    return (f"{key} must be at most {fits // shared} here, got {engine.cfg.micro_batch_tokens}: a micro-batch of "
            f"{largest} tokens is possible, {have}.")


def _sharers(device: torch.device) -> int:
    """Ranks that take from the same memory."""
    if device.type == "cuda":
        return 1
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts.count(socket.gethostname())


def _over_ranks(value: float, op: dist.ReduceOp.RedOpType) -> float:
    number = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(number, op=op)
    return float(number)
