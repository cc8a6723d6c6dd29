"""Rows of a dataset as dictionaries, from the sources of `DataConfig.source`.

Everything is read from this disk or made here; nothing is downloaded. A source yields (row number from 1, row);
what can't be read as a row goes to `BadRows`.
"""

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridrl.config import DataConfig
from hybridrl.errors import ConfigError, DataError, extra, unknown

ROWS_PER_READ = 1024

Row = dict[str, Any]


class BadRows:
    """Malformed rows of one source: the first one raises DataError, or all are left out and counted."""

    def __init__(self, source: str, skip: bool):
        self.source, self.skip = source, skip
        self.count = 0
        self.first = ""

    def add(self, row: int, problem: str) -> None:
        """Report that `row` (from 1) can't be used. Raises DataError naming source, row and problem unless skipping."""
        message = f"{self.source}, row {row}: {problem}"
        if not self.skip:
            raise DataError(message)
        self.count += 1
        self.first = self.first or message


def source_name(cfg: DataConfig) -> str:
    """What error messages call the source."""
    return {"reasoning_gym": f"reasoning_gym task {cfg.task!r}", "none": "source=none"}.get(cfg.source, cfg.path)


def read_rows(cfg: DataConfig, bad: BadRows, fields: Iterable[str], key: str) -> Iterator[tuple[int, Row]]:
    """Numbered rows of the source that `cfg` names, in order.

    Args:
        bad: receives the rows that can't be read.
        fields: names that a source with declared columns must have.
        key: where `cfg` sits in the configuration, for messages.
    Raises:
        DataError: the file or folder is missing, damaged or lacks a field. ConfigError: no such reasoning-gym task
            or task option.
    """
    return SOURCES[cfg.source](cfg, bad, list(fields), key)


def missing_field(name: str, present: Iterable[str]) -> str:
    """One line saying that a row or table lacks field `name`, with near matches and what it has."""
    present = sorted(present)
    near = difflib.get_close_matches(name, present, n=3, cutoff=0.6)
    hint = f" Did you mean {', '.join(near)}?" if near else ""
    return f"field {name!r} is missing.{hint} Fields: {', '.join(present) or 'none'}."


def _existing(path: str, key: str) -> Path:
    found = Path(path).expanduser()
    if found.exists():
        return found
    folder = found.parent
    if not folder.is_dir():
        raise DataError(f"{key}.path: {path} does not exist, nor does its folder {folder}.")
    near = difflib.get_close_matches(found.name, [entry.name for entry in folder.iterdir()], n=3, cutoff=0.6)
    hint = f" Did you mean {', '.join(near)}?" if near else ""
    raise DataError(f"{key}.path: {path} does not exist.{hint}")


def _file(path: str, key: str) -> Path:
    found = _existing(path, key)
    if not found.is_file():
        raise DataError(f"{key}.path: {path} is a folder, a file is needed (source=dataset reads saved folders).")
    return found


def _jsonl(cfg: DataConfig, bad: BadRows, fields: list[str], key: str) -> Iterator[tuple[int, Row]]:
    with _file(cfg.path, key).open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors alike
                bad.add(number, f"not JSON: {error}.")
                continue
            if isinstance(row, dict):
                yield number, row
            else:
                bad.add(number, f"must be a JSON object, got {type(row).__name__}.")


def _parquet(cfg: DataConfig, bad: BadRows, fields: list[str], key: str) -> Iterator[tuple[int, Row]]:
    import pyarrow
    from pyarrow import parquet

    path = _file(cfg.path, key)
    try:
        with parquet.ParquetFile(path) as file:
            _check_columns(cfg.path, fields, file.schema_arrow.names)
            number = 0
            for table in file.iter_batches(ROWS_PER_READ):
                for row in table.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{key}.path: can't read {cfg.path} as Parquet: {error}") from error


def _dataset(cfg: DataConfig, bad: BadRows, fields: list[str], key: str) -> Iterator[tuple[int, Row]]:
    import datasets

    path = _existing(cfg.path, key)
    try:
        table = datasets.load_from_disk(str(path))
    except Exception as error:  # its readers raise many kinds; all mean that the folder is no saved dataset
        raise DataError(f"{key}.path: {cfg.path} is no folder made by a dataset's save_to_disk: {error}") from error
    if isinstance(table, datasets.DatasetDict):
        splits = ", ".join(str(path / split) for split in table)
        raise DataError(f"{key}.path: {cfg.path} holds several splits; name one of {splits}.")
    _check_columns(cfg.path, fields, table.column_names)
    number = 0
    for columns in table.iter(ROWS_PER_READ):
        for values in zip(*columns.values(), strict=True):
            number += 1
            yield number, dict(zip(columns, values, strict=True))


def _check_columns(source: str, fields: list[str], columns: list[str]) -> None:
    for name in fields:
        if name not in columns:
            raise DataError(f"{source}: {missing_field(name, columns)}")


def reasoning_gym_problems(task: str, options: Mapping[str, Any], seed: int, size: int, key: str) -> Any:
    """`size` problems of a reasoning-gym task, made as they are asked for; problem i from `seed + i`.

    Raises ConfigError, naming `key`, when there is no such task or it refuses the options.
    """
    with extra("tasks", f"{key}.task={task}"):
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise ConfigError(f"{key}.task: " + unknown("reasoning_gym task", task, DATASETS))
    accepted = {field.name for field in dataclasses.fields(DATASETS[task][1])} - {"seed", "size"}
    for name in options:
        if name not in accepted:
            raise ConfigError(f"{key}.task_options: " + unknown(f"option of {task}", name, accepted))
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **options)
    except (AssertionError, TypeError, ValueError) as error:  # the task's own checks of its options
        raise ConfigError(f"{key}.task_options: {task} refuses {dict(options)}: {error}") from error


def _reasoning_gym(cfg: DataConfig, bad: BadRows, fields: list[str], key: str) -> Iterator[tuple[int, Row]]:
    problems = reasoning_gym_problems(cfg.task, cfg.task_options, cfg.task_seed, cfg.task_size, key)
    for number in range(1, cfg.task_size + 1):
        try:
            problem = problems[number - 1]
        except Exception as error:  # generators raise any kind when they find no problem that fits the options
            bad.add(number, f"the task could not make this problem: {error!r}.")
            continue
        yield number, with_task_options(problem, cfg.task_options)


def with_task_options(problem: Row, options: Mapping[str, Any]) -> Row:
    """A problem with the options that it was made with, on which some scorers depend."""
    return problem | {"task_options": dict(options)} if options else problem


def _none(cfg: DataConfig, bad: BadRows, fields: list[str], key: str) -> Iterator[tuple[int, Row]]:
    for number in range(1, cfg.task_size + 1):
        drawn = cfg.task_seed + number
        yield number, {name: f"Task {drawn}." for name in fields} | {"number": drawn, "seed": drawn}


SOURCES: dict[str, Callable[[DataConfig, BadRows, list[str], str], Iterator[tuple[int, Row]]]] = {
    "jsonl": _jsonl,
    "parquet": _parquet,
    "dataset": _dataset,
    "reasoning_gym": _reasoning_gym,
    "none": _none,
}
