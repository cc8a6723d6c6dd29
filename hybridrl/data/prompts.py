"""A data source turned into token ids: prompts for reinforcement learning, prompt and response for SFT."""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from hybridrl.batch import make_batch
from hybridrl.config import DataConfig
from hybridrl.data.fields import Messages, present, prompt_of, response_of
from hybridrl.data.sources import BadRows, Row, read_rows, source_name
from hybridrl.errors import DataError, ModelError

ROWS_PER_TOKENIZATION = 1024

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PromptSet:
    """The usable rows of a source, tokenised, in file order.

    prompt_ids and response_ids are int32 arrays; response_ids is empty unless read by `load_examples`. `counts` has
    `rows` (usable), `overlong` and `malformed` (both left out). `fingerprint` changes with any token or answer.
    """

    prompts: list[str | Messages] = field(default_factory=list)
    prompt_ids: list[np.ndarray] = field(default_factory=list)
    response_ids: list[np.ndarray] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    tasks: list[Row] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    fingerprint: str = ""

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def batch(self, rows: Iterable[int], first_group: int = 0) -> TensorDict:
        """Batch of `rows` (indices into the set, may repeat); group_ids count up from `first_group`.

        Fields: prompt_ids, prompt, answer, task, group_ids; of examples also response_ids, and response_mask
        which is true everywhere.
        """
        rows = list(rows)
        batch = make_batch(
            prompt_ids=[self.prompt_ids[i] for i in rows],
            prompt=[self.prompts[i] for i in rows],
            answer=[self.answers[i] for i in rows],
            task=[self.tasks[i] for i in rows],
            group_ids=torch.arange(first_group, first_group + len(rows)),
        )
        if self.response_ids:
            responses = make_batch(
                response_ids=[self.response_ids[i] for i in rows],
                response_mask=[np.ones(len(self.response_ids[i]), dtype=bool) for i in rows],
            )
            batch.update(responses)
        return batch

    def held_out(self, trained: "PromptSet") -> "PromptSet":
        """The rows whose prompt is not in `trained`, each prompt once; `counts` gains `trained` and `repeated`.

        Raises DataError when no row is left.
        """
        seen = {ids.tobytes() for ids in trained.prompt_ids}
        first = {ids.tobytes(): i for i, ids in reversed(list(enumerate(self.prompt_ids)))}
        kept = sorted(i for ids, i in first.items() if ids not in seen)
        if not kept:
            raise DataError(f"none of the {len(self)} evaluation prompts is held out: all are trained on.")
        counts = self.counts | {"rows": len(kept), "trained": sum(ids.tobytes() in seen for ids in self.prompt_ids)}
        counts["repeated"] = len(self) - len(kept) - counts["trained"]
        def pick(column: list[Any]) -> list[Any]:
            return [column[i] for i in kept] if column else []

        return PromptSet(pick(self.prompts), pick(self.prompt_ids), pick(self.response_ids), pick(self.answers),
                         pick(self.tasks), counts, self.fingerprint)


@dataclass(slots=True)
class _Example:
    number: int
    prompt: str | Messages
    response: str | None
    answer: Any
    task: Row


def load_prompts(cfg: DataConfig, tokenizer: Any, max_prompt_tokens: int, key: str = "data") -> PromptSet:
    """Read and tokenise the prompts that `cfg` names; those over `max_prompt_tokens` are left out and counted.

    A chat template is rendered with the opening of the assistant's turn. `answer` is the answer field (None without
    one), `task` the whole row; a reasoning-gym row is {question, answer, metadata}.

    Raises:
        DataError: a missing or damaged file, a malformed row (naming source, row and field) unless
            cfg.bad_rows is `skip`, or no usable row. ModelError: the tokenizer has no chat template.
    """
    return _load(cfg, tokenizer, max_prompt_tokens, key, with_responses=False)


