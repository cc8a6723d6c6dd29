"""What was sampled, in the shapes of OpenAI's API: whole objects, or the events of a stream."""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.environments.tools.calls import Call as ToolCall
from hybridrl.workers.rollout.endpoint.calls import ChatCall, TextCall
from hybridrl.workers.rollout.endpoint.telling import Piece
from hybridrl.workers.rollout.engine import Completion, PromptScores

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Answer:
    """One response to a prompt.

    `completion` is what the engine sampled and the conversation keeps; `text` is what the caller gets of it, without
    stop texts and tool calls. `number` counts the answers that one caller got.
    """

    number: int
    prompt_ids: Sequence[int]
    completion: Completion
    text: str
    calls: Sequence[ToolCall] = ()
    scores: PromptScores | None = None

    @property
    def message(self) -> dict[str, Any]:
        """The message of the assistant, as the caller gets it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.calls:
            message["content"] = self.text if self.text.strip() else None
            message["tool_calls"] = [
                {"id": f"call_{self.number}_{i}", "type": "function",
                 "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}}
                for i, call in enumerate(self.calls)]
        return message

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for it."""
        return "tool_calls" if self.calls else self.completion.finish_reason


def chat_answer(call: ChatCall, answers: Sequence[Answer], decode: Decode, chat_id: str) -> dict[str, Any]:
    """The body of `/v1/chat/completions`, one choice an answer."""
    choices = [{"index": i, "message": answer.message, "finish_reason": answer.finish_reason,
                "logprobs": _chat_log_probs(answer.completion.token_ids, answer.completion.log_probs, decode)
                if call.log_probs else None} for i, answer in enumerate(answers)]
    return {**_head(call.model, chat_id, "chat.completion", _versions(answers)), "choices": choices,
            "usage": _usage(answers[:1], answers)}


def text_answer(call: TextCall, answers: Sequence[Answer], decode: Decode, text_id: str) -> dict[str, Any]:
    """The body of `/v1/completions`, one choice an answer."""
    choices = [{"index": i, "text": (decode(answer.prompt_ids) if call.echo else "") + answer.text,
                "finish_reason": answer.finish_reason,
                "logprobs": _text_log_probs(call, answer, decode) if call.log_probs else None}
               for i, answer in enumerate(answers)]
    return {**_head(call.model, text_id, "text_completion", _versions(answers)), "choices": choices,
            "usage": _usage(answers[::call.n], answers)}


class ChatEvents:
    """The events of a streamed chat call: for each choice a role, texts, tool calls, and the reason to end."""

    def __init__(self, call: ChatCall, decode: Decode, chat_id: str):
        self._call, self._decode, self._id = call, decode, chat_id

    def opening(self) -> Iterator[dict[str, Any]]:
        """Before all else."""
        for index in range(self._call.n):
            yield self._event([], index, {"role": "assistant", "content": ""})

    def piece(self, piece: Piece) -> dict[str, Any]:
        """Some more of a choice."""
        log_probs = _chat_log_probs(piece.token_ids, piece.log_probs, self._decode) if self._call.log_probs else None
        return self._event([piece.version], piece.choice, {"content": piece.text}, log_probs)

    def closing(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        """What is known at the end only."""
        for index, answer in enumerate(answers):
            versions = _versions([answer])
            for i, tool_call in enumerate(answer.message.get("tool_calls", ())):
                yield self._event(versions, index, {"tool_calls": [{"index": i, **tool_call}]})
            yield self._event(versions, index, {}, finish_reason=answer.finish_reason)
        if self._call.stream_usage:
            yield {**self._event(_versions(answers), 0, {}), "choices": [], "usage": _usage(answers[:1], answers)}

    def _event(self, versions: Sequence[int], index: int, delta: dict[str, Any],
               log_probs: dict[str, Any] | None = None, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": log_probs}
        return {**_head(self._call.model, self._id, "chat.completion.chunk", versions), "choices": [choice]}


class TextEvents:
    """The events of a streamed text call: for each choice texts, and the reason to end."""

    def __init__(self, call: TextCall, decode: Decode, text_id: str):
        self._call, self._decode, self._id = call, decode, text_id
        self._told = [0] * (len(call.prompts) * call.n)

    def opening(self) -> Iterator[dict[str, Any]]:
        """Nothing."""
        return iter(())

    def piece(self, piece: Piece) -> dict[str, Any]:
        """Some more of a choice."""
        log_probs = None
        if self._call.log_probs:
            log_probs = _token_log_probs(piece.token_ids, piece.log_probs, self._decode, self._told[piece.choice])
            self._told[piece.choice] += sum(map(len, log_probs["tokens"]))
        return self._event([piece.version], piece.choice, piece.text, log_probs)

    def closing(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        """What is known at the end only."""
        for index, answer in enumerate(answers):
            yield self._event(_versions([answer]), index, "", finish_reason=answer.finish_reason)
        if self._call.stream_usage:
            yield {**self._event(_versions(answers), 0, ""), "choices": [],
                   "usage": _usage(answers[::self._call.n], answers)}

    def _event(self, versions: Sequence[int], index: int, text: str, log_probs: dict[str, Any] | None = None,
               finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "finish_reason": finish_reason, "logprobs": log_probs}
        return {**_head(self._call.model, self._id, "text_completion", versions), "choices": [choice]}


def _head(model: str, answer_id: str, kind: str, versions: Sequence[int]) -> dict[str, Any]:
    return {"id": answer_id, "object": kind, "created": int(time.time()), "model": model,
            "system_fingerprint": "weights-" + "-".join(map(str, versions)) if versions else None}


def _versions(answers: Sequence[Answer]) -> list[int]:
    return sorted({version for answer in answers for version in answer.completion.versions})


def _usage(prompts: Sequence[Answer], answers: Sequence[Answer]) -> dict[str, int]:
    """Tokens used; `prompts` are one answer to each prompt."""
    prompt = sum(len(answer.prompt_ids) for answer in prompts)
    sampled = sum(len(answer.completion.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _chat_log_probs(token_ids: Sequence[int], log_probs: Sequence[float], decode: Decode) -> dict[str, Any]:
    texts = [decode([token]) for token in token_ids]
    return {"content": [{"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
                        for text, log_prob in zip(texts, log_probs, strict=True)], "refusal": None}


def _text_log_probs(call: TextCall, answer: Answer, decode: Decode) -> dict[str, Any]:
    """Log-probs of the tokens, those of the echoed prompt first; null where nothing precedes the token.

    Those of the likeliest tokens are known where the prompt was scored, else null.
    """
    ids = list(answer.completion.token_ids)
    log_probs: list[float | None] = list(answer.completion.log_probs)
    top: list[dict[str, float] | None] = [None] * len(ids)
    if call.echo:
        scores = answer.scores or []
        top = [None, *({decode([token]): score.log_prob, decode([score.top_id]): score.top_log_prob}
                       for token, score in zip(answer.prompt_ids[1:], scores, strict=True)), *top]
        log_probs = [None, *(score.log_prob for score in scores), *log_probs]
        ids = [*answer.prompt_ids, *ids]
    return _token_log_probs(ids, log_probs, decode) | {"top_logprobs": top if call.top else None}


def _token_log_probs(ids: Sequence[int], log_probs: Sequence[float | None], decode: Decode, offset: int = 0
                     ) -> dict[str, Any]:
    texts = [decode([token]) for token in ids]
    offsets = itertools.accumulate(map(len, texts), initial=offset)
    return {"tokens": texts, "token_logprobs": list(log_probs), "top_logprobs": None,
            "text_offset": list(offsets)[:len(texts)]}
