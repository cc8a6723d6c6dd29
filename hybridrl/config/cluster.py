"""Where workers run."""

from dataclasses import dataclass

from hybridrl.config.checks import check, check_choice


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    backend: str = "ray"
    """`ray` (workers are processes) or `local` (one worker inside the controller's process; a debugger works)."""
    address: str = ""
    """Address of a running Ray cluster to join (`auto`, or host:port); empty starts one on this machine."""
    ranks: int = 1
    """Worker processes of a pool, one device each."""
    call_timeout_s: float = 1800.0
    """Longest wait for one worker-group call, in seconds."""
    start_timeout_s: float = 300.0
    """Longest wait for Ray, for the pool's processes and for their process group, in seconds."""

    def validate(self) -> None:
        check_choice("cluster.backend", self.backend, ("ray", "local"))
        check(self.ranks >= 1, "cluster.ranks", self.ranks, "at least 1")
        if self.backend == "local":
            check(self.ranks == 1, "cluster.ranks", self.ranks, "1 with cluster.backend=local")
            check(not self.address, "cluster.address", self.address, "empty with cluster.backend=local")
        check(self.call_timeout_s > 0, "cluster.call_timeout_s", self.call_timeout_s, "positive")
        check(self.start_timeout_s > 0, "cluster.start_timeout_s", self.start_timeout_s, "positive")
