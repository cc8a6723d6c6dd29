"""One Ray for the whole test session, and pools of tiny workers that tests share by size."""

import os
import resource
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest

# The same examples on every machine, however slow: what CI says of a commit is true of it elsewhere.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True,
                                     suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("repeatable")

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Of whoever starts the tests: what is printed, and how programs reach others on this machine, must not depend on it.
for name in [name for name in os.environ if name.lower() in (
        "force_color", "tty_compatible", "tty_interactive", "columns", "lines", "http_proxy", "https_proxy",
        "all_proxy")]:
    del os.environ[name]

# Tests crash processes: that takes no time and leaves no file.
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

# More worker processes than this machine has cores: they are tiny.
RAY_CPUS = 8


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A `Cluster` on Ray, started once; `ray_cluster.pool(ranks=2)` starts processes of a test's own."""
    import shutil

    import ray

    from hybridrl.config import ClusterConfig
    from hybridrl.controller import Cluster
    from hybridrl.controller.cluster import start_ray

    temp_dir = start_ray(RAY_CPUS)
    try:
        with Cluster(ClusterConfig(call_timeout_s=240.0)) as cluster:
            yield cluster
    finally:
        ray.shutdown()
        shutil.rmtree(temp_dir, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_pool(ray_cluster: Any) -> Callable[[int], Any]:
    """`shared_pool(ranks)`: the pool of that many ranks that tests share; they must leave it usable."""
    pools: dict[int, Any] = {}

    def get(ranks: int) -> Any:
        if ranks not in pools:
            pools[ranks] = ray_cluster.pool(ranks)
        return pools[ranks]

    return get


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped on a machine without CUDA."""
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
