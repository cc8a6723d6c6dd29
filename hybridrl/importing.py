"""What options name by an import path, `package.module:name`."""

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from hybridrl.errors import ConfigError, unknown


def imported(path: str, key: str, kind: str, names: Iterable[str] = (), fits: Callable[[Any], bool] = callable) -> Any:
    """The object at an import path; a module may do anything while it is imported.

    Args:
        key: of the option. kind: what it names, in words.
        names: what the option may name instead.
        fits: whether an object is of that kind; those of the module are proposed where it has none of the name.
    Raises:
        ConfigError: no import path, an import that fails, or nothing of that name.
    """
    module_name, colon, attribute = path.partition(":")
    if not colon:
        raise ConfigError(f"{key}: " + unknown(kind, path, [*names, "package.module:name"]))
    if module_name == "__main__":
        raise ConfigError(f"{key}: {path!r} can't be imported by other processes; move it into a module.")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: can't import {module_name!r} of {path!r}: {error!r}.") from error
    if not hasattr(module, attribute):
        near = [name for name, value in vars(module).items() if not name.startswith("_") and fits(value)]
        raise ConfigError(f"{key}: " + unknown(f"{kind} in module {module_name!r}", attribute, near))
    return getattr(module, attribute)
