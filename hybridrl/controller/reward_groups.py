"""The worker groups behind a recipe's rewards: a reward model and a judge, where they are configured."""

from hybridrl.config import PolicyConfig, RewardConfig
from hybridrl.controller.call import DevicePool
from hybridrl.controller.cluster import Cluster
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.workers.judge import JudgeWorker
from hybridrl.workers.reward_model import RewardModelWorker


def reward_groups(cfg: RewardConfig, policy: PolicyConfig, cluster: Cluster, pool: DevicePool,
                  seed: int = 0, suite: str = "") -> dict[str, WorkerGroup]:
    """The groups that `Rewarder.groups` takes, on devices of their own (`ranks`) or on the policy's pool.

    `suite` tells the groups of several rewards on one pool apart.

    Raises what the workers raise: ModelError, ConfigError.
    """
    groups, suffix = {}, f" of {suite}" if suite else ""
    if cfg.model.path:
        own = cluster.pool(cfg.model.ranks) if cfg.model.ranks else pool
        groups["model"] = WorkerGroup(RewardModelWorker, own, cfg.model, policy.model, role=f"reward_model{suffix}")
    if cfg.judge.path:
        own = cluster.pool(cfg.judge.ranks) if cfg.judge.ranks else pool
        groups["judge"] = WorkerGroup(JudgeWorker, own, cfg.judge, seed, role=f"judge{suffix}")
    return groups
