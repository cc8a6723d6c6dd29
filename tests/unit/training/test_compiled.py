"""Compiled layers on the demo's model: the numbers of eager ones, whatever the packing, and one compilation."""

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import recipes.demo
from hybridrl.config import ModelConfig, TrainingConfig
from hybridrl.errors import ConfigError
from hybridrl.workers.compile_cache import tell_cpus_apart
from hybridrl.workers.training.engine import TrainingEngine
from tests.unit.training.reference import policy_gradient, random_batch

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_rank")]
DEMO = Path(recipes.demo.__file__).parent / "model"


def engine(**options):
    return TrainingEngine(ModelConfig(path=str(DEMO)), TrainingConfig(learning_rate=1e-4, **options),
                          torch.device("cpu"))


def test_updates_are_those_of_eager_layers(one_rank):
    compiled, eager = engine(compile=True), engine()
    start = {name: weight.full_tensor().clone() for name, weight in eager.weights()}
    counters.clear()
    graphs = []
    for seed, longest in ((0, 12), (1, 40), (2, 25)):  # other numbers of rows, groups and tokens each time
        batch = random_batch(num_rows=5 + seed, seed=seed, longest_response=longest, vocabulary=20)
        ours, theirs = (each.update(batch, policy_gradient, 0.7, entropies=True) for each in (compiled, eager))
        assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-4)
        graphs.append(counters["stats"]["unique_graphs"])
    recomputed = engine(compile=True, gradient_checkpointing="layers")
    first = [each.update(random_batch(vocabulary=20), policy_gradient) for each in (recomputed, engine())]
    assert first[0] == pytest.approx(first[1], rel=2e-4, abs=2e-4)
    assert 0 < graphs[0] == graphs[2]
    for (name, ours), (_, theirs) in zip(compiled.weights(), eager.weights(), strict=True):
        # Not by element: AdamW makes a whole step of a gradient that is nothing but rounding.
        ours, theirs = ours.full_tensor(), theirs.full_tensor()
        assert (ours - theirs).norm() < 0.05 * (theirs - start[name]).norm(), name


def test_a_cache_on_disk_tells_cpus_apart(monkeypatch):
    """As on two machines with the same home: what torch makes of the tag is part of its keys."""
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "mine")
    tags = []
    for kind in ("AVX512", "AVX2", "AVX2"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda kind=kind: kind)
        monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "mine")
        engine(compile=True)
        tell_cpus_apart()  # once is enough
        tags.append(torch.compiler.config.cache_key_tag)
    assert tags == ["mine AVX512", "mine AVX2", "mine AVX2"]


def test_without_a_compiler_it_is_refused(monkeypatch):
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "no-such-compiler"))
    with pytest.raises(ConfigError, match=r"training\.compile=true needs a C\+\+ compiler; install g\+\+"):
        engine(compile=True)
