"""Where metrics go besides `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow.

The two that could send data to a server stay on this machine unless their own environment variables
(WANDB_MODE, MLFLOW_TRACKING_URI) say otherwise.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any, Protocol

from hybridrl.controller.run_folder import flat
from hybridrl.errors import ConfigError


class Tracker(Protocol):
    """What a run needs of a tracker."""

    def __init__(self, run_dir: Path, config: dict[str, Any], first_step: int): ...

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in `tensorboard/`; steps from `first_step` on replace those of an earlier session."""

    def __init__(self, run_dir: Path, config: dict[str, Any], first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """One run, named after the folder, that a resumed session goes on with."""

    def __init__(self, run_dir: Path, config: dict[str, Any], first_step: int):
        import wandb

        self._run = wandb.init(
            project="hybridrl", id=run_dir.name, name=run_dir.name, dir=str(run_dir), config=config, resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"), settings=wandb.Settings(silent=True))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """One run in an SQLite file of the run's folder, or on the server of MLFLOW_TRACKING_URI."""

    def __init__(self, run_dir: Path, config: dict[str, Any], first_step: int):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        import mlflow

        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run_dir.resolve()}/mlflow.db")
        self._client = mlflow.MlflowClient(uri)
        known = self._client.get_experiment_by_name("hybridrl")
        experiment = known.experiment_id if known else self._client.create_experiment("hybridrl")
        same = self._client.search_runs([experiment], f"attributes.run_name = '{run_dir.name}'", max_results=1)
        run = same[0] if same else self._client.create_run(experiment, run_name=run_dir.name)
        self._id = run.info.run_id
        if not same:
            for key, value in flat(config):
                self._client.log_param(self._id, key, str(value)[:500])

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            # MLflow refuses a name with an @
            self._client.log_metric(self._id, name.replace("@", "_at_"), value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def check_trackers(names: list[str]) -> None:
    """Raise ConfigError naming the extra to install when a tracker's package is missing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f'trainer.trackers: {name} is not installed; run pip install "hybridrl[{name}]" or leave '
                              f"it out.")
