"""The work that both sides do: prompts, lengths, numbers of rows."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer

from hybridrl.models import resolve_model

DEMO = Path(__file__).resolve().parents[2] / "recipes" / "demo" / "model"
SHAPES = {"smollm2": (4, 4, 16, 32), "demo": (16, 8, 8, 16)}
"""Prompts, responses per prompt, tokens of a prompt and of a response: medians where lengths are mixed."""
SPACE = "Ġ"  # how byte-level vocabularies write the space before a word
LONGEST = 8
"""Mixed lengths: the longest over the median."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One GRPO step. Row i answers prompt i // responses_per_prompt and has response_lengths[i] tokens."""

    folder: str
    prompts: list[str]
    prompt_lengths: list[int]
    response_lengths: list[int]
    responses_per_prompt: int
    learning_rate: float = 1e-6
    max_grad_norm: float = 1.0

    @property
    def tokens(self) -> int:
        """Prompt and response tokens of all rows."""
        return self.responses_per_prompt * sum(self.prompt_lengths) + sum(self.response_lengths)

    def to_dict(self) -> dict:
        """For the other side, as JSON."""
        return asdict(self)


def make_workload(model: str, mixed: bool) -> Workload:
    """The workload of `demo` or `smollm2`, with lengths that are all equal or log-normal."""
    folder = resolve_model(str(DEMO) if model == "demo" else model)
    num_prompts, responses, prompt_tokens, response_tokens = SHAPES[model]
    prompt_lengths = log_normal(num_prompts, prompt_tokens) if mixed else [prompt_tokens] * num_prompts
    rows = num_prompts * responses
    response_lengths = log_normal(rows, response_tokens) if mixed else [response_tokens] * rows
    prompts = [text_of(length, AutoTokenizer.from_pretrained(folder), seed)
               for seed, length in enumerate(prompt_lengths)]
    return Workload(str(folder), prompts, prompt_lengths, response_lengths, responses)


def log_normal(count: int, median: int) -> list[int]:
    """Lengths at the quantiles of a log-normal whose largest is LONGEST medians, in random order."""
    normal = torch.special.ndtri((torch.arange(count) + 0.5) / count)
    sizes = (median * (normal * math.log(LONGEST) / normal.max()).exp()).round().clamp(min=1).long()
    return sizes[torch.randperm(count, generator=torch.Generator().manual_seed(0))].tolist()


def text_of(length: int, tokenizer, seed: int) -> str:
    """A random text of exactly `length` tokens: whole words that are one token each, or single characters."""
    vocabulary = sorted(tokenizer.get_vocab())
    words = [t for t in vocabulary if t.startswith(SPACE) and t[1:].isascii() and t[1:].isalpha()]
    words = words or [t for t in vocabulary if len(t) == 1 and t.isalnum()]
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = [words[i] for i in torch.randint(len(words), (length,), generator=generator).tolist()]
        ids = tokenizer.convert_tokens_to_ids(chosen)
        text = tokenizer.decode(ids)
        if tokenizer(text, add_special_tokens=False)["input_ids"] == ids:
            return text
