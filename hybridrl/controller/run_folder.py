"""A run's folder: made or found again, locked, its options compared, its line files cut back on resume.

    config.yaml      resolved options; `--config` reads it
    metrics.jsonl    one JSON object a step
    samples.jsonl    some scored responses of each step
    checkpoints/     see hybridrl.controller.checkpoints
    logs/            infrastructure logs
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import yaml

from hybridrl.controller.checkpoints import is_full_disk
from hybridrl.errors import CheckpointError, ConfigError

OWNER = "# recipe: "
"""Begins the first line of `config.yaml`; the recipe's name follows."""


def open_folder(run_dir: str, recipe: str) -> tuple[Path, bool]:
    """The folder of a run, made if it isn't there, and whether it holds an earlier session.

    Raises ConfigError when the path can't be a run's folder.
    """
    folder = Path(run_dir or f"runs/{recipe}-{time.strftime('%Y%m%d-%H%M%S')}").expanduser().absolute()
    while not run_dir and folder.exists():  # two runs in one second
        folder = folder.with_name(folder.name + "x")
    resumed = (folder / "config.yaml").is_file()
    if folder.exists() and not resumed and (not folder.is_dir() or set(os.listdir(folder)) - {".lock", "logs"}):
        raise ConfigError(f"trainer.run_dir={folder} exists and is no run's folder (it has no config.yaml); "
                          "choose a new path.")
    if resumed and (owner := _owner(folder)) not in (None, recipe):
        raise ConfigError(f"trainer.run_dir={folder} is a run of {owner!r}, which {recipe!r} can't resume; "
                          "choose a new path.")
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"trainer.run_dir={folder} can't be made: {error.strerror}.") from None
    return folder, resumed


def lock(folder: Path) -> IO[str]:
    """Hold the folder for this process until the result is closed. Raises ConfigError while another holds it."""
    held = open(folder / ".lock", "a+")  # noqa: SIM115 - closed by the run
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        held.seek(0)
        holder = held.read().strip() or "unknown"
        held.close()
        raise ConfigError(f"{folder} is in use by another process (pid {holder}); wait for it or choose another "
                          "trainer.run_dir.") from None
    held.truncate(0)
    held.write(str(os.getpid()))
    held.flush()
    return held


def write_options(folder: Path, config: Any, recipe: str) -> None:
    """Write `config.yaml`, with the folder itself as `trainer.run_dir`, so that the file alone resumes the run."""
    options = asdict(config)
    options["trainer"]["run_dir"] = str(folder)
    text = yaml.safe_dump(options, sort_keys=False, allow_unicode=True)
    _replace(folder / "config.yaml", f"{OWNER}{recipe}\n{text}")


def changed_options(folder: Path, config: Any) -> list[str]:
    """`key: old -> new` for each option that differs from the folder's `config.yaml`, the folder itself aside."""
    try:
        old = dict(flat(yaml.safe_load((folder / "config.yaml").read_text())))
    except (yaml.YAMLError, AttributeError):
        raise ConfigError(f"{folder}/config.yaml is damaged; restore it or choose another trainer.run_dir.") from None
    new = dict(flat(asdict(config)))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key) and key != "trainer.run_dir"]
    return [f"{key}: {old.get(key, 'unset')} -> {new.get(key, 'unset')}" for key in keys]


def flat(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Options with dotted keys, from nested ones."""
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class LineFile:
    """A file of JSON lines, each with its `step`; a line is on disk when `write` returns."""

    def __init__(self, path: Path):
        self.path = path
        self._file: IO[str] = open(path, "a")  # noqa: SIM115 - closed by close()

    def write(self, line: str) -> None:
        """Append a line. Raises CheckpointError when the disk is full."""
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            if not is_full_disk(error):
                raise
            raise CheckpointError(f"No space left while writing {self.path}; free some and resume the run.") from error

    def cut(self, step: int) -> None:
        """Drop the lines after `step`, and an unfinished last one."""
        self._file.close()
        # not splitlines(): a response may hold other characters that it would break a line at
        kept = [line for line in self.path.read_text(errors="replace").split("\n") if _step_of(line) <= step]
        _replace(self.path, "".join(line + "\n" for line in kept))
        self._file = open(self.path, "a")  # noqa: SIM115 - closed by close()

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # every line was flushed: what is left is one whose failure was raised
            self._file.close()


def _replace(path: Path, text: str) -> None:
    """Write a file aside and rename it, so that a crash leaves the old one or the new one."""
    aside = path.with_suffix(".tmp")
    aside.write_text(text)
    aside.replace(path)


def _owner(folder: Path) -> str | None:
    """The recipe whose run a folder holds; None where its `config.yaml` does not say."""
    with open(folder / "config.yaml", errors="replace") as file:
        first = file.readline()
    return first.removeprefix(OWNER).strip() if first.startswith(OWNER) else None


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
