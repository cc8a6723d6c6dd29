"""The controller's side: clusters, pools of devices, worker groups."""

from hybridrl.controller.call import Future
from hybridrl.controller.cluster import Cluster
from hybridrl.controller.worker_group import WorkerGroup

__all__ = ["Cluster", "Future", "WorkerGroup"]
