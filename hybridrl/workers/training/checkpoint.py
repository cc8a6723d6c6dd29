"""Training state in a folder: safetensors shards written by torch.distributed.checkpoint, and training.json.

Nothing is pickled: tensors go through the safetensors storage of torch.distributed.checkpoint, which lays shards
out again for another number of ranks, and the few numbers beside them are JSON. training.json names every file
with its size and is written last: without it the folder is no checkpoint.
"""

import json
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from hybridrl.errors import CheckpointError
from hybridrl.workers.training.first_rank import on_first_rank

MANIFEST = "training.json"
FORMAT = 1
FILE_BYTES = 256 * 2**20
"""Tensors per file, about: a file is serialised in memory before it is written."""


def save_state(folder: Path, tensors: dict[str, Tensor], numbers: dict[str, int]) -> None:
    """Write tensors (DTensors by shard, whole ones from rank 0) and numbers; collective.

    Args:
        folder: new or empty; made where it is missing. It is complete once this returns.
    Raises:
        CheckpointError: on every rank, when any of them can't write.
    """
    def prepare() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.glob("*.safetensors")) or (folder / MANIFEST).exists():
            raise CheckpointError(f"{folder} already holds a checkpoint; save into a new folder.")

    def finish() -> None:
        files = {file.name: file.stat().st_size for file in sorted(folder.glob("*.safetensors"))}
        text = json.dumps({"format": FORMAT, "numbers": numbers, "files": files}, indent=1)
        aside = folder / f"{MANIFEST}.part"
        aside.write_text(text)
        aside.rename(folder / MANIFEST)

    on_first_rank(prepare, CheckpointError)
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=_files(tensors), save_distributed=True)
    try:
        dcp.save(tensors, storage_writer=writer)
    except CheckpointException as error:
        raise CheckpointError(f"Can't write checkpoint {folder}: {_cause(error)}") from error
    on_first_rank(finish, CheckpointError)


def load_state(folder: Path, tensors: dict[str, Tensor]) -> dict[str, int]:
    """Fill tensors in place with what `save_state` wrote, on any number of ranks; returns the numbers. Collective.

    Raises CheckpointError, before any tensor changes, naming the file that is missing or has another size than
    when it was saved; and when names or shapes differ.
    """
    numbers = _check_files(folder)
    reader = HuggingFaceStorageReader(str(folder))
    try:
        on_first_rank(lambda: _check_names(folder, reader, tensors), CheckpointError)
        dcp.load(tensors, storage_reader=reader)
    except CheckpointException as error:
        raise CheckpointError(f"Can't read checkpoint {folder}: {_cause(error)}") from error
    return numbers


def _files(tensors: dict[str, Tensor]) -> dict[str, int]:
    """File number, from 1, of each tensor; a rank's share of a file is at most FILE_BYTES, but for one tensor."""
    files, number, size = {}, 1, 0
    for name, tensor in tensors.items():
        share = tensor.numel() * tensor.element_size() // dist.get_world_size()
        if size and size + share > FILE_BYTES:
            number, size = number + 1, 0
        size += share
        files[name] = number
    return files


def _check_files(folder: Path) -> dict[str, int]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        found, files, numbers = manifest["format"], manifest["files"], manifest["numbers"]
    except OSError as error:
        raise CheckpointError(f"{folder} is no complete checkpoint: can't read {MANIFEST}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {error!r}.") from error
    if found != FORMAT:
        raise CheckpointError(f"{folder / MANIFEST} has format {found}; this version reads {FORMAT}.")
    for name, size in files.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"Checkpoint file {file} is missing.")
        if file.stat().st_size != size:
            raise CheckpointError(f"Checkpoint file {file} has {file.stat().st_size} bytes, saved were {size}.")
    others = sorted(file.name for file in folder.glob("*.safetensors") if file.name not in files)
    if others:
        raise CheckpointError(f"{folder} holds {others[0]}, which is not part of the checkpoint.")
    return numbers


def _check_names(folder: Path, reader: HuggingFaceStorageReader, tensors: dict[str, Tensor]) -> None:
    try:
        saved = set(reader.read_metadata().state_dict_metadata)
    except SafetensorError as error:
        raise CheckpointError(f"Can't read checkpoint {folder}: rank 0: {error}") from error
    missing, others = sorted(tensors.keys() - saved), sorted(saved - tensors.keys())
    if missing or others:
        what = f"lacks {missing[0]}" if missing else f"holds {others[0]}, which is not trained here"
        raise CheckpointError(f"Can't read checkpoint {folder}: it {what}. It is of another model, of other adapters, "
                              "or of another optimizer.")


def _cause(error: CheckpointException) -> str:
    """First rank's own error, on one line."""
    rank, (cause, _) = next(iter(error.failures.items()))
    lines = str(cause).strip().splitlines()
    return f"rank {rank}: {type(cause).__name__}: {lines[0] if lines else ''}"
