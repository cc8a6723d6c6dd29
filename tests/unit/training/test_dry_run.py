"""The dry run: what it reports, what it leaves alone, and the budget that it says fits."""

import re

import pytest
import torch

from hybridrl.batch import fed_lengths, lengths, rows_of
from hybridrl.config import ModelConfig, TrainingConfig
from hybridrl.errors import ConfigError
from hybridrl.workers.training import dry_run as module
from hybridrl.workers.training.dry_run import Measured, dry_run
from hybridrl.workers.training.engine import TrainingEngine
from tests.unit.training.reference import policy_gradient, random_batch

pytestmark = pytest.mark.usefixtures("one_rank")
MIB = 2**20


def engine(path, **options):
    options = {"learning_rate": 1e-2, "micro_batch_tokens": 2000} | options
    return TrainingEngine(ModelConfig(path=str(path)), TrainingConfig(**options), torch.device("cpu"))


def state(ours):
    return {name: weight.full_tensor().clone() for name, weight in ours.weights()}, ours.memory(), torch.get_rng_state()


@pytest.mark.parametrize("trained", [False, True])
def test_nothing_changes_and_the_next_update_is_what_it_would_have_been(folder, trained):
    ours, twin = engine(folder()), engine(folder())
    for each in (ours, twin):
        if trained:
            each.update(random_batch(), policy_gradient)
    weights, memory, rng = state(ours)
    text = dry_run(ours, rows=16, prompt_tokens=100, response_tokens=200, entropies=True)
    after = state(ours)
    assert all(torch.equal(weights[name], after[0][name]) for name in weights)
    assert after[1] == memory and torch.equal(after[2], rng)
    assert ours.update(random_batch(seed=1), policy_gradient) == twin.update(random_batch(seed=1), policy_gradient)
    found = re.fullmatch(r"dry run: a micro-batch of 2000 tokens takes ([0-9.]+) GiB on a rank, ([0-9.]+) GiB of it "
                         r"optimizer state still to come; ([0-9.]+) GiB of ([0-9.]+) GiB are left", text)
    takes, to_come, left, free = map(float, found.groups())
    assert takes + left == pytest.approx(free, abs=0.02) and takes < 1
    assert to_come == (0 if trained else round(8 * ours.num_parameters / 2**30, 2))


def test_the_micro_batch_is_no_larger_than_the_batch(folder):
    assert "a micro-batch of 87 tokens" in dry_run(engine(folder()), rows=3, prompt_tokens=10, response_tokens=20)
    frozen = TrainingEngine(ModelConfig(path=str(folder())), TrainingConfig(), torch.device("cpu"), trainable=False)
    assert "a micro-batch of 87 tokens" in dry_run(frozen, rows=3, prompt_tokens=10, response_tokens=20)


@pytest.mark.parametrize(("tokens", "fed", "responses"), [
    (29, [29], [20]), (58, [29, 29], [20, 20]), (40, [29, 11], [20, 11]), (5, [5], [5]), (25, [25], [20])])
def test_rows_of_the_longest_kind(tokens, fed, responses):
    batch = module._longest_rows(tokens, 10, 20)
    assert fed_lengths(batch) == fed and lengths(batch["response_ids"]).tolist() == responses
    assert len({tuple(prompt.tolist()) for prompt in rows_of(batch["prompt_ids"])}) == len(fed)


def test_candidates_of_a_teacher_take_part(folder, monkeypatch):
    """In forward and backward passes: 5 more log-probs of every response token, with gradient."""
    seen = []

    def loss(log_probs, columns, entropies):
        seen.append(columns["candidate_log_probs"])
        return sum_of_all(log_probs, columns, entropies)

    sum_of_all = module._sum_of_all
    monkeypatch.setattr(module, "_sum_of_all", loss)
    text = dry_run(engine(folder()), rows=3, prompt_tokens=10, response_tokens=20, candidates=5)
    assert "a micro-batch of 87 tokens" in text
    assert [tuple(x.shape) for x in seen] == [(3, 20, 5)] and seen[0].requires_grad
    one = torch.ones(1, 2, 5, requires_grad=True)
    sum_of_all(torch.zeros(1, 2), {"candidate_log_probs": one}, None)[0].backward()
    assert (one.grad == 1).all()


