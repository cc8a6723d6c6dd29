"""A picture of a run's curves."""

from collections.abc import Mapping
from pathlib import Path

from hybridrl.errors import DataError, unknown
from hybridrl.metrics import read_metrics


def plot_metrics(path: str | Path, out: str | Path, curves: Mapping[str, str], title: str = "") -> None:
    """Draw metrics of a `metrics.jsonl` over steps, one panel each, and save them as an image.

    Args:
        path: the `metrics.jsonl`.
        out: image file; its ending chooses the format.
        curves: label of each panel and the metric it shows; steps without a value are skipped.
    Raises DataError for a missing file or a metric that no line has.
    """
    # matplotlib takes half a second to import and only this function needs it
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(path)
    figure = Figure(figsize=(4.2 * len(curves), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (label, name) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        if not points:
            raise DataError(unknown("metric", name, {key for line in lines for key in line} - {"step"}))
        axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 30 else "", markersize=3)
        axes.set(xlabel="step", title=label)
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(out, dpi=120)
