"""Patches in a folder: receivers that come late, die, meet damage, or follow a trainer that went back."""

import os
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from hybridrl.errors import ConfigError, SyncError
from hybridrl.workers.weights.patch_chain import PatchReceiver, PatchSender
from hybridrl.workers.weights.patch_folder import NEWEST, WANTED, PatchFolder

ROOT = Path(__file__).resolve().parents[3]


class Trainer:
    """Weights that change by a seeded step a version, and their folder."""

    def __init__(self, path, full_every=20, version=0):
        self.folder, self.sender = PatchFolder(path, full_every), PatchSender(torch.bfloat16)
        self.weights = {"a": torch.zeros(2000), "b": torch.ones(30, 30)}
        self.version = version - 1

    def publish(self, times=1):
        for _ in range(times):
            self.version += 1
            generator = torch.Generator().manual_seed(self.version)
            for weight in self.weights.values():
                chosen = torch.rand(weight.shape, generator=generator) < 0.05
                weight.add_(torch.randn(weight.shape, generator=generator) * chosen)
            self.folder.publish(self.sender, self.weights.items(), self.version)
        return self


def receiver():
    return PatchReceiver({"a": torch.zeros(2000, dtype=torch.bfloat16), "b": torch.zeros(30, 30, dtype=torch.bfloat16)})


def assert_up_to_date(held, trainer):
    assert held.state == trainer.sender.state
    for name, weight in trainer.weights.items():
        assert torch.equal(held._bits[name], weight.bfloat16().view(-1).view(torch.int16)), name
    held.verify()


def files(folder):
    return sorted(file.name for file in folder.iterdir())


def test_following(tmp_path):
    held = receiver()
    folder = PatchFolder(tmp_path)
    assert folder.newest() is None and not folder.update(held)
    trainer = Trainer(tmp_path)
    for _ in range(5):
        trainer.publish()
        assert folder.update(held) and not folder.update(held)
        assert_up_to_date(held, trainer)
    assert files(tmp_path) == ["000000000.full", *(f"00000000{i}.patch" for i in range(1, 5)), NEWEST]


def test_a_late_receiver_takes_the_full_state_and_replays(tmp_path):
    trainer = Trainer(tmp_path).publish(4)
    held = receiver()
    assert trainer.folder.update(held)
    assert_up_to_date(held, trainer)


def test_old_files_go_and_those_on_their_way_stay(tmp_path):
    trainer = Trainer(tmp_path, full_every=3)
    follower, slow = receiver(), receiver()
    trainer.publish(2)
    trainer.folder.update(slow)  # holds 1
    trainer.folder.update(follower)
    trainer.publish(1)
    assert files(tmp_path) == ["000000000.full", "000000001.patch", "000000002.patch", NEWEST]
    trainer.publish(1)  # the third patch since the full state: this version comes as both
    assert files(tmp_path) == [*(f"00000000{i}.patch" for i in (1, 2)), "000000003.full", "000000003.patch", NEWEST]
    (tmp_path / "000000003.full").rename(tmp_path / "hidden")
    assert trainer.folder.update(slow)  # by patches alone
    (tmp_path / "hidden").rename(tmp_path / "000000003.full")
    assert_up_to_date(slow, trainer)
    trainer.publish(3)
    assert files(tmp_path) == [*(f"00000000{i}.patch" for i in (4, 5)), "000000006.full", "000000006.patch", NEWEST]
    for held in (follower, slow, receiver()):
        trainer.folder.update(held)
        assert_up_to_date(held, trainer)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "gone", "swapped"])
