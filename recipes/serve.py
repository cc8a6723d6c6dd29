"""Serve a model with OpenAI's API: for `lm-eval`, for any client, and to try an agent before it is trained.

    python -m recipes.serve policy.model.path=models/my-model port=8000 api_key=local
"""

import socket

from hybridrl.command_line import recipe
from hybridrl.config import ClusterConfig, ServeConfig
from hybridrl.controller.cluster import Cluster
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.errors import ConfigError
from hybridrl.workers.served import ServedWorker


@recipe("serve", ServeConfig)
def main(cfg: ServeConfig) -> None:
    """Serve a model with OpenAI's API until Ctrl-C; the first line printed says where, and the key."""
    family = socket.AF_INET6 if ":" in cfg.host else socket.AF_INET
    try:  # before the model is loaded
        socket.create_server((cfg.host, cfg.port), family=family).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise ConfigError(f"host and port must be an address of this machine that is free, got {cfg.host!r} and "
                          f"{cfg.port}: {reason}.") from error
    with Cluster(ClusterConfig(backend="local")) as cluster:
        WorkerGroup(ServedWorker, cluster.pool(), cfg, role="served").serve()


if __name__ == "__main__":
    main()
