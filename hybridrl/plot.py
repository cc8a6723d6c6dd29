"""A picture of a run's curves."""

from collections.abc import Mapping
from pathlib import Path

from hybridrl.errors import DataError, unknown
from hybridrl.metrics import read_metrics


def plot_metrics(path: str | Path | Mapping[str, str | Path], out: str | Path, curves: Mapping[str, str],
                 title: str = "") -> None:
    """Draw metrics of a `metrics.jsonl` over steps, one panel each, and save them as an image.

    Args:
        path: the `metrics.jsonl`; or several, by the name that each has in the legend.
        out: image file; its ending chooses the format.
        curves: label of each panel and the metric it shows; steps without a value are skipped.
    Raises DataError for a missing file or a metric that no line has.
    """
    # matplotlib takes half a second to import and only this function needs it
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = path if isinstance(path, Mapping) else {"": path}
    lines = {run: read_metrics(file) for run, file in runs.items()}
    figure = Figure(figsize=(4.2 * len(curves), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (label, name) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        for run, rows in lines.items():
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            if not points:
                raise DataError(unknown("metric", name, {key for row in rows for key in row} - {"step"}))
            axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 30 else "", markersize=3, label=run)
        axes.set(xlabel="step", title=label)
        axes.grid(alpha=0.3)
        if len(runs) > 1:
            axes.legend()
    figure.suptitle(title)
    figure.savefig(out, dpi=120)
