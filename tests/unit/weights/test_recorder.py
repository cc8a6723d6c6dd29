"""What loaders are seen to do: slices, fused places, transposes, padding, and what can't be followed."""

import torch

from hybridrl.workers.weights.recorder import Recorder
from hybridrl.workers.weights.regions import Copy, Region


def recorded(load, weights, parameters):
    """Run `load(weights, parameters)` inside a Recorder; shapes in, the recorder out."""
    weights = {name: torch.empty(shape, device="meta") for name, shape in weights.items()}
    parameters = {name: torch.zeros(shape) for name, shape in parameters.items()}
    with Recorder(weights, parameters) as recorder, torch.no_grad():
        load(weights, parameters)
    assert all(not parameter.any() for parameter in parameters.values()), "nothing is written"
    return recorder


def test_a_tensor_parallel_slice_of_a_fused_projection():
    def load(weights, parameters):
        for place, name in enumerate(("q", "k")):  # the second of two ranks: rows 2 and 3 of each
            parameters["qk"].narrow(0, 2 * place, 2).data.copy_(weights[name].narrow(0, 2, 2))

    found = recorded(load, {"q": (4, 3), "k": (4, 3)}, {"qk": (4, 3)})
    assert found.copies == [Copy("q", Region(6, (2, 3), (3, 1)), "qk", Region(0, (2, 3), (3, 1))),
                            Copy("k", Region(6, (2, 3), (3, 1)), "qk", Region(6, (2, 3), (3, 1)))]
    assert not found.computed and not found.fills


def test_one_expert_of_a_fused_tensor_through_copies_and_casts():
    def load(weights, parameters):
        gate, _ = (half.contiguous() for half in weights["gate_up"].chunk(2, dim=1))  # [experts, 2, 3]
        parameters["w"][1].copy_(gate[1].to(torch.bfloat16).clone())

    found = recorded(load, {"gate_up": (2, 4, 3)}, {"w": (2, 2, 3)})
    assert found.copies == [Copy("gate_up", Region(12, (2, 3), (3, 1)), "w", Region(6, (2, 3), (3, 1)))]
    assert not found.computed


def test_transposes_broadcasts_and_padding():
    def load(weights, parameters):
        parameters["w"].copy_(weights["w"].t())
        parameters["b"].copy_(weights["b"])
        parameters["v"][:2].copy_(weights["v"])
        parameters["v"][2:].fill_(0)

    found = recorded(load, {"w": (2, 3), "b": (1,), "v": (2, 4)}, {"w": (3, 2), "b": (5,), "v": (4, 4)})
    assert [copy.source for copy in found.copies] == [
        Region(0, (3, 2), (1, 3)), Region(0, (5,), (0,)), Region(0, (2, 4), (4, 1))]
    assert found.fills == [("v", Region(8, (2, 4), (4, 1)), 0.0)]


def test_what_is_computed_is_named():
    def load(weights, parameters):
        parameters["a"].copy_(weights["a"] + 1)
        parameters["b"].copy_(torch.cat([weights["b"], weights["b"]]))
        parameters["c"].copy_(weights["c"])
        parameters["c"].mul_(2)
        parameters["d"].copy_(weights["d"])

    found = recorded(load, dict.fromkeys("abcd", (2,)), {"a": (2,), "b": (4,), "c": (2,), "d": (2,)})
    assert found.computed == {"a", "b", "c"}  # of a and b both the weight and the parameter
