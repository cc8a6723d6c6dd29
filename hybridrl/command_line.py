"""A recipe's command line: overrides, `--config`, `--cfg`, `--help`, and errors in one line.

    @recipe("grpo", GRPOConfig)
    def main(cfg: GRPOConfig) -> None: ...

    python -m recipes.grpo algorithm=rloo trainer.steps=200
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

from hybridrl.config_loading import fitting, groups_of, load, to_yaml
from hybridrl.config_reference import own_options
from hybridrl.errors import ConfigError, HybridRLError, WorkerError, unknown

Config = TypeVar("Config")


def recipe(name: str, config_class: type[Config]) -> Callable[[Callable[[Config], None]], Callable[..., None]]:
    """Make a recipe's function a command: `main()` reads the command line, `main(config)` just runs.

    Models are checked against the options before the function is called, see `check_models`.

    A ConfigError exits with 2 and any other error of ours with 1, in one line on stderr; Ctrl-C exits with 130.
    """

    def decorate(function: Callable[[Config], None]) -> Callable[..., None]:
        def checked(cfg: Config) -> None:
            from hybridrl.workers.preflight import check_models  # heavy, and of no use to a misspelt option

            check_models(cfg)
            function(cfg)

        @functools.wraps(function)
        def main(cfg: Config | None = None) -> None:
            if cfg is not None:
                return checked(cfg)
            try:
                parsed = _command_line(name, config_class, inspect.getdoc(function), sys.argv[1:])
                if parsed is not None:
                    checked(parsed)
            except HybridRLError as error:
                print(f"{name}: {error}", file=sys.stderr)
                trace = error.remote_traceback.rstrip("\n") if isinstance(error, WorkerError) else ""
                if trace and not isinstance(error.__cause__, HybridRLError):
                    print(trace, file=sys.stderr)
                sys.exit(2 if isinstance(error, ConfigError) else 1)
            except KeyboardInterrupt as stop:
                print(f"{name}: {str(stop) or 'interrupted'}", file=sys.stderr)
                sys.exit(130)

        return main

    return decorate


def _command_line(name: str, config_class: type[Config], doc: str | None, words: list[str]) -> Config | None:
    """The config that the command line asks for; None when it asked for something to be printed."""
    if "--help" in words or "-h" in words:
        return print(_help(name, config_class, doc))
    overrides, file, show = [], None, False
    rest = iter(words)
    for word in rest:
        if word == "--config":
            file = next(rest, None)
            if file is None:
                raise ConfigError("--config needs a YAML file after it.")
        elif word == "--cfg":
            show = True
        elif word.startswith("-"):
            raise ConfigError(unknown("flag", word, ("--help", "--cfg", "--config")))
        else:
            overrides.append(word)
    config = load(name, config_class, overrides, file)
    return print(to_yaml(config), end="") if show else config


def _help(name: str, config_class: type, doc: str | None) -> str:
    lines = [f"usage: python -m recipes.{name} [--config FILE.yaml] [group=choice ...] [key=value ...]", ""]
    lines += [(doc or inspect.getdoc(config_class) or "").splitlines()[0], ""]
    groups = {group: fitting(group, choices, config_class) for group, choices in groups_of(name).items() if choices}
    if groups:
        lines += ["groups:", *_columns((f"{group}=", " | ".join(choices)) for group, choices in groups.items()), ""]
    options = own_options(config_class)
    rows = [(f"{o.key}." if o.item is o.type else f"{o.key}={o.default}", o.doc) for o in options]
    flags = [("--cfg", "print the resolved options as YAML and stop"), ("--config FILE.yaml", "options from a file"),
             ("--help", "this text")]
    lines += ["options:", *_columns(rows), "", *_columns(flags), "", "Every option: docs/configuration.md"]
    return "\n".join(lines)


def _columns(rows: Iterable[tuple[str, str]]) -> list[str]:
    rows = list(rows)
    width = max(len(left) for left, _ in rows)
    return [f"  {left.ljust(width)}  {right}" for left, right in rows]
