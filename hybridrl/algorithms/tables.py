"""Visible tables: a name, the function behind it and its typed options.

    ADVANTAGES = Table("advantage")

    @dataclass(kw_only=True)
    class ScaledOptions:
        scale: float = option(1.0, gt=0)

    @ADVANTAGES.register("scaled", options=ScaledOptions)
    def scaled(rewards, mask, *, scale=ScaledOptions.scale): ...

A parameter of the function that is a field of the options class is an option. Every other parameter is a
column: a tensor found by that name in the batch, optional if the parameter has a default or accepts None. Without an
options class, one is made from the function's annotated keyword-only parameters.
"""

import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybridrl.errors import BatchError, ConfigError, unknown


def option(
    default: Any,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A field of an options class with the values it accepts: bounds (ge, gt, le, lt) or choices."""
    bounds = {"at least": ge, "above": gt, "at most": le, "below": lt}
    return dataclasses.field(default=default, metadata={"bounds": bounds, "choices": choices})


@dataclass(frozen=True)
class Entry:
    """One row of a table."""

    name: str
    fn: Callable[..., Any]
    options: type
    prepare: Callable[..., dict[str, Any]] | None = None
    """Run once on the full mini-batch: (columns, options) -> extra columns that `fn` reads."""
    aggregation: str | None = None
    """Name of the loss aggregation the source of this row uses."""
    traits: frozenset[str] = frozenset()
    """What the row needs or does, read by the check of impossible combinations."""

    @property
    def columns(self) -> dict[str, bool]:
        """Names of the columns the function reads; true where required: no default, and None is not accepted."""
        return {p.name: p.default is p.empty and types.NoneType not in typing.get_args(p.annotation)
                for p in self._parameters}

    @property
    def _parameters(self) -> list[inspect.Parameter]:
        """Those of the function that are columns."""
        names = {field.name for field in dataclasses.fields(self.options)}
        return [p for p in inspect.signature(self.fn).parameters.values() if p.name not in names]

    def pick(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments from the columns at hand; None for one that must be given and may be None."""
        found = {p.name: (columns.get(p.name), p.default is p.empty) for p in self._parameters}
        return {name: x for name, (x, must) in found.items() if must or x is not None}


class Table(Mapping[str, Entry]):
    """Mapping from a name to its Entry; `kind` is the word used in messages."""

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, Entry] = {}

    def register(
        self,
        name: str,
        options: type | None = None,
        *,
        prepare: Callable[..., dict[str, Any]] | None = None,
        aggregation: str | None = None,
        traits: tuple[str, ...] = (),
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator that adds a function under `name`.

        With an options class it returns the function with its options checked on every call, else the function.

        Raises ConfigError when the name is taken or an options field is no parameter of the function.
        """
        def add(fn: Callable[..., Any]) -> Callable[..., Any]:
            known = self._entries.get(name)
            # The same function again is a notebook cell that runs again.
            if known and (known.fn.__module__, known.fn.__qualname__) != (fn.__module__, fn.__qualname__):
                raise ConfigError(f"{self.kind} {name!r} is already registered; choose another name.")
            cls = options or _options_from_signature(fn)
            missing = {f.name for f in dataclasses.fields(cls)} - set(inspect.signature(fn).parameters)
            if missing:
                raise ConfigError(
                    f"{self.kind} {name!r}: options {sorted(missing)} of {cls.__name__} are no parameters of "
                    f"{fn.__name__}, which accepts {sorted(inspect.signature(fn).parameters)}."
                )
            if options:
                fn = _checked(fn, self.kind, name, cls)
            self._entries[name] = Entry(name, fn, cls, prepare, aggregation, frozenset(traits))
            return fn

        return add

    def adopt(self, entry: Entry) -> None:
        """Take over a row that another process registered and sent here."""
        self._entries[entry.name] = entry

    def options(self, name: str, values: Any = None) -> Any:
        """Options of `name` from a mapping (or an instance of its class), checked.

        Raises ConfigError naming the key, the value received and what is accepted.
        """
        return _build(self.kind, name, self[name].options, values)

    def call(self, name: str, options: Any, columns: Mapping[str, Any]) -> Any:
        """Call `name` with the columns it asks for.

        Raises BatchError naming the row and the column when a required column is absent.
        """
        entry = self[name]
        built = self.options(name, options)
        self._check_columns(columns)
        for column, required in entry.columns.items():
            if required and columns.get(column) is None:
                raise self._absent(name, column, columns)
        options = {f.name: getattr(built, f.name) for f in dataclasses.fields(built)}
        return entry.fn(**entry.pick(columns), **options)

    def prepare(self, name: str, options: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Extra columns that `name` computes from the full mini-batch; {} when it needs none.

        Raises BatchError as `call`.
        """
        entry = self[name]
        built = self.options(name, options)
        self._check_columns(columns)
        try:
            return {} if entry.prepare is None else entry.prepare(columns, built)
        except KeyError as error:
            if error.args[0] in columns:
                raise
            raise self._absent(name, error.args[0], columns) from None

    def _check_columns(self, columns: Any) -> None:
        if not isinstance(columns, Mapping):
            raise BatchError(f"columns for {self.kind} must be a mapping of names to padded tensors, got "
                             f"{type(columns).__name__}.")

    def _absent(self, name: str, column: object, columns: Mapping[str, Any]) -> BatchError:
        have = ", ".join(sorted(key for key, x in columns.items() if x is not None)) or "none"
        return BatchError(f"{self.kind} {name!r} needs the column {column!r}; the batch has: {have}.")

    def __getitem__(self, name: str) -> Entry:
        try:
            return self._entries[name]
        except (KeyError, TypeError):
            raise ConfigError(unknown(self.kind, name, self._entries)) from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _options_from_signature(fn: Callable[..., Any]) -> type:
    """Options class made of the keyword-only parameters that are annotated with a plain type."""
    fields = []
    for p in inspect.signature(fn).parameters.values():
        plain = p.annotation in (bool, int, float, str) or isinstance(p.default, bool | int | float | str)
        if p.kind is p.KEYWORD_ONLY and p.default is not p.empty and plain:
            hint = type(p.default) if p.annotation is p.empty else p.annotation
            fields.append((p.name, hint, dataclasses.field(default=p.default)))
    return dataclasses.make_dataclass(f"{fn.__name__.title().replace('_', '')}Options", fields, kw_only=True)


def _build(kind: str, name: str, cls: type, values: Any) -> Any:
    """`Table.options` of the entry's options class."""
    where = f"{kind} {name!r}"
    if values is None:
        values = {}
    if isinstance(values, cls):
        values = {field.name: getattr(values, field.name) for field in dataclasses.fields(cls)}
    if not isinstance(values, Mapping):
        raise ConfigError(f"Options of {where} must be a mapping or {cls.__name__}, got {values!r}.")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = _hints(cls)
    for key in values:
        if key not in fields:
            raise ConfigError(unknown(f"{kind} {name} option", key, fields))
    built = cls(**{k: _check(where, fields[k], hints[k], v) for k, v in values.items()})
    if hasattr(built, "validate"):
        try:
            built.validate()
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return built


def _checked(fn: Callable[..., Any], kind: str, name: str, cls: type) -> Callable[..., Any]:
    """`fn` with the options among its arguments checked. It may travel to workers by value: no table goes along."""
    names = {field.name for field in dataclasses.fields(cls)}

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _build(kind, name, cls, {key: value for key, value in kwargs.items() if key in names})
        return fn(*args, **kwargs)

    return checked


_hints = functools.lru_cache(maxsize=None)(typing.get_type_hints)


def _check(where: str, field: Any, hint: Any, value: Any) -> Any:
    """`value` as the field's type and within its bounds, or ConfigError."""
    accepted, kinds = _describe(field, hint)
    error = ConfigError(f"Option {field.name!r} of {where} must be {accepted}, got {value!r}.")
    if value is None:
        if types.NoneType in kinds:
            return None
        raise error
    if typing.get_origin(kinds[0]) is list:
        if not isinstance(value, list | tuple) or any(_number(v) is None for v in value):
            raise error
        return [float(v) for v in value]
    if kinds[0] in (int, float):
        number = _number(value)
        if number is None or (kinds[0] is int and not isinstance(value, int)) or _outside(field, number):
            raise error
        return kinds[0](value)
    choices = field.metadata.get("choices")
    if not isinstance(value, kinds[0]) or (choices and value not in choices):
        raise error
    return value


def _number(value: Any) -> float | None:
    """float(value), or None when it is no number or NaN. A bool is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return None
    return float(value)


def _outside(field: Any, value: float) -> bool:
    ge, gt, le, lt = (field.metadata.get("bounds", {}).get(k) for k in ("at least", "above", "at most", "below"))
    return (
        (ge is not None and value < ge)
        or (gt is not None and value <= gt)
        or (le is not None and value > le)
        or (lt is not None and value >= lt)
    )


def _describe(field: Any, hint: Any) -> tuple[str, tuple[Any, ...]]:
    """What a field accepts in words, and its type alternatives with None last."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    text = words.get(kinds[0], "a list of numbers")
    if field.metadata.get("choices"):
        text = "one of " + ", ".join(field.metadata["choices"])
    bounds = [f"{word} {b:g}" for word, b in field.metadata.get("bounds", {}).items() if b is not None]
    text = " ".join([text, " and ".join(bounds)]).strip()
    return text + (" or null" if types.NoneType in kinds else ""), kinds
