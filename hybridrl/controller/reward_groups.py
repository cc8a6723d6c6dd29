"""The worker groups behind a recipe's rewards: a reward model and a judge, where they are configured."""

from hybridrl.config import PolicyConfig, RewardConfig
from hybridrl.controller.call import DevicePool
from hybridrl.controller.cluster import Cluster
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.workers.judge import JudgeWorker
from hybridrl.workers.reward_model import RewardModelWorker


def reward_groups(cfg: RewardConfig, policy: PolicyConfig, cluster: Cluster, pool: DevicePool,
                  seed: int = 0) -> dict[str, WorkerGroup]:
    """The groups that `Rewarder.groups` takes, on devices of their own (`ranks`) or on the policy's pool.

    Raises what the workers raise: ModelError, ConfigError.
    """
    groups = {}
    if cfg.model.path:
        own = cluster.pool(cfg.model.ranks) if cfg.model.ranks else pool
        groups["model"] = WorkerGroup(RewardModelWorker, own, cfg.model, policy.model, role="reward_model")
    if cfg.judge.path:
        own = cluster.pool(cfg.judge.ranks) if cfg.judge.ranks else pool
        groups["judge"] = WorkerGroup(JudgeWorker, own, cfg.judge, seed, role="judge")
    return groups
