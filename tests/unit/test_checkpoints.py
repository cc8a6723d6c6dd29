"""Checkpoints: complete or absent, and nothing lost when one can't be written or read."""

import errno
import json
import os

import pytest

from hybridrl.controller.checkpoints import Checkpoints, check, is_full_disk
from hybridrl.errors import CheckpointError, WorkerError
from tests.unit.fakes import Policy, Prompts


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", keep=2)


def things(weight=1.0, drawn=0):
    policy, prompts = Policy(), Prompts()
    policy.weight, prompts.drawn = weight, drawn
    return {"policy": policy, "prompts": prompts}


def names(checkpoints):
    return sorted(path.name for path in checkpoints.folder.iterdir())


def restored(checkpoints):
    """(step, weight, drawn, what was said) of a fresh set of things."""
    said, fresh = [], things(weight=-1.0, drawn=-1)
    step = checkpoints.restore(fresh, said.append)
    return step, fresh["policy"].weight, fresh["prompts"].drawn, said


def test_nothing_to_restore_is_step_0_and_leaves_things_alone(checkpoints):
    assert restored(checkpoints) == (0, -1.0, -1, [])


def test_what_was_saved_comes_back(checkpoints):
    checkpoints.save(3, things(2.5, 3))
    assert restored(checkpoints) == (3, 2.5, 3, [])


def test_only_the_newest_are_kept_and_steps_are_ordered_as_numbers(checkpoints):
    for step in (9, 10, 1_000_000):
        checkpoints.save(step, things(step, step))
    assert names(checkpoints) == ["step_000010", "step_1000000"]
    assert restored(checkpoints)[0] == 1_000_000


def damage_missing(folder):
    (folder / "policy" / "rank1.txt").unlink()


def damage_truncated(folder):
    os.truncate(folder / "policy" / "rank1.txt", 1)


def damage_changed(folder):
    (folder / "policy" / "rank1.txt").write_text("9.0")


def damage_manifest_missing(folder):
    (folder / "manifest.json").unlink()


def damage_manifest_truncated(folder):
    os.truncate(folder / "manifest.json", 20)


DAMAGES = {
    damage_missing: "policy/rank1.txt is missing",
    damage_truncated: "policy/rank1.txt has 1 bytes instead of 3",
    damage_changed: "the contents of policy/rank1.txt have changed",
    damage_manifest_missing: "manifest.json is missing or unreadable",
    damage_manifest_truncated: "manifest.json is missing or unreadable",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_named(checkpoints, damage):
    checkpoints.save(1, things(1.5, 1))
    damage(checkpoints.save(2, things(2.5, 2)))
    step, weight, drawn, said = restored(checkpoints)
    assert (step, weight, drawn) == (1, 1.5, 1)
    assert said == [f"Checkpoint step_000002 is damaged ({DAMAGES[damage]}); trying the one before it."]
    # it must neither count as one of those kept nor be in the way of the next step 2
    assert names(checkpoints) == ["step_000001", "step_000002.damaged"]
    checkpoints.save(2, things(3.5, 2))
    assert restored(checkpoints) == (2, 3.5, 2, [])


def test_all_damaged_is_an_error_not_a_new_start(checkpoints):
    for step in (1, 2):
        damage_missing(checkpoints.save(step, things()))
    with pytest.raises(CheckpointError, match=r"No checkpoint in .*\(step_000002: policy/rank1.txt is missing; step_0"):
        restored(checkpoints)
    assert names(checkpoints) == ["step_000001", "step_000002"], "nothing is renamed when nothing could be restored"


def test_a_checkpoint_without_one_of_the_things_is_an_error(checkpoints):
    checkpoints.save(1, {"prompts": Prompts()})
    with pytest.raises(CheckpointError, match="has no 'policy'; it has prompts"):
        restored(checkpoints)


class FullAt:
    """A thing whose save fails half-way."""

    def __init__(self, error):
        self.error = error

    def save(self, folder):
        (folder / "half").write_text("x" * 100)
        raise self.error


def write_to_full_device(folder):
    with open("/dev/full", "w") as out:
        out.write("x")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_said_with_its_numbers_and_loses_nothing(checkpoints):
    checkpoints.save(1, things(1.5, 1))
    policy = Policy()
    policy.save = write_to_full_device
    message = (r"No space left while saving the checkpoint of step 2 in .*: [\d.]+ \wiB free, a checkpoint needs about "
               r"\d+ bytes\. The partial one was removed; step_000001 is intact\.")
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoints.save(2, {"prompts": Prompts(), "policy": policy})
    assert "\n" not in str(caught.value)
    assert names(checkpoints) == ["step_000001"]
    assert restored(checkpoints) == (1, 1.5, 1, [])


def test_a_full_disk_at_the_first_checkpoint(checkpoints):
    error = WorkerError("policy", 1, 2, f"OSError: [Errno 28] {os.strerror(errno.ENOSPC)}")
    with pytest.raises(CheckpointError, match="100 bytes were not enough.*there is no earlier one"):
        checkpoints.save(2, {"policy": FullAt(error)})
    assert names(checkpoints) == []


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt()])
def test_other_failures_stay_what_they_are_and_leave_nothing(checkpoints, error):
    checkpoints.save(1, things(1.5, 1))
    with pytest.raises(type(error)) as caught:
        checkpoints.save(2, {"policy": FullAt(error)})
    assert caught.value is error and names(checkpoints) == ["step_000001"]


def test_what_counts_as_a_full_disk():
    inner = OSError(errno.EDQUOT, "quota")
    outer = RuntimeError("can't write")
    outer.__cause__ = inner
    assert is_full_disk(inner) and is_full_disk(outer)
    assert is_full_disk(WorkerError("policy", 0, 1, "x", f"Traceback\nOSError: [Errno 28] {os.strerror(28)}: 'f'"))
    assert not is_full_disk(OSError(errno.EACCES, "denied")) and not is_full_disk(ValueError("x"))


def test_leftovers_of_a_crash_are_removed(tmp_path):
    (tmp_path / "step_000004.tmp" / "policy").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert names(checkpoints) == [] and restored(checkpoints)[0] == 0


def test_the_manifest_covers_every_file(checkpoints):
    folder = checkpoints.save(1, things())
    listed = set(json.loads((folder / "manifest.json").read_text())["files"])
    assert listed == {"policy/rank0.txt", "policy/rank1.txt", "prompts.json"}
    check(folder)


def test_saving_a_step_again_replaces_it(checkpoints):
    checkpoints.save(1, things(1.5, 1))
    checkpoints.save(1, things(2.5, 1))
    assert restored(checkpoints) == (1, 2.5, 1, [])
