"""Training checkpoints: exact resume, nothing pickled, damage named."""

import json

import pytest
import torch

from hybridrl.config import ModelConfig, TrainingConfig
from hybridrl.errors import CheckpointError, TrainingError
from hybridrl.workers.training import checkpoint
from hybridrl.workers.training.engine import TrainingEngine
from tests.unit.training.reference import policy_gradient, random_batch

pytestmark = pytest.mark.usefixtures("one_rank")
OPTIONS = dict(learning_rate=1e-2, warmup_steps=3, schedule="linear", total_steps=9, micro_batch_tokens=30)


def engine(path, trainable=True, **options):
    return TrainingEngine(ModelConfig(path=str(path)), TrainingConfig(**(OPTIONS | options)), torch.device("cpu"),
                          trainable)


def steps(ours, seeds):
    return [ours.update(random_batch(seed=seed), policy_gradient, 0.7) for seed in seeds]


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_moe"])
def test_resume_is_exact(folder, tmp_path, kind):
    unbroken = engine(folder(kind))
    steps(unbroken, range(3))
    unbroken.save(tmp_path / "step")
    resumed = engine(folder(kind))
    resumed.load(tmp_path / "step")
    assert steps(resumed, range(3, 6)) == steps(unbroken, range(3, 6))
    for (name, a), (_, b) in zip(resumed.weights(), unbroken.weights(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor()), name


def test_a_checkpoint_before_the_first_step(folder, tmp_path):
    fresh = engine(folder())
    fresh.save(tmp_path)
    resumed = engine(folder())
    resumed.load(tmp_path)
    assert steps(resumed, range(2)) == steps(engine(folder()), range(2))


def test_loading_overwrites_what_training_did_since(folder, tmp_path):
    ours = engine(folder())
    steps(ours, [0])
    ours.save(tmp_path)
    expected = steps(ours, [1])
    ours.load(tmp_path)
    assert steps(ours, [1]) == expected


def test_several_files(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 40_000)
    ours = engine(folder())
    steps(ours, [0])
    ours.save(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 10
    resumed = engine(folder())
    resumed.load(tmp_path)
    assert steps(resumed, [1]) == steps(ours, [1])


def test_nothing_is_pickled(folder, tmp_path):
    engine(folder()).save(tmp_path)
    assert {file.suffix for file in tmp_path.iterdir()} == {".safetensors", ".json"}
    for file in tmp_path.glob("*.safetensors"):
        header = int.from_bytes(file.read_bytes()[:8], "little")
        json.loads(file.read_bytes()[8:8 + header])


@pytest.fixture
def saved(folder, tmp_path):
    ours = engine(folder())
    steps(ours, [0])
    ours.save(tmp_path / "saved")
    return tmp_path / "saved"


def damage(name):
    def missing(folder):
        next(folder.glob("*.safetensors")).unlink()

    def truncated(folder):
        file = next(folder.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-100])

    def no_manifest(folder):
        (folder / "training.json").unlink()

    def damaged_manifest(folder):
        (folder / "training.json").write_text('{"format": 1, "fi')

    def other_format(folder):
        manifest = json.loads((folder / "training.json").read_text())
        (folder / "training.json").write_text(json.dumps(manifest | {"format": 99}))

    def stranger(folder):
        (folder / "other.safetensors").write_bytes(next(folder.glob("*.safetensors")).read_bytes())

    def damaged_header(folder):
        file = next(folder.glob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[8:40] = b"\0" * 32
        file.write_bytes(content)

    return locals()[name]


@pytest.mark.parametrize(("name", "message"), [
    ("missing", "file .*safetensors is missing"), ("truncated", "safetensors has [0-9]+ bytes, saved were"),
    ("no_manifest", "no complete checkpoint: can't read training.json"),
    ("damaged_manifest", "training.json is damaged"), ("other_format", "has format 99; this version reads 1"),
    ("stranger", "other.safetensors, which is not part"), ("damaged_header", "Can't read checkpoint .*rank 0")])
def test_damage_is_named_and_changes_nothing(folder, saved, name, message):
    damage(name)(saved)
    ours = engine(folder())
    before = [weight.full_tensor().clone() for _, weight in ours.weights()]
    with pytest.raises(CheckpointError, match=message):
        ours.load(saved)
    for (_, weight), old in zip(ours.weights(), before, strict=True):
        assert torch.equal(weight.full_tensor(), old)


def test_a_folder_that_does_not_exist(folder, tmp_path):
    with pytest.raises(CheckpointError, match="nowhere is no complete checkpoint"):
        engine(folder()).load(tmp_path / "nowhere")


@pytest.mark.parametrize("other", [dict(kind="qwen3"), dict(kind="llama", num_hidden_layers=3),
                                   dict(kind="llama", num_hidden_layers=1),
                                   dict(kind="llama", hidden_size=96)])
def test_a_checkpoint_of_another_model(folder, saved, other):
    with pytest.raises(CheckpointError, match="Can't read checkpoint"):
        engine(folder(**other)).load(saved)


def test_a_checkpoint_of_another_optimizer(folder, saved):
    with pytest.raises(CheckpointError, match=r"it lacks .*momentum.* or of another optimizer\.$"):
        engine(folder(), optimizer="muon").load(saved)


def test_an_occupied_folder_is_not_overwritten(folder, saved):
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        engine(folder()).save(saved)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before


def test_a_failed_write_leaves_no_checkpoint(folder, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr("torch.distributed.checkpoint.filesystem._write_files_from_queue", full)
    with pytest.raises(CheckpointError, match="Can't write checkpoint .*No space left on device"):
        engine(folder()).save(tmp_path)
    assert not (tmp_path / "training.json").exists()


def test_a_folder_that_can_not_be_made(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        engine(folder()).save(tmp_path / "file" / "step")


def test_a_frozen_model_has_no_training_state(folder, tmp_path):
    with pytest.raises(TrainingError, match="trainable=False"):
        engine(folder(), trainable=False).save(tmp_path)
