"""Names, averages, the line format and the picture of metrics."""

import json

import pytest

from hybridrl.errors import DataError
from hybridrl.metrics import average, deterministic, format_metrics, read_metrics, to_line
from hybridrl.plot import plot_metrics


def test_average_is_over_those_that_have_the_metric():
    assert average([{"a": 1, "b": 2.0}, {"a": 4}]) == {"a": 2.5, "b": 2.0}
    assert average([]) == {}


def test_deterministic_leaves_the_machine_out():
    assert deterministic({"time/step": 1.0, "memory/peak": 2.0, "reward/mean": 3.0}) == {"reward/mean": 3.0}


def test_format_shows_what_is_there():
    metrics = {"reward/mean": 0.123456, "eval/accuracy": 0.5, "time/step": 12.0, "kl/mean": None, "other": 1.0}
    assert format_metrics(metrics) == "reward 0.123  accuracy 0.5  s 12"
    assert format_metrics({}) == ""


def test_lines_read_back(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(to_line(1, {"a": 0.1}) + "\n" + to_line(2, {"a": float("nan")}) + "\n" + '{"step": 3, "a')
    assert read_metrics(file) == [{"step": 1, "a": 0.1}, {"step": 2, "a": None}]
    assert json.loads(to_line(1, {"a": 0.1 + 0.2}))["a"] == 0.1 + 0.2, "values keep every bit"


def test_a_bad_line_is_named(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(DataError, match="line 2: not a JSON object: 'nonsense'"):
        read_metrics(file)
    with pytest.raises(DataError, match="No such file"):
        read_metrics(tmp_path / "none.jsonl")


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(to_line(i, {"reward/mean": i / 10, **({"eval/accuracy": 0.5} if i % 2 else {})}) + "\n"
                            for i in range(6)))
    plot_metrics(file, tmp_path / "curve.png", {"reward": "reward/mean", "held out": "eval/accuracy"}, title="t")
    plot_metrics({"one": file, "two": file}, tmp_path / "both.png", {"reward": "reward/mean"})
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(DataError, match="Unknown metric 'reward/maen'. Did you mean reward/mean"):
        plot_metrics(file, tmp_path / "x.png", {"reward": "reward/maen"})