def test_the_line_through_two_measurements():
    assert module._fitting([Measured(100, 1000.0), Measured(200, 1500.0)], free=3000.0) == 500
    assert module._fitting([Measured(100, 1000.0)], free=3000.0) == 300
    assert module._fitting([Measured(100, 1000.0), Measured(200, torch.inf)], free=3000.0) == 100


def test_a_budget_that_does_not_fit_names_the_largest_that_does(folder, monkeypatch):
    """With a device that holds 5 MiB and 10 KiB a token."""
    tried = []

    def used(engine, batch, base, temperature, entropies):
        tried.append(sum(fed_lengths(batch)))
        return 5.0 * MIB + 10240 * tried[-1]

    monkeypatch.setattr(module, "_used", used)
    ours = engine(folder(), micro_batch_tokens=8000)
    to_come = ours.optimizer.bytes_to_come()
    monkeypatch.setattr(module, "free_bytes", lambda device: to_come + 5 * MIB + 10240 * 3000)
    with pytest.raises(ConfigError) as error:
        dry_run(ours, rows=1000, prompt_tokens=100, response_tokens=200)
    limit = int(re.search(r"training.micro_batch_tokens must be at most (\d+) here, got 8000: a micro-batch of 8000 "
                          r"tokens is possible, 0.03 GiB are free on a rank", str(error.value))[1])
    assert 0.97 * 3000 <= limit <= 3000 and max(tried) <= 3000 and tried[0] == 256
    assert "a micro-batch of 2900 tokens" in dry_run(engine(folder(), micro_batch_tokens=2900), 1000, 100, 200)
    tried.clear()
    monkeypatch.setattr(module, "free_bytes", lambda device: to_come + 5 * MIB + 10240 * 100_000)
    with pytest.raises(ConfigError, match="must be at most 95000 here, got 1000000: a micro-batch of 299000 tokens"):
        dry_run(engine(folder(), micro_batch_tokens=10**6), rows=1000, prompt_tokens=100, response_tokens=200)
    assert max(tried) == 4096, "far from what fits, the line is enough"
    assert "of 90000 tokens" in dry_run(engine(folder(), micro_batch_tokens=90_000), 1000, 100, 200)
    assert tried[-2:] == [4096, 90_000]
    monkeypatch.setattr(module, "free_bytes", lambda device: to_come + 5 * MIB + 10240 * 3000)
    with pytest.raises(ConfigError, match="can't be made to fit: a single sequence may have 6000 tokens"):
        dry_run(ours, rows=1000, prompt_tokens=2000, response_tokens=4000)


def test_what_is_free_within_the_process_is_no_room_for_everything(folder, monkeypatch):
    """The first 6000 tokens take nothing new: no line is drawn through that."""
    tried = []

    def used(engine, batch, base, temperature, entropies):
        tried.append(sum(fed_lengths(batch)))
        return 10240.0 * max(0, tried[-1] - 6000)

    monkeypatch.setattr(module, "_used", used)
    ours = engine(folder(), micro_batch_tokens=10**12)
    to_come = ours.optimizer.bytes_to_come()
    monkeypatch.setattr(module, "free_bytes", lambda device: to_come + 10240 * 100_000)
    with pytest.raises(ConfigError, match="must be at most 100700 here"):  # 95% of 106,000
        dry_run(ours, rows=10**12, prompt_tokens=100, response_tokens=200)
    assert max(tried) == 16384


def test_a_device_that_is_full_at_once(folder, monkeypatch):
    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("no more")

    ours = engine(folder())
    monkeypatch.setattr(ours, "log_probs", out_of_memory)
    with pytest.raises(ConfigError, match="and 0 tokens are what fits"):
        dry_run(ours, rows=16, prompt_tokens=100, response_tokens=200)


def test_a_budget_far_beyond_this_machine(folder):
    """Measured, not made up: the error comes after a few small micro-batches."""
    with pytest.raises(ConfigError, match="a micro-batch of 1000000000000 tokens is possible") as error:
        dry_run(engine(folder(), micro_batch_tokens=10**12), rows=10**12, prompt_tokens=100, response_tokens=200)
    limit = int(re.search(r"must be at most (\d+) here", str(error.value))[1])
    assert 10**4 < limit < 10**9
