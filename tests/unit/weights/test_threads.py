"""Work shared out over threads."""

import threading

import pytest
import torch

from hybridrl.workers.weights.threads import each, spans


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_are_in_order_and_errors_arrive(monkeypatch, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert each(range(40), lambda x: x * x) == [x * x for x in range(40)]
    assert each([], len) == []
    running, met = min(threads, 3), []
    barrier = threading.Barrier(running, timeout=60)

    def meet(number):
        barrier.wait()
        met.append(threading.get_ident())
        if number == running - 1:
            raise ValueError("the last")

    with pytest.raises(ValueError, match="the last"):
        each(range(running), meet)
    assert len(set(met)) == running  # nothing goes on once it has raised
    assert [b for _, b in spans(1000)] == [a for a, _ in spans(1000)][1:] + [1000]
