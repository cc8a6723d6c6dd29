"""The fields of one row, checked. Every function raises DataError naming the field; the caller adds source and row."""

from typing import Any

from hybridrl.data.sources import Row, missing_field
from hybridrl.errors import DataError

Messages = list[dict[str, Any]]


def present(row: Row, name: str) -> Any:
    """The value of a field that is there and not null."""
    if name not in row:
        raise DataError(missing_field(name, row))
    if row[name] is None:
        raise DataError(f"field {name!r} is null.")
    return row[name]


def _text(row: Row, name: str) -> str:
    value = present(row, name)
    if not isinstance(value, str):
        raise DataError(f"field {name!r} must be text, got {type(value).__name__}.")
    if not value.strip():
        raise DataError(f"field {name!r} is empty.")
    _check_unicode(value, name)
    return value


def _check_unicode(text: str, name: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which tokenizers don't take
            raise DataError(f"field {name!r} is no valid Unicode text: {error.reason}.") from error


def prompt_of(row: Row, name: str, chat_template: bool) -> str | Messages:
    """The row's prompt, checked: text or chat messages."""
    value = present(row, name)
    if isinstance(value, str):
        return _text(row, name)
    if not isinstance(value, list):
        raise DataError(f"field {name!r} must be text or a list of chat messages, got {type(value).__name__}.")
    if not value:
        raise DataError(f"field {name!r} is empty.")
    if not chat_template:
        raise DataError(f"field {name!r} holds chat messages, which need chat_template=true.")
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise DataError(f"field {name!r}, message {i + 1} must be an object with texts role and content, "
                            f"got {str(message)[:80]}.")
        _check_unicode(message["role"] + message["content"], name)
    # Columnar files fill absent keys with nulls, which templates would take for given ones.
    return [{k: v for k, v in message.items() if v is not None} for message in value]


def response_of(row: Row, prompt: str | Messages, name: str, prompt_name: str) -> tuple[str | Messages, str]:
    """Prompt and response of an SFT row: its field `name`, or the assistant's turn that ends its messages."""
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        if len(prompt) == 1:
            raise DataError(f"field {prompt_name!r} has no turn before the assistant's.")
        if not prompt[-1]["content"].strip():
            raise DataError(f"field {prompt_name!r} ends with an empty assistant turn.")
        return prompt[:-1], prompt[-1]["content"]
    return prompt, _text(row, name)