def test_a_damaged_patch_is_repaired_by_the_next_full_state(tmp_path, damage):
    trainer = Trainer(tmp_path).publish(2)
    held = receiver()
    trainer.folder.update(held)
    trainer.publish(2)
    file = tmp_path / "000000002.patch"
    data = bytearray(file.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 4
    if damage == "gone":
        file.unlink()
    elif damage == "swapped":
        other = tmp_path / "000000003.patch"
        file.write_bytes(other.read_bytes())
        other.write_bytes(data)
    else:
        file.write_bytes({"truncated": data[:-20], "flipped": data, "empty": b""}[damage])
    before = {name: bits.clone() for name, bits in held._bits.items()}
    with pytest.raises(SyncError, match="don't lead to version 3, a full state is wanted"):
        trainer.folder.update(held)
    assert held.state is None or all(torch.equal(before[n], bits) for n, bits in held._bits.items())
    assert WANTED in files(tmp_path)
    trainer.publish()
    assert WANTED not in files(tmp_path)
    trainer.folder.update(held)
    assert_up_to_date(held, trainer)


def test_a_damaged_patch_before_a_full_state_is_skipped(tmp_path):
    trainer = Trainer(tmp_path, full_every=3).publish(2)
    held = receiver()
    trainer.folder.update(held)
    trainer.publish(2)
    (tmp_path / "000000002.patch").write_bytes(b"hrlpatch")
    assert trainer.folder.update(held)
    assert_up_to_date(held, trainer)


def test_what_is_not_published_yet_is_not_taken(tmp_path):
    trainer = Trainer(tmp_path).publish(2)
    marker = (tmp_path / NEWEST).read_bytes()
    state = trainer.sender.state
    trainer.publish()
    (tmp_path / NEWEST).write_bytes(marker)
    (tmp_path / ".000000003.patch.part").write_bytes(b"half")
    held = receiver()
    trainer.folder.update(held)
    assert held.state == state


def test_a_trainer_that_starts_again_begins_a_new_chain(tmp_path):
    first = Trainer(tmp_path).publish(6)
    held = receiver()
    first.folder.update(held)
    second = Trainer(tmp_path, version=3).publish()  # resumed from version 3's checkpoint
    assert files(tmp_path) == ["000000003.full", NEWEST]
    second.folder.update(held)
    assert_up_to_date(held, second)
    second.publish(2)
    second.folder.update(held)
    assert_up_to_date(held, second)


def test_a_damaged_marker_and_a_folder_that_can_not_be_written(tmp_path):
    trainer = Trainer(tmp_path / "ok").publish()
    (tmp_path / "ok" / NEWEST).write_bytes(b"[1")
    with pytest.raises(SyncError, match="can't read .*NEWEST"):
        trainer.folder.update(receiver())
    broken = Trainer(tmp_path / "broken")
    broken.folder.path.rmdir()
    with pytest.raises(SyncError, match="can't publish weights in .*broken"):
        broken.publish()
    assert broken.sender.state is None


@pytest.mark.parametrize("failing", ["patch.part", "NEWEST.part"])
def test_publishing_that_fails_leaves_the_folder_as_it_was(tmp_path, monkeypatch, failing):
    trainer = Trainer(tmp_path, full_every=3).publish(2)
    (tmp_path / "²5.patch").write_bytes(b"not ours")
    (tmp_path / ".000000001.full.part").write_bytes(b"of a sender that was killed")
    held, before = receiver(), files(tmp_path)
    write = os.fsync

    def full_disk(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(failing):
            raise OSError(28, "No space left on device")
        write(descriptor)

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(SyncError, match="can't publish weights in .*No space left"):
        trainer.publish()
    assert files(tmp_path) == before
    monkeypatch.undo()
    trainer.publish(2)
    trainer.folder.update(held)
    assert_up_to_date(held, trainer)
    assert not list(tmp_path.glob(".*"))  # once a full state was due


def test_a_folder_has_one_sender(tmp_path):
    first = Trainer(tmp_path).publish(2)
    second = Trainer(tmp_path, version=5).publish(2)
    with pytest.raises(SyncError, match="version 6 there is from another sender, this one's last was 1. Each needs"):
        first.publish()
    held = receiver()
    second.publish().folder.update(held)
    assert_up_to_date(held, second)


def test_folders_that_can_not_be(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SyncError, match="can't make the folder .*file"):
            PatchFolder(path)
    with pytest.raises(ConfigError, match="full_every must be at least 1, got 0"):
        PatchFolder(tmp_path, full_every=0)


def test_a_receiver_killed_in_mid_chain_and_restarted(tmp_path):
    """A receiver in a process of its own, killed while it follows; the next one ends with the same bits."""
    code = textwrap.dedent("""
        import os, sys, time
        sys.path.insert(0, os.environ["ROOT"])
        from hybridrl.workers.weights.patch_folder import PatchFolder
        from tests.unit.weights.test_patch_folder import receiver
        held, folder = receiver(), PatchFolder(sys.argv[1])
        until = int(sys.argv[2])
        while held.state is None or held.state.version < until:
            if folder.update(held):
                print(held.state.version, held.state.digest, flush=True)
            time.sleep(0.005)
        held.verify()
        """)
    trainer = Trainer(tmp_path, full_every=4).publish(3)

    @contextmanager
    def start(until):
        with subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(until)], stdout=subprocess.PIPE,
                              text=True, env=os.environ | {"ROOT": str(ROOT)}) as process:
            try:
                yield process
            finally:
                process.kill()  # or what fails here would wait for it

    with start(10**6) as process:
        assert process.stdout.readline().split() == ["2", trainer.sender.state.digest]
        trainer.publish(2)
        assert int(process.stdout.readline().split()[0]) in (3, 4)
    trainer.publish(3)
    with start(9) as process:
        assert process.stdout.readline().split() == ["7", trainer.sender.state.digest]
        trainer.publish(2)
        lines = process.communicate(timeout=120)[0].splitlines()
    assert process.returncode == 0
    assert lines[-1].split() == ["9", trainer.sender.state.digest]
