"""Devices: Ray, started here or joined, or `local`; `pool` reserves them and starts one host process on each."""

import atexit
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from hybridrl.config import ClusterConfig
from hybridrl.controller.call import DevicePool
from hybridrl.controller.local import LocalPool
from hybridrl.errors import ConfigError

WORKER_ENV = {
    # Nothing phones home or fetches.
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    # The engine runs in the worker's process, and engines don't pin each other's cores.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TOKENIZERS_PARALLELISM": "false",
    # glibc keeps up to 64 MiB of freed memory instead of faulting in fresh pages for every batch and activation.
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}


class Cluster:
    """Where worker groups run. A context manager: leaving it ends every process that it started.

    Args:
        cfg: see `ClusterConfig`.
        log_dir: folder for what workers print, one file a process; None leaves it in Ray's own logs.
    Raises:
        ConfigError: more ranks than devices, or no cluster at the address.
    """

    def __init__(self, cfg: ClusterConfig, log_dir: Path | None = None):
        cfg.validate()
        self.cfg, self.log_dir = cfg, log_dir.absolute() if log_dir else None
        self._pools: list[DevicePool] = []
        self._closing = ExitStack()
        atexit.register(self.close)
        if cfg.backend == "local":
            os.environ.update(WORKER_ENV)
            return
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def pool(self, ranks: int | None = None) -> DevicePool:
        """Reserve `ranks` devices (default `cluster.ranks`) and start a host process on each, without waiting.

        Raises ConfigError when this cluster's pools together need more devices than there are.
        """
        ranks = self.cfg.ranks if ranks is None else ranks
        if self.cfg.backend == "local":
            if ranks != 1:
                raise ConfigError(f"cluster.backend=local runs 1 rank, got {ranks}.")
            pool: DevicePool = LocalPool(self.cfg)
        else:
            import ray

            from hybridrl.controller.ray_pool import RayPool

            resources = ray.cluster_resources()
            gpus, cores = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
            check_ranks(ranks, gpus, cores, held=sum(pool.ranks for pool in self._pools if pool.failure is None))
            pool = RayPool(self.cfg, ranks, gpus > 0, self.log_dir, f"pool{len(self._pools)}")
        self._pools.append(pool)
        self._closing.callback(pool.close)
        return pool

    def close(self) -> None:
        """End the pools, and Ray when this cluster started it."""
        atexit.unregister(self.close)
        self._closing.close()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _connect(self) -> None:
        """Start Ray, join it, or use what this process has joined already."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        if not self.cfg.address:
            check_ranks(self.cfg.ranks, torch.cuda.device_count(), cpu_cores())
        else:
            check_address(self.cfg.address, min(10.0, self.cfg.start_timeout_s))
        import ray

        from hybridrl.controller.ray_pool import register_batches

        if not ray.is_initialized():
            if self.cfg.address:
                self._join(ray)
            else:
                self._closing.callback(shutil.rmtree, start_ray(cpu_cores()), ignore_errors=True)
            self._closing.callback(ray.shutdown)
            send_notices_to_log()
        register_batches()

    def _join(self, ray: Any) -> None:
        try:
            with deferred_interrupt():
                ray.init(address=self.cfg.address, log_to_driver=False, logging_level="ERROR",
                         runtime_env={"env_vars": WORKER_ENV})
        except (ConnectionError, ValueError, RuntimeError) as error:
            refused = "InvalidAuthToken" in "".join(traceback.format_exception(error))
            hint = "it asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or ~/.ray/auth_token"
            raise no_cluster(self.cfg.address, hint if refused else str(error)) from error


def send_notices_to_log() -> None:
    """Keep what Ray prints about dead workers off the terminal, which gets one line from us: no option of Ray does."""
    from ray._private import worker

    def to_log(data: dict[str, Any], ignore_prefix: bool) -> None:
        logging.getLogger("raylet").info("%s", " ".join(data["lines"]))

    worker.print_to_stdstream = to_log


def check_address(address: str, timeout_s: float) -> None:
    """Raise ConfigError unless something listens at host:port. Ray itself would go on trying for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"cluster.address must be `auto` or host:port, got {address!r}.")
    try:
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
    except (OSError, OverflowError) as error:
        raise no_cluster(address, str(error)) from error


def no_cluster(address: str, reason: str) -> ConfigError:
    """The error for an address without a cluster."""
    return ConfigError(f"cluster.address {address!r}: no Ray cluster to join there ({reason.splitlines()[0]}).")


def check_ranks(ranks: int, gpus: int, cores: int, held: int = 0) -> None:
    """Raise ConfigError when there are more ranks than devices: GPUs when there are any, else CPU cores.

    `held` devices belong to other pools that this run keeps; CPU cores may be shared by several pools.
    """
    if gpus and held and held + ranks > gpus:
        raise ConfigError(f"{ranks} devices for one more pool and {held} that this run holds already are more than the "
                          f"{gpus} GPUs of this cluster: set the `ranks` of a part to 0 to share devices, or lower it.")
    devices, kind = (gpus, "GPUs") if gpus else (cores, "CPU cores (no GPU)")
    if ranks < 1 or ranks > devices:
        raise ConfigError(f"cluster.ranks must be between 1 and the {devices} {kind} of this cluster, got {ranks}.")


def cpu_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def start_ray(num_cpus: int) -> str:
    """Start Ray on this machine for this process; returns its temporary folder, to be removed after `ray.shutdown`.

    Workers inherit the environment of this moment, which starts them faster than Ray's runtime environments.
    """
    import ray

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    temp_dir = make_temp_dir()
    # At the priority that Ray gives its workers any other busy process would leave them a thirtieth of a core.
    env = WORKER_ENV | preloaded() | {"RAY_worker_niceness": "0"}
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        with deferred_interrupt():
            ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False,
                     logging_level="ERROR", object_store_memory=min(1 << 30, memory // 10), _temp_dir=temp_dir)
    except BaseException:
        ray.shutdown()
        shutil.rmtree(temp_dir, ignore_errors=True)
        raise
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return temp_dir


def make_temp_dir() -> str:
    """A folder for Ray: beneath /tmp where that of other temporary files is too deep for the paths of sockets."""
    usual = tempfile.gettempdir()
    # Of 107 bytes that a socket's path may have Ray takes 64, and this folder's own name 18.
    return tempfile.mkdtemp(prefix="hybridrl-", dir=usual if len(os.fsencode(usual)) <= 25 else "/tmp")


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold back the first Ctrl-C or SIGTERM until the end of the block; the second one comes through at once.

    Inside `ray.init` it would leave a Ray that `ray.shutdown` does not know and that crashes the process at exit.
    """
    received: list[int] = []

    def hold(number: int, frame: object) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, hold) for number in (signal.SIGINT, signal.SIGTERM) if main}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is hold:  # Ray may have set one of its own
                signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])


def preloaded() -> dict[str, str]:
    """LD_PRELOAD for worker processes: libraries of this Python environment that make CPU engines faster."""
    found = [str(path) for name in ("libiomp5.so", "libtcmalloc_minimal.so.4")
             if (path := Path(sys.prefix) / "lib" / name).exists()]
    preset = os.environ.get("LD_PRELOAD", "")
    return {"LD_PRELOAD": ":".join([*found, *([preset] if preset else [])])} if found else {}
