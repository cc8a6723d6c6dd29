"""The options as a list: their keys, types, defaults and documentation, read from the config classes.

`python -m hybridrl.config_reference > docs/configuration.md` writes the reference page.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hybridrl.config import RECIPES

WORDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list", dict: "a mapping",
}


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `key` is dotted; the options of a list's items have `[]` after the list's key."""

    key: str
    type: Any
    default: Any
    doc: str

    @property
    def item(self) -> type | None:
        """Config class of a list's items, or of the option itself; None for plain values."""
        inner = typing.get_args(self.type)[0] if typing.get_origin(self.type) is list else self.type
        return inner if dataclasses.is_dataclass(inner) else None

    @property
    def accepted(self) -> str:
        """What the option takes, in words."""
        kind = typing.get_origin(self.type) or self.type
        return WORDS.get(kind, f"a group of options ({self.key}.name=value)")


def own_options(cls: type, prefix: str = "") -> Iterator[Option]:
    """The options of a config class itself; nested groups count as one option."""
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        else:
            default = field.default
        yield Option(prefix + field.name, hints[field.name], default, docs.get(field.name, ""))


def options_of(cls: type, prefix: str = "") -> Iterator[Option]:
    """Every option of a config class, nested ones included, each group before its own options."""
    for option in own_options(cls, prefix):
        yield option
        if option.item:
            yield from options_of(option.item, option.key + ("." if option.item is option.type else "[]."))


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstring beneath each field of a dataclass, inherited ones included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (body,) = (node.body for node in ast.parse(textwrap.dedent(inspect.getsource(base))).body
                   if isinstance(node, ast.ClassDef))
        for line, following in itertools.pairwise(body):
            if isinstance(line, ast.AnnAssign) and isinstance(following, ast.Expr):
                text = ast.literal_eval(following.value)
                docs[ast.unparse(line.target)] = inspect.cleandoc(text).replace("\n", " ")
    return docs


def reference() -> str:
    """The reference page, in Markdown: one section per recipe and one per group of options."""
    page = [_INTRODUCTION]
    for name, cls in RECIPES.items():
        page += [f"\n## {name}\n", f"`python -m recipes.{name}`: {inspect.getdoc(cls)}\n", *_table(cls)]
    for cls, keys in _groups().items():
        if all(option.item is option.type for option in own_options(cls)):
            continue  # groups of groups: the recipe's table names them
        page += [f"\n## {keys[0]}\n"]
        if len(keys) > 1:
            page += [f"Also {', '.join(f'`{key}`' for key in keys[1:])}.\n"]
        page += _table(cls, keys[0] + ".")
    return "\n".join(page) + "\n"


def _groups() -> dict[type, list[str]]:
    """Each nested config class with the keys it appears under, over all recipes."""
    found: dict[type, list[str]] = {}
    for root in RECIPES.values():
        for option in options_of(root):
            key = option.key if option.item is option.type else option.key + "[]"
            if option.item and key not in found.setdefault(option.item, []):
                found[option.item].append(key)
    return found


def _table(cls: type, prefix: str = "") -> list[str]:
    lines = ["| option | default | meaning |", "| --- | --- | --- |"]
    for option in own_options(cls, prefix):
        doc, default = option.doc.replace("|", "\\|"), f"`{_plain(option.default)}`"
        if option.item is not None and option.item is option.type:
            inner = list(own_options(option.item, option.key + "."))
            only_groups = all(part.item is part.type for part in inner)
            names = [part.key for part in inner] if only_groups else [option.key]
            doc, default = f"{doc} Options: {', '.join(f'`{name}.*`' for name in names)}.", ""
        lines.append(f"| `{option.key}` | {default} | {doc} |")
    return lines


def _plain(value: Any) -> str:
    """A default as a command line would give it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(_plain, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_plain(item)}" for key, item in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else "''"


_INTRODUCTION = """# Configuration

Made from the classes in `hybridrl/config` by `python -m hybridrl.config_reference > docs/configuration.md`.

Defaults live in those classes; the YAML files in `recipes/config/` hold differences only. Later ones win:
class defaults, `recipes/config/<recipe>.yaml`, the chosen groups (`algorithm=...`), the experiment
(`experiment=...`), your own file (`--config my.yaml`), the command line. The syntax is Hydra's:

```
python -m recipes.grpo algorithm=rloo policy.model.path=models/tiny trainer.steps=200 'trainer.trackers=[]'
python -m recipes.grpo --config my.yaml trainer.steps=3      # my.yaml on top of the recipe's own files
python -m recipes.grpo --cfg experiment=demo                 # print the resolved options and stop
```

An unknown key, a value of the wrong type or an impossible combination stops the program with one line before
anything starts."""


if __name__ == "__main__":
    print(reference(), end="")
