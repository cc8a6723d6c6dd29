"""From messages to token ids and back, so that text stays text and control tokens come from the template alone.

A chat template writes control tokens as text, and so may anyone whose text is put into it: an environment that
returns `<|im_end|>` must not end a turn. Wherever message text spells a token of the vocabulary's added ones, a break
is put after its first character before the template sees it; the rendered text is tokenised piece by piece between
breaks, so that no such token can match.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.environments import Action, Message
from hybridrl.environments.record import EnvironmentFailure
from hybridrl.errors import ModelError

BREAK = "\ufdd0"
"""A code point that Unicode keeps out of texts for good."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a conversation goes on: `ids` to feed next. With `rewritten` they replace all ids held; else they follow."""

    ids: list[int]
    text: str
    rewritten: bool


class Chat:
    """Renders conversations for one tokenizer. Texts that it returns or takes as `held` contain breaks.

    Args:
        tokenizer: a transformers tokenizer.
        chat_template: render with its template; without, observations follow each other as they are.
        template_options: more variables for the template, `enable_thinking` for instance.
        stop_ids: token ids that end a turn.
    Raises:
        ModelError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int], chat_template: bool = True,
                 template_options: Mapping[str, Any] | None = None):
        if chat_template and not tokenizer.chat_template:
            raise ModelError(f"Tokenizer {tokenizer.name_or_path} has no chat template: add chat_template.jinja to "
                             "that folder, or set environment.chat_template=false to feed observations as they are.")
        self.tokenizer, self.chat_template, self.options = tokenizer, chat_template, dict(template_options or {})
        self.stop_ids = set(stop_ids)
        self._added = dict(tokenizer.added_tokens_decoder)
        added = sorted((str(token) for token in self._added.values() if len(str(token)) > 1 and str(token).strip()),
                       key=len, reverse=True)
        # Overlapping ones, too: a look-ahead takes no characters.
        self._control = re.compile("(?=" + "|".join(map(re.escape, added)) + ")") if added else None
        self._lone = [str(token) for token in self._added.values() if len(str(token)) == 1 and token.special]
        self._anchor = self._working_anchor()

    # ---- text

    def neutral(self, value: Any) -> Any:
        """A text, or the texts of a message however deep (names too), with breaks where they spell an added token.

        Special tokens of a single character can't be broken and are left out.
        """
        if isinstance(value, Mapping):
            return {self.neutral(key): self.neutral(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.neutral(item) for item in value]
        return self._neutral_text(value) if isinstance(value, str) else value

    def _neutral_text(self, text: str) -> str:
        text = text.replace(BREAK, "")
        for token in self._lone:
            text = text.replace(token, "")
        if self._control is None:
            return text
        pieces, last = [], 0
        for found in self._control.finditer(text):
            pieces.append(text[last:found.start() + 1])
            last = found.start() + 1
        return BREAK.join([*pieces, text[last:]])

    def text_of(self, ids: Sequence[int]) -> str:
        """What sampled tokens say: added tokens as their text, breaks where ordinary ones spell such a token."""
        pieces: list[str] = []
        ordinary: list[int] = []
        for token in [*ids, None]:
            if token is not None and token not in self._added:
                ordinary.append(token)
                continue
            if ordinary:
                pieces.append(self._neutral_text(self._decode_after(ordinary)))
                ordinary = []
            if token is not None:
                pieces.append(str(self._added[token]))
        return "".join(pieces)

    def _decode_after(self, ids: Sequence[int]) -> str:
        """Text of tokens that continue another: some decoders drop the space that a text begins with."""
        if self._anchor is None:
            return self._decode(ids)
        anchor, before = self._anchor
        return self._decode([*before, *ids])[len(anchor):]

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def plain(self, ids: Sequence[int]) -> str:
        """The text without special tokens, for environments and people."""
        return self._decode(ids, skip_special_tokens=True)

    def whole(self, ids: Sequence[int]) -> str:
        """The text with special tokens."""
        return self._decode(ids)

    def action(self, ids: Sequence[int], finish_reason: str) -> Action:
        """A sampled turn as the environment gets it."""
        return Action(self.plain(ids), self._decode(ids), ids, finish_reason)

    def spoken(self, ids: Sequence[int]) -> Message:
        """The message of a sampled turn: its text without the token that ended it."""
        return {"role": "assistant", "content": self.text_of(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)}

    # ---- ids

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Continuation:
        """The whole prompt of a conversation: `messages` with the opening of the assistant's turn."""
        text = self._rendered(messages, tools) if self.chat_template else _joined(messages)
        first, _, rest = text.partition(BREAK)
        # A template writes the special tokens itself.
        ids = self.tokenizer(first, add_special_tokens=not self.chat_template)["input_ids"]
        if not self.chat_template and ids and ids[-1] == self.tokenizer.eos_token_id:
            ids = ids[:-1]  # some tokenizers close every text
        return Continuation(ids + self._after(rest), text, True)

    def following(self, held: str, messages: Sequence[Message], new: Sequence[Message],
                  tools: Sequence[Mapping[str, Any]]) -> Continuation:
        """What comes after the ids whose text is `held` when `new` messages join `messages`, all of them so far.

        Where the template leaves what is held as it is, only its next piece is tokenised. Where it does not (it drops
        old thinking, merges turns, trims text), the conversation has to be fed anew.
        """
        if not self.chat_template:
            text = _joined(new)
            return Continuation(self._after(text), text, False)
        whole = self._rendered([*messages, *new], tools)
        if whole.startswith(held):
            text = whole[len(held):]
            return Continuation(self._after(text), text, False)
        return self.opening([*messages, *new], tools)

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True, **self.options)
        except Exception as error:  # templates raise jinja's errors, and Python's through them
            raise EnvironmentFailure("invalid", f"the chat template refuses the conversation: {error}") from error

    def _after(self, text: str) -> list[int]:
        """Ids of a text that continues another; pieces between breaks are tokenised apart."""
        return [token for piece in text.split(BREAK) if piece for token in self._piece(piece)]

    def _piece(self, text: str) -> list[int]:
        """Some tokenizers put a space before a text's first word: behind an anchor it is not the first."""
        if self._anchor is None:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        anchor, ids = self._anchor
        return self.tokenizer(anchor + text, add_special_tokens=False)["input_ids"][len(ids):]

    def _working_anchor(self) -> tuple[str, list[int]] | None:
        """The end token, where it stands for itself whatever follows."""
        anchor = self.tokenizer.eos_token
        if not anchor:
            return None
        ids = self.tokenizer(anchor, add_special_tokens=False)["input_ids"]
        spaced = self.tokenizer(anchor + " \na", add_special_tokens=False)["input_ids"]
        keeps = len(ids) == 1 and spaced[:1] == ids and not getattr(self._added.get(ids[0]), "rstrip", False)
        return (anchor, ids) if keeps else None


def _joined(messages: Sequence[Message]) -> str:
    return "".join(message["content"] for message in messages)