def load_examples(cfg: DataConfig, tokenizer: Any, max_tokens: int, key: str = "data") -> PromptSet:
    """Read and tokenise prompt and response pairs for SFT; pairs over `max_tokens` together are left out and counted.

    The response is the row's `response_field`, or the last turn of chat messages that end with the assistant's. It is
    tokenised apart from the prompt, as a sampled response would follow it, and ends with the end-of-sequence token.

    Raises: as `load_prompts`; ModelError also when the tokenizer has no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise ModelError(f"Tokenizer {tokenizer.name_or_path} has no end-of-sequence token (eos_token).")
    return _load(cfg, tokenizer, max_tokens, key, with_responses=True)


def _load(cfg: DataConfig, tokenizer: Any, max_tokens: int, key: str, with_responses: bool) -> PromptSet:
    if cfg.chat_template and not tokenizer.chat_template:
        raise ModelError(f"Tokenizer {tokenizer.name_or_path} has no chat template: add chat_template.jinja to that "
                         f"folder, or set {key}.chat_template=false to feed prompts as they are.")
    bad = BadRows(source_name(cfg), skip=cfg.bad_rows == "skip")
    found, sizes = PromptSet(), []
    digest = hashlib.blake2b(digest_size=16)
    examples = _examples(cfg, bad, key, with_responses)
    while chunk := list(islice(examples, ROWS_PER_TOKENIZATION)):
        for example, prompt_ids, response_ids in _tokenized(cfg, tokenizer, chunk, bad):
            sizes.append(len(prompt_ids) + len(response_ids))
            if sizes[-1] > max_tokens:
                continue
            found.prompts.append(example.prompt)
            found.prompt_ids.append(prompt_ids)
            found.answers.append(example.answer)
            found.tasks.append(example.task)
            if with_responses:
                found.response_ids.append(response_ids)
            for part in (prompt_ids.tobytes(), response_ids.tobytes(), _canonical(example.answer)):
                digest.update(len(part).to_bytes(8, "little") + part)
    found.fingerprint = digest.hexdigest()
    found.counts = {"rows": len(found), "overlong": len(sizes) - len(found), "malformed": bad.count}
    _report(found.counts, sizes, max_tokens, bad)
    return found


def _canonical(answer: Any) -> bytes:
    return json.dumps(answer, sort_keys=True, default=str).encode()


def _report(counts: dict[str, int], sizes: list[int], max_tokens: int, bad: BadRows) -> None:
    """Log what was left out; raise DataError when nothing is left."""
    left_out = []
    if counts["overlong"]:
        shortest = min(size for size in sizes if size > max_tokens)
        left_out.append(f"{counts['overlong']} over {max_tokens} tokens (the shortest of them has {shortest}, "
                        f"the longest {max(sizes)})")
    if counts["malformed"]:
        left_out.append(f"{counts['malformed']} malformed (the first: {bad.first})")
    total = counts["rows"] + counts["overlong"] + counts["malformed"]
    if not total:
        raise DataError(f"{bad.source} is empty: it has no rows.")
    if not counts["rows"]:
        raise DataError(f"{bad.source}: none of its {total} rows can be used: {', '.join(left_out)}.")
    if left_out:
        log.warning("%s: %d of %d rows left out: %s.", bad.source, total - counts["rows"], total, ", ".join(left_out))


def _examples(cfg: DataConfig, bad: BadRows, key: str, with_responses: bool) -> Iterator[_Example]:
    is_task = cfg.source == "reasoning_gym"
    prompt_field = "question" if is_task else cfg.prompt_field
    # The answers of some reasoning-gym tasks are None: their scorers read the entry.
    answer_field = "" if is_task or with_responses or cfg.source == "none" else cfg.answer_field
    for number, row in read_rows(cfg, bad, [name for name in (prompt_field, answer_field) if name], key):
        try:
            prompt, response = prompt_of(row, prompt_field, cfg.chat_template), None
            if with_responses:
                prompt, response = response_of(row, prompt, cfg.response_field, prompt_field)
            elif isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
                raise DataError(f"field {prompt_field!r} ends with an assistant turn; a prompt ends with another role.")
            answer = present(row, answer_field) if answer_field else row.get("answer") if is_task else None
        except DataError as error:
            bad.add(number, str(error))
        else:
            yield _Example(number, prompt, response, answer, row)


def _tokenized(cfg: DataConfig, tokenizer: Any, examples: list[_Example],
               bad: BadRows) -> Iterator[tuple[_Example, np.ndarray, np.ndarray]]:
    """Each usable example with its prompt and response ids (int32; no response ids without a response)."""
    rendered = list(_rendered(cfg, tokenizer, examples, bad))
    if not rendered:
        return
    # A template writes the special tokens itself.
    prompts = _encode(tokenizer, [text for _, text in rendered], special_tokens=not cfg.chat_template)
    given = [example.response for example, _ in rendered if example.response is not None]
    responses = iter(_encode(tokenizer, given, special_tokens=False) if given else [])
    for (example, _), prompt_ids in zip(rendered, prompts, strict=True):
        response_ids: list[int] = []
        if example.response is not None:
            response_ids = next(responses)
            if response_ids[-1:] != [tokenizer.eos_token_id]:
                response_ids.append(tokenizer.eos_token_id)
        if prompt_ids:
            yield example, np.array(prompt_ids, dtype=np.int32), np.array(response_ids, dtype=np.int32)
        else:
            bad.add(example.number, "the prompt has no token in the tokenizer's vocabulary.")


def _rendered(cfg: DataConfig, tokenizer: Any, examples: list[_Example],
              bad: BadRows) -> Iterator[tuple[_Example, str]]:
    """Each example with the text to tokenise; those that the chat template refuses go to `bad`."""
    system = [{"role": "system", "content": cfg.system_prompt}] if cfg.system_prompt else []
    for example in examples:
        if not cfg.chat_template:
            yield example, str(example.prompt)
            continue
        messages = example.prompt
        if isinstance(messages, str):
            messages = [*system, {"role": "user", "content": messages}]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise jinja's errors, and Python's through them
            bad.add(example.number, f"the chat template refuses the prompt: {error}")
        else:
            yield example, text


def _encode(tokenizer: Any, texts: list[str], special_tokens: bool) -> list[list[int]]:
    rows = tokenizer(texts, add_special_tokens=special_tokens, return_attention_mask=False)["input_ids"]
    if special_tokens and rows[0][-1:] == [tokenizer.eos_token_id] and not texts[0].endswith(tokenizer.eos_token):
        # Some tokenizers close every text: a prompt has to stay open for its response.
        rows = [row[:-1] for row in rows]
    return rows
