"""What was sampled, in the shapes of OpenAI's API: whole objects, or the events of a stream."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.environments.tools.calls import Call as ToolCall
from hybridrl.workers.rollout.endpoint.calls import ChatCall, TextCall
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


def chat_answer(call: ChatCall, answer: Answer, decode: Decode, chat_id: str) -> dict[str, Any]:
    """The body of `/v1/chat/completions`."""
    choice = {"index": 0, "message": answer.message, "finish_reason": answer.finish_reason,
              "logprobs": _chat_log_probs(answer, decode) if call.log_probs else None}
    return {**_head(call.model, chat_id, "chat.completion", [answer]), "choices": [choice], "usage": _usage([answer])}


def chat_events(call: ChatCall, answer: Answer, decode: Decode, chat_id: str) -> Iterator[dict[str, Any]]:
    """The same as a stream: role, text, tool calls, reason to end, and tokens used where the call asks for them."""
    message, log_probs = answer.message, _chat_log_probs(answer, decode) if call.log_probs else None
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message["content"]:
        deltas.append({"content": message["content"]})
    for i, tool_call in enumerate(message.get("tool_calls", ())):
        deltas.append({"tool_calls": [{"index": i, **tool_call}]})
    for i, delta in enumerate([*deltas, {}]):
        choice = {"index": 0, "delta": delta, "finish_reason": None if delta else answer.finish_reason,
                  "logprobs": log_probs if i == 1 else None}
        yield {**_head(call.model, chat_id, "chat.completion.chunk", [answer]), "choices": [choice]}
    if call.stream_usage:
        yield {**_head(call.model, chat_id, "chat.completion.chunk", [answer]), "choices": [],
               "usage": _usage([answer])}


def text_answer(call: TextCall, answers: Sequence[Answer], decode: Decode, text_id: str) -> dict[str, Any]:
    """The body of `/v1/completions`, one choice a prompt."""
    choices = [{"index": i, "text": (decode(answer.prompt_ids) if call.echo else "") + answer.text,
                "finish_reason": answer.finish_reason,
                "logprobs": _text_log_probs(call, answer, decode) if call.log_probs else None}
               for i, answer in enumerate(answers)]
    return {**_head(call.model, text_id, "text_completion", answers), "choices": choices, "usage": _usage(answers)}


def text_events(call: TextCall, answers: Sequence[Answer], decode: Decode, text_id: str) -> Iterator[dict[str, Any]]:
    """The same as a stream."""
    whole = text_answer(call, answers, decode, text_id)
    usage = whole.pop("usage")
    yield whole
    if call.stream_usage:
        yield {**whole, "choices": [], "usage": usage}


def _head(model: str, answer_id: str, kind: str, answers: Sequence[Answer]) -> dict[str, Any]:
    versions = sorted({version for answer in answers for version in answer.completion.versions})
    return {"id": answer_id, "object": kind, "created": int(time.time()), "model": model,
            "system_fingerprint": "weights-" + "-".join(map(str, versions))}


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    prompt = sum(len(answer.prompt_ids) for answer in answers)
    sampled = sum(len(answer.completion.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _chat_log_probs(answer: Answer, decode: Decode) -> dict[str, Any]:
    texts = [decode([token]) for token in answer.completion.token_ids]
    return {"content": [{"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
                        for text, log_prob in zip(texts, answer.completion.log_probs, strict=True)], "refusal": None}


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
    texts = [decode([token]) for token in ids]
    offsets = [0]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    return {"tokens": texts, "token_logprobs": log_probs, "top_logprobs": top if call.top else None,
            "text_offset": offsets[:len(texts)]}
