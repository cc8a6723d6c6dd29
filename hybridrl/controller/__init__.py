"""The controller's side: clusters, pools of devices, worker groups."""

from hybridrl.controller.call import DevicePool, Future
from hybridrl.controller.cluster import Cluster
from hybridrl.controller.worker_group import WorkerGroup

__all__ = ["Cluster", "DevicePool", "Future", "WorkerGroup"]
