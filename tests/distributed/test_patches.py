"""Weight patches between real processes: over the process group, and as values of calls through the object store."""

import re

import pytest

from hybridrl.controller import WorkerGroup
from tests.distributed.patch_workers import PatchWorker

FULL = 2 * (5000 + 600)
"""Bytes of all weights in bfloat16."""


@pytest.fixture
def group(shared_pool):
    group = WorkerGroup(PatchWorker, shared_pool(4), role="patches")
    yield group
    group.close()


def test_over_the_process_group(group):
    assert group.broadcast(0)[0] > FULL
    for version in range(1, 4):
        group.train(version)
        sent, *changed = group.broadcast(version)
        assert sent < FULL / 5 and changed == [1.0] * 3
    assert group.versions() == [None, 3, 3, 3]
    group.restart(2)  # one receiver of three lost everything
    group.train(4)
    assert group.broadcast(4)[0] > FULL  # the patch, refused by it, then the full state for all
    group.train(5)
    assert group.broadcast(5)[0] < FULL / 5
    assert group.versions() == [None, 5, 5, 5]
    group.apply(group.encode(6, full=True))  # rank 0 has a receiver too
    assert all(group.up_to_date())


def test_through_the_object_store(group):
    group.apply(group.encode(0))
    group.acknowledge(0)
    for version in range(1, 4):
        group.train(version)
        patch = group.encode.future(version)  # from worker to worker: the bytes don't pass the controller
        assert group.apply(patch) == [""] * 4
        group.acknowledge(version)
    assert group.versions() == [3] * 4 and all(group.up_to_date())
    group.restart(1)
    group.train(4)
    refused = group.apply(group.encode(4))
    assert re.search(r"starts from version 3 \(\w+\), no state is held: send a full state", refused.pop(1))
    assert refused == [""] * 3
    assert group.apply(group.encode(4, full=True)) == [""] * 4
    group.acknowledge(4)
    assert group.versions() == [4] * 4 and all(group.up_to_date())
