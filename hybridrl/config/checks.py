"""Checks that options share: each raises ConfigError in one line that names the key, the value and what is accepted."""

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from hybridrl.errors import ConfigError, unknown


def check(ok: bool, key: str, value: object, accepted: str) -> None:
    """Raise ConfigError naming the key, the value and what is accepted, unless `ok`."""
    if not ok:
        raise ConfigError(f"{key} must be {accepted}, got {value!r}.")


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError with near matches unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{key}: " + unknown("choice", value, choices))


def check_temperature(key: str, value: float) -> None:
    """Raise ConfigError unless both engines sample at this temperature; vLLM silently raises smaller ones to 0.01."""
    check(value == 0 or 0.01 <= value <= 2, key, value, "0, or from 0.01 to 2")


def check_k(key: str, ks: list[int], samples: int, what: str) -> None:
    """Raise ConfigError unless each k has enough responses."""
    for k in ks:
        check(1 <= k <= samples, key, ks, f"from 1 to {what}={samples}")


def check_seed(value: int, key: str = "seed") -> None:
    """Raise ConfigError unless every generator takes this seed; vLLM's have the narrowest range."""
    check(0 <= value < 2**32, key, value, f"from 0 to {2**32 - 1}")


def configs_in(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """A config and the configs in it, inner ones first, each with its dotted key."""
    for name in (f.name for f in fields(config)):
        value, inner = getattr(config, name), f"{key}.{name}" if key else name
        nodes = {f"{inner}[{i}]": item for i, item in enumerate(value)} if isinstance(value, list) else {inner: value}
        for node_key, node in nodes.items():
            if is_dataclass(node):
                yield from configs_in(node, node_key)
    yield key, config


def validate_all(config: Any, key: str = "") -> None:
    """Run every `validate` of a config and the configs in it, inner ones first.

    A `validate` that takes an argument gets the dotted key of its config. Raises ConfigError.
    """
    for node_key, node in configs_in(config, key):
        if hasattr(node, "validate"):
            takes_key = inspect.signature(node.validate).parameters
            node.validate(*([node_key] if takes_key else []))
