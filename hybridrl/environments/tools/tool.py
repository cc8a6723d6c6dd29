"""From a Python function to a tool: its JSON schema, and arguments checked against it."""

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybridrl.errors import ConfigError, unknown
from hybridrl.importing import imported

TOOLS: dict[str, str] = {
    "calculator": "hybridrl.environments.tools.calculator:calculator",
    "python": "hybridrl.environments.tools.sandbox:Python",
    "search": "hybridrl.environments.tools.search:Search",
}
"""Tools by name: where each is. Any other goes by its own import path, `package.module:function`."""

KEY = "environment.options.tools"
ENTRY = ("tool", "name", "options", "time_s", "output_chars")
"""Keys of a tool in a configuration that is more than a name."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy may call. `schema` is what the chat template shows of it."""

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]
    time_s: float
    """Longest call, in seconds."""
    output_chars: int
    """Longest result; the rest is cut."""

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return self.schema["function"]["parameters"]

    def faults(self, arguments: Mapping[str, Any]) -> list[str]:
        """What is wrong with the arguments of a call; empty where nothing is."""
        properties = self.parameters.get("properties", {})
        found = [f"{name} is missing" for name in self.parameters.get("required", ()) if name not in arguments]
        for name, value in arguments.items():
            if name not in properties:
                found.append(f"there is no {name}, only {', '.join(properties) or 'no arguments'}")
            elif not fits(value, properties[name]):
                found.append(f"{name} must be {_accepted(properties[name])}, got {value!r:.80}")
        return found


def tool_from(entry: str | Mapping[str, Any], time_s: float, output_chars: int) -> Tool:
    """A tool of a configuration: a name of TOOLS or an import path, or a mapping with keys of ENTRY.

    A class is built with `options`; calling the object calls the tool. Raises ConfigError for whatever does not fit.
    """
    given: dict[str, Any] = {"tool": entry} if isinstance(entry, str) else dict(entry)
    for key in given:
        if key not in ENTRY:
            raise ConfigError(f"{KEY}: " + unknown("key of a tool", key, ENTRY))
    if not isinstance(given.get("tool"), str):
        raise ConfigError(f"{KEY}: each needs a name or an import path under `tool`, got {entry!r}.")
    path, options = given["tool"], given.get("options") or {}
    function = _imported(path)
    name = given.get("name") or path.rpartition(":")[2]
    if inspect.isclass(function):
        try:
            inspect.signature(function).bind(**options)
            function = function(**options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{KEY}: tool {path!r} can't be built with options {options!r}: {error}.") from error
    elif options:
        raise ConfigError(f"{KEY}: tool {path!r} is a function and takes no options, got {options!r}.")
    limits = {"time_s": given.get("time_s", time_s), "output_chars": given.get("output_chars", output_chars)}
    for key, value in limits.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"{KEY}: {key} of tool {path!r} must be positive, got {value!r}.")
    return Tool(name, function, schema_of(function, name), float(limits["time_s"]), int(limits["output_chars"]))


def schema_of(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """The JSON schema of a function: its type hints, and the texts of its docstring (Google style, `Args:`).

    Raises ConfigError naming what is missing.
    """
    from transformers.utils import get_json_schema

    given: Any = function
    called = given if inspect.isroutine(given) else given.__call__
    missing = _undocumented(called)
    if missing:
        raise ConfigError(f"{KEY}: tool {name!r} needs {'; '.join(missing)}.")
    try:
        schema = get_json_schema(called)
    except Exception as error:  # of its own kinds for docstrings and hints, and typing's for names it can't resolve
        raise ConfigError(f"{KEY}: tool {name!r} has no JSON schema: {' '.join(map(str, error.args))}") from error
    schema["function"]["name"] = name
    schema["function"].pop("return", None)
    return schema


def _undocumented(function: Callable[..., Any]) -> list[str]:
    documented = inspect.getdoc(function) or ""
    parameters = inspect.signature(function).parameters.values()
    missing = [] if documented else ["a docstring that says what it does"]
    for p in parameters:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY):
            missing.append(f"parameters that go by name, not {p}")
        elif p.annotation is p.empty:
            missing.append(f"a type hint of parameter {p.name!r}")
        elif documented and f"{p.name}:" not in documented and f"{p.name} (" not in documented:
            missing.append(f"a line `{p.name}: ...` under `Args:` in its docstring")
    return missing


def _imported(path: str) -> Any:
    function = imported(TOOLS.get(path, path), KEY, "tool", TOOLS)
    if not callable(function):
        raise ConfigError(f"{KEY}: {path!r} must be a function or a class, got {type(function).__name__}.")
    return function


_TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda v: isinstance(v, str), "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "array": lambda v: isinstance(v, list), "object": lambda v: isinstance(v, dict), "null": lambda v: v is None}


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a JSON value has a schema of the kind made from type hints (which say `nullable` as OpenAPI does)."""
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(fits(value, part) for part in schema["anyOf"])
    if "enum" in schema and value not in schema["enum"]:
        return False
    kinds = schema.get("type", list(_TYPES))
    if not any(_TYPES.get(kind, lambda v: True)(value) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return False
    if isinstance(value, list):
        heads = schema.get("prefixItems")
        if heads is not None:
            return len(value) == len(heads) and all(map(fits, value, heads))
        return all(fits(item, schema.get("items", {})) for item in value)
    if isinstance(value, dict) and isinstance(inner := schema.get("additionalProperties", {}), Mapping):
        return all(fits(item, inner) for item in value.values())
    return True


def _accepted(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(map(repr, schema["enum"]))
    kinds: typing.Any = schema.get("type", "of its schema")
    return kinds if isinstance(kinds, str) else " or ".join(kinds)
