"""Checkpoints: written aside, sealed by a manifest, renamed; read newest first.

    checkpoints/step_000010/
      policy/...       what the worker group's `save(folder)` wrote
      prompts.json     the `state_dict()` of a plain object
      manifest.json    size and checksum of every file, written last

A folder with a name of that form was complete when it got it. A crash leaves at most a `.tmp` folder beside it.
"""

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridrl.errors import CheckpointError

MANIFEST = "manifest.json"


class Checkpoints:
    """The checkpoints of one run; `keep` newest ones stay."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep
        for partial in folder.glob("step_*.tmp"):
            shutil.rmtree(partial, ignore_errors=True)

    def newest_first(self) -> list[Path]:
        """Folders of the complete checkpoints."""
        return sorted((f for f in self.folder.glob("step_*") if f.name[5:].isdigit()), key=_step, reverse=True)

    def save(self, step: int, things: dict[str, Any]) -> Path:
        """Write one checkpoint and remove those beyond `keep`.

        A thing with `save(folder)` writes its own folder; any other gives a JSON-able `state_dict()`.
        Raises CheckpointError when the disk is full; whatever goes wrong, older checkpoints stay as they are.
        """
        final = self.folder / f"step_{step:06d}"
        partial = final.with_suffix(".tmp")
        try:
            partial.mkdir(parents=True)
            for name, thing in things.items():
                _write(thing, partial, name)
            _seal(partial)
        except BaseException as error:  # Ctrl-C included: nothing half-written stays
            message = self._full_disk(error, step, partial)
            shutil.rmtree(partial, ignore_errors=True)
            if message:
                raise CheckpointError(message) from error
            raise
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _sync(self.folder)
        for old in self.newest_first()[self.keep :]:
            shutil.rmtree(old)
        return final

    def restore(self, things: dict[str, Any], say: Callable[[str], None]) -> int:
        """Load the newest sound checkpoint and return its step; 0 when there is none at all.

        A damaged one is reported through `say`, renamed to `*.damaged` and passed over. Raises CheckpointError when
        all are damaged, or when the checkpoint lacks one of `things`.
        """
        damaged: dict[Path, str] = {}
        for folder in self.newest_first():
            try:
                check(folder)
            except CheckpointError as error:
                damaged[folder] = str(error)
                say(f"Checkpoint {folder.name} is damaged ({error}); trying the one before it.")
                continue
            for name, thing in things.items():
                _read(thing, folder, name)
            for bad in damaged:
                shutil.rmtree(f"{bad}.damaged", ignore_errors=True)
                bad.rename(f"{bad}.damaged")
            return _step(folder)
        if damaged:
            reasons = "; ".join(f"{folder.name}: {reason}" for folder, reason in damaged.items())
            raise CheckpointError(f"No checkpoint in {self.folder} can be read ({reasons}).")
        return 0

    def _full_disk(self, error: BaseException, step: int, partial: Path) -> str | None:
        """The message for a full disk; None when something else went wrong."""
        free = shutil.disk_usage(self.folder if self.folder.exists() else self.folder.parent).free
        if not (is_full_disk(error) or free < 2**20):
            return None
        older = self.newest_first()
        needs = f"a checkpoint needs about {_size(older[0])}" if older else f"{_size(partial)} were not enough"
        intact = f"{older[0].name} is intact" if older else "there is no earlier one"
        return (f"No space left while saving the checkpoint of step {step} in {self.folder}: {_words(free)} free, "
                f"{needs}. The partial one was removed; {intact}.")


def is_full_disk(error: BaseException) -> bool:
    """Whether an error, or a cause of it, says that a disk or quota is full. Errors of workers arrive as text."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        text = f"{seen} {getattr(seen, 'remote_traceback', '')}"
        if any(os.strerror(code) in text for code in (errno.ENOSPC, errno.EDQUOT)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def check(folder: Path) -> None:
    """Raise CheckpointError naming the first file that is missing, has another size or other contents."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        raise CheckpointError(f"{MANIFEST} is missing or unreadable") from None
    for name, (size, checksum) in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{name} is missing")
        if file.stat().st_size != size:
            raise CheckpointError(f"{name} has {file.stat().st_size} bytes instead of {size}")
        if _checksum(file) != checksum:
            raise CheckpointError(f"the contents of {name} have changed")


def _write(thing: Any, folder: Path, name: str) -> None:
    if hasattr(thing, "save"):
        (folder / name).mkdir()
        thing.save(folder / name)
    else:
        (folder / f"{name}.json").write_text(json.dumps(thing.state_dict()))


def _read(thing: Any, folder: Path, name: str) -> None:
    file = folder / (name if hasattr(thing, "load") else f"{name}.json")
    if not file.exists():
        saved = sorted({f.stem for f in folder.iterdir()} - {"manifest"})
        raise CheckpointError(f"Checkpoint {folder} has no {name!r}; it has {', '.join(saved)}.")
    if hasattr(thing, "load"):
        thing.load(file)
    else:
        thing.load_state_dict(json.loads(file.read_text()))


def _seal(folder: Path) -> None:
    """Flush every file to disk and write the manifest."""
    files = {}
    for file in sorted(f for f in folder.rglob("*") if f.is_file()):
        _sync(file)
        files[str(file.relative_to(folder))] = (file.stat().st_size, _checksum(file))
    with open(folder / MANIFEST, "w") as out:
        json.dump({"files": files}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    for inner in [folder, *(f for f in folder.rglob("*") if f.is_dir())]:
        _sync(inner)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(file: Path) -> int:
    """CRC-32 of a file: it guards against damage, not against forgery."""
    value = 0
    with open(file, "rb") as opened:
        while piece := opened.read(1 << 20):
            value = zlib.crc32(piece, value)
    return value


def _step(folder: Path) -> int:
    return int(folder.name[5:])


def _size(folder: Path) -> str:
    return _words(sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()))


def _words(num_bytes: float) -> str:
    """A size in the largest unit that leaves at least 1."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while num_bytes >= 1024 and len(units) > 1:
        num_bytes /= 1024
        units.pop(0)
    return f"{num_bytes:.0f} {units[0]}" if num_bytes >= 10 or units[0] == "bytes" else f"{num_bytes:.1f} {units[0]}"
