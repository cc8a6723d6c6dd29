"""The worker group of the frozen reference that a KL penalty measures from."""

from hybridrl.config import GRPOConfig
from hybridrl.controller.call import DevicePool
from hybridrl.controller.cluster import Cluster
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.workers.trainer import ReferenceWorker


def reference_group(cfg: GRPOConfig, policy: WorkerGroup, cluster: Cluster, pool: DevicePool) -> WorkerGroup:
    """A group with `ref_log_probs`, on devices of its own (`reference.ranks`) or on the policy's pool.

    With adapters it is the policy itself: adapters off, that is the model it started from.

    Raises what the workers raise: ModelError, ConfigError.
    """
    if cfg.policy.training.lora.rank:
        return policy
    own = cluster.pool(cfg.reference.ranks) if cfg.reference.ranks else pool
    return WorkerGroup(ReferenceWorker, own, cfg.policy.model, cfg.policy.training, cfg.policy.rollout.temperature,
                       role="reference")
