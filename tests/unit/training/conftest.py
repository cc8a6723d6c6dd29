"""One gloo rank in this process, and tiny model folders made once."""

import pytest
import torch
import torch.distributed as dist

from tests.models import tiny_model


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """The default process group with one rank, for as long as the module runs."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Function from a kind of `tests.models` (and changes of its config) to a folder; don't write into it."""
    made = {}

    def make(kind="llama", dtype=torch.float32, **changes):
        key = (kind, dtype, *sorted(changes.items()))
        if key not in made:
            made[key] = tiny_model(tmp_path_factory.mktemp(kind), kind, dtype=dtype, **changes)
        return made[key]
    return make
