"""The rollout loop over an engine that counts, and the transformers engine against the model itself."""

import threading
import time
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest
import torch

from hybridrl.errors import DeadlineError, PhaseError, SyncError
from hybridrl.workers.rollout import engine as rollout_engine
from hybridrl.workers.rollout import transformers_engine
from hybridrl.workers.rollout.engine import Completion, Request, RolloutEngine
from hybridrl.workers.weights.regions import Write, whole
from tests.models import tiny_model

WAIT_S = 60
"""Longest wait of a test for another thread."""


class CountingEngine(RolloutEngine):
    """Continues a prompt with its last token + 1, + 2, ...; one token a request and step. `seen` are all steps."""

    def __init__(self):
        super().__init__(stop_ids=[99])
        self.rows: dict[str, tuple[Request, list[int], list[int]]] = {}
        self.seen: list[list[int]] = []
        self.before_step = lambda: None

    def add(self, request_id, request):
        self.rows[request_id] = (request, [], [])

    def busy(self):
        return bool(self.rows)

    def cancel(self, request_ids):
        for request_id in request_ids:
            self.rows.pop(request_id)

    def layout(self, weights, rename):
        return []

    def write_weights(self, writes, inspect=None):
        list(writes)

    def score(self, token_ids):
        return [0.0] * (len(token_ids) - 1)

    def step(self):
        self.before_step()
        self.seen.append([request.prompt_ids[0] for request, _, _ in self.rows.values()])
        finished = []
        for request_id, (request, tokens, versions) in list(self.rows.items()):
            tokens.append(request.prompt_ids[-1] + len(tokens) + 1)
            versions.append(self.version)
            if tokens[-1] in self.stop_ids or len(tokens) == request.max_tokens:
                reason = "stop" if tokens[-1] in self.stop_ids else "length"
                finished.append((request_id, Completion(tokens, [0.0] * len(tokens), versions, reason)))
                del self.rows[request_id]
        return finished


@pytest.fixture
def counting():
    engine = CountingEngine()
    engine.load_weights([], version=1)
    return engine


def in_thread(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


# The loop


def test_completions_come_in_the_order_of_requests_whatever_ends_first(counting):
    completions = counting.generate([Request([10], 3), Request([97], 5), Request([50], 1)])
    assert [c.token_ids for c in completions] == [[11, 12, 13], [98, 99], [51]]
    assert [c.finish_reason for c in completions] == ["length", "stop", "length"]
    assert counting.seen == [[10, 97, 50], [10, 97], [10]]
    assert counting.generate([]) == []


def test_a_request_from_another_thread_joins_those_that_run(counting):
    late = []

    def submit_at_the_third_step():
        if len(counting.seen) == 2:
            thread = in_thread(lambda: late.append(counting.submit(Request([70], 2))))
            thread.join(WAIT_S)

    counting.before_step = submit_at_the_third_step
    (first,) = counting.generate([Request([10], 6)])
    assert first.token_ids == [11, 12, 13, 14, 15, 16]
    assert late[0].result(WAIT_S).token_ids == [71, 72]
    assert counting.seen == [[10], [10], [10], [10, 70], [10, 70], [10]]


def test_the_loop_waits_while_another_thread_thinks(counting):
    """An environment answers the first turn with a second request; between the two nothing runs."""
    second, answered = counting.submit, threading.Event()
    turns = [counting.submit(Request([10], 1))]

    class Whole:
        """A future of the conversation."""

        @staticmethod
        def done():
            return answered.is_set() and turns[-1].done()

    def environment():
        turns[0].result(WAIT_S)
        time.sleep(0.05)
        turns.append(second(Request([20], 2)))
        answered.set()

    thread = in_thread(environment)
    counting.drive([Whole()], deadline_s=WAIT_S)
    thread.join(WAIT_S)
    assert [turn.result(0).token_ids for turn in turns] == [[11], [21, 22]]
    assert counting.seen == [[10], [20], [20]]


def test_many_threads_submit_at_once(counting):
    futures, start = {}, threading.Barrier(8)

    def submit(first):
        start.wait(WAIT_S)
        for i in range(50):
            futures[first + i] = counting.submit(Request([first + i], 1))

    threads = [in_thread(lambda n=n: submit(1000 * (n + 1))) for n in range(8)]
    for thread in threads:
        thread.join(WAIT_S)
    counting.drive(list(futures.values()), deadline_s=WAIT_S)
    assert {prompt: future.result(0).token_ids for prompt, future in futures.items()} == {
        1000 * n + i: [1000 * n + i + 1] for n in range(1, 9) for i in range(50)}


def test_cancelling_a_future_stops_its_request(counting):
    waiting, running, kept = (counting.submit(Request([prompt], 6)) for prompt in (10, 20, 30))
    assert waiting.cancel()

    def cancel_at_the_third_step():
        if len(counting.seen) == 2:
            assert running.cancel()

    counting.before_step = cancel_at_the_third_step
    counting.drive([waiting, running, kept])
    assert kept.result(0).token_ids == [31, 32, 33, 34, 35, 36]
    assert counting.seen == [[20, 30]] * 3 + [[30]] * 3
    assert not counting.busy()
    with pytest.raises(CancelledError):
        running.result(0)


def test_when_all_are_cancelled_the_loop_ends_and_leaves_nothing(counting):
    future = counting.submit(Request([10], 5))
    counting.before_step = future.cancel
    counting.drive([future], deadline_s=WAIT_S)
    assert not counting.busy()
    counting.before_step = lambda: None
    assert counting.generate([Request([40], 1)])[0].token_ids == [41]
    assert counting.seen == [[10], [40]]


def test_a_deadline_ends_every_request(counting, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: 0.1 * len(counting.seen), time=time.time)  # a step takes 0.1 s
    monkeypatch.setattr(rollout_engine, "time", clock)
    other = counting.submit(Request([170], 10**9))
    with pytest.raises(DeadlineError, match=r"rollout: 1 of 2 responses not finished after 0.2 s\."):
        counting.generate([Request([10], 1), Request([120], 10**9)], deadline_s=0.2)
    with pytest.raises(DeadlineError):
        other.result(0)  # whoever waits for it must not wait for ever
    assert not counting.busy()
    counting.seen.clear()
    assert counting.generate([Request([30], 2)])[0].token_ids == [31, 32]
    assert counting.seen == [[30], [30]]


def test_an_error_of_the_engine_ends_every_request(counting):
    waiting = []

    def fail():
        waiting.append(counting.submit(Request([70], 1)))  # in the inbox when the step fails
        raise ZeroDivisionError("kernel")

    counting.before_step = fail
    with pytest.raises(ZeroDivisionError):
        counting.generate([Request([10], 2)])
    with pytest.raises(ZeroDivisionError):
        waiting[0].result(0)
    counting.before_step = lambda: None
    assert counting.generate([Request([20], 1)])[0].token_ids == [21]
    assert counting.seen == [[20]]


@pytest.mark.parametrize("state", ["asleep", "without loaded weights"])
def test_a_refusal_leaves_nothing_queued(counting, state):
    if state == "asleep":
        counting.sleep()
    else:
        counting.version = None
    with pytest.raises(PhaseError, match=f"the rollout engine is {state}: sync weights before sampling"):
        counting.generate([Request([10], 1)])
    with pytest.raises(PhaseError, match=state):
        counting.drive([])
    counting.wake()
    counting.load_weights([], version=2)
    assert counting.generate([Request([20], 1)])[0].versions == [2]
    assert counting.seen == [[20]]


def test_a_load_that_fails_leaves_an_engine_that_refuses(counting):
    def breaks_off():
        yield []
        raise SyncError("half of them")

    with pytest.raises(SyncError, match="half of them"):
        counting.load_weights(breaks_off(), version=2)
    with pytest.raises(PhaseError, match="without loaded weights"):
        counting.generate([Request([10], 1)])
    counting.load_weights([], version=3)
    assert counting.generate([Request([10], 1)])[0].versions == [3]


def test_a_request_for_other_weights_is_refused_and_the_others_run(counting):
    early, right, late, any_version = (counting.submit(Request([10 * i], 2, version=version))
                                       for i, version in enumerate((0, 1, 2, None), start=1))
    counting.drive([early, right, late, any_version])
    assert right.result(0).versions == any_version.result(0).versions == [1, 1]
    for future, asked in ((early, 0), (late, 2)):
        with pytest.raises(PhaseError, match=f"weights of version {asked}, the rollout engine holds version 1"):
            future.result(0)
    assert counting.seen == [[20, 40], [20, 40]]
    with pytest.raises(PhaseError, match="version 2"):
        counting.generate([Request([10], 1, version=2)])
    counting.load_weights([], version=2)
    assert counting.generate([Request([10], 1, version=2)])[0].versions == [2]


def test_a_request_keeps_running_over_a_sync_under_the_version_it_started_with(counting):
    steps = []

    def sync_before_the_second():
        steps.append(1)
        if len(steps) == 2:
            counting.load_weights([], version=2)

    counting.before_step = sync_before_the_second
    assert counting.generate([Request([10], 3, version=1)])[0].versions == [1, 2, 2]


def test_the_time_of_the_first_token_is_kept(counting):
    before = time.time()
    counting.generate([Request([10], 2)])
    first = counting.first_token_at
    assert before <= first <= time.time()
    counting.generate([Request([10], 2)])
    assert counting.first_token_at == first


# The transformers engine


@pytest.fixture(scope="module", params=["llama_tied", "qwen3_moe"])
def model(request, tmp_path_factory):
    from transformers import AutoModelForCausalLM

    folder = tiny_model(tmp_path_factory.mktemp("model"), request.param, initializer_range=0.1)
    return folder, AutoModelForCausalLM.from_pretrained(folder).eval()


def writes(weights):
    return [Write(name, whole(weight.shape), weight) for name, weight in weights]


def engine_on(model, **options):
    from hybridrl.workers.rollout.transformers_engine import TransformersEngine

    folder, reference = model
    engine = TransformersEngine(folder, torch.device("cpu"), torch.float32, options.pop("stop_ids", []), **options)
    engine.load_weights([writes(reference.named_parameters())], version=1)
    return engine


@torch.no_grad()
def expected_log_probs(model, prompt, response, temperature=1.0):
    logits = model[1](torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1:-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


PROMPTS = ([5, 6, 7], [8], list(range(10, 30)), [31, 32])


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probs_are_those_of_the_model(model, temperature):
    requests = [Request(prompt, 7, temperature, seed) for seed, prompt in enumerate(PROMPTS)]
    for request, completion in zip(requests, engine_on(model).generate(requests), strict=True):
        assert len(completion.token_ids) == 7 and completion.finish_reason == "length"
        assert completion.versions == [1] * 7
        torch.testing.assert_close(
            torch.tensor(completion.log_probs),
            expected_log_probs(model, request.prompt_ids, completion.token_ids, temperature), atol=1e-4, rtol=0)


@pytest.mark.parametrize("room", [1, 3, 64])
def test_the_cache_grows_while_rows_end(model, monkeypatch, room):
    monkeypatch.setattr(transformers_engine, "ROOM", room)
    requests = [Request([5, 6, 7], 3 * (seed + 1), 1.0, seed) for seed in range(4)]
    for request, completion in zip(requests, engine_on(model).generate(requests), strict=True):
        assert len(completion.token_ids) == request.max_tokens
        torch.testing.assert_close(
            torch.tensor(completion.log_probs),
            expected_log_probs(model, request.prompt_ids, completion.token_ids), atol=1e-4, rtol=0)


def test_a_prompt_in_common_is_fed_once_and_rows_go_their_own_ways(model):
    engine, fed = engine_on(model), []
    engine.model.model.layers[0].register_forward_hook(lambda layer, args, out: fed.append(tuple(out.shape[:2])))
    requests = [Request([5, 6, 7] if row % 2 else [8, 9], 4, 1.0, row) for row in range(6)]
    together = engine.generate(requests)
    assert fed == [(2, 3)] + 3 * [(6, 1)]
    assert len({tuple(c.token_ids) for c in together[1::2]}) > 1
    for request, completion in zip(requests, together, strict=True):
        torch.testing.assert_close(
            torch.tensor(completion.log_probs),
            expected_log_probs(model, request.prompt_ids, completion.token_ids), atol=1e-4, rtol=0)


def test_samples_do_not_depend_on_what_runs_beside_them(model):
    requests = [Request(prompt, 5 + seed, 1.0, seed) for seed, prompt in enumerate(PROMPTS)]
    together = engine_on(model).generate(requests)
    narrow = engine_on(model, max_running=2).generate(requests)
    alone = [engine_on(model).generate([request])[0] for request in reversed(requests)][::-1]
    assert [c.token_ids for c in narrow] == [c.token_ids for c in alone] == [c.token_ids for c in together]
    torch.testing.assert_close([c.log_probs for c in narrow], [c.log_probs for c in together], atol=1e-4, rtol=0)


def test_seeds_decide_and_temperature_zero_takes_the_likeliest(model):
    engine = engine_on(model)
    rows = [c.token_ids for c in engine.generate([Request([5, 6], 8, 1.0, seed) for seed in (1, 2, 1)])]
    assert rows[0] == rows[2] != rows[1]
    greedy, again = engine.generate([Request([5, 6], 8, 0.0, seed) for seed in (1, 2)])
    assert greedy.token_ids == again.token_ids
    text = [5, 6]
    for token in greedy.token_ids:
        assert token == int(model[1](torch.tensor([text])).logits[0, -1].argmax())
        text.append(token)
    torch.testing.assert_close(torch.tensor(greedy.log_probs), expected_log_probs(model, [5, 6], greedy.token_ids),
                               atol=1e-4, rtol=0)


def test_sampling_follows_the_distribution(model):
    """First tokens of 4,000 rows against the model's probabilities: within 5 standard errors each."""
    engine = engine_on(model, max_running=4000)
    first = [c.token_ids[0] for c in engine.generate([Request([5, 6], 1, 1.0, seed) for seed in range(4000)])]
    wanted = model[1](torch.tensor([[5, 6]])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor(first), minlength=len(wanted)) / 4000
    error = (wanted * (1 - wanted) / 4000).sqrt()
    assert ((counts - wanted).abs() < 5 * error + 1e-3).all()


def test_an_end_token_stops_a_row_and_is_part_of_it(model):
    request = Request([5, 6, 7], 12, 1.0, 3)
    (free,) = engine_on(model).generate([request])
    stop = free.token_ids[4]
    stopped, other = engine_on(model, stop_ids=[stop]).generate([request, Request([8, 9], 3, 1.0, 4)])
    assert stopped.token_ids == free.token_ids[:free.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"
    assert len(other.token_ids) <= 3


def test_a_cancelled_row_ends_and_its_neighbours_go_on(model):
    engine = engine_on(model)
    gone, kept = (engine.submit(Request(prompt, 9, 1.0, 5)) for prompt in PROMPTS[:2])
    step, steps = engine.step, []

    def counted():
        steps.append(1)
        if len(steps) == 4:
            gone.cancel()
        return step()

    engine.step = counted
    engine.drive([gone, kept])
    assert kept.result(0).token_ids == engine_on(model).generate([Request(PROMPTS[1], 9, 1.0, 5)])[0].token_ids
    assert len(steps) == 9 and not engine.busy()


def test_weights_may_change_in_mid_generation(model):
    engine = engine_on(model)
    factors = {name: 1.0 + 0.2 * (parameter.dim() > 1) for name, parameter in model[1].named_parameters()}
    futures = [engine.submit(Request(prompt, 8, 1.0, seed)) for seed, prompt in enumerate(PROMPTS[:3])]
    step, steps = engine.step, []

    def counted():
        steps.append(1)
        if len(steps) == 4:
            engine.load_weights([writes((n, p * factors[n]) for n, p in model[1].named_parameters())], version=2)
        return step()

    engine.step = counted
    engine.drive(futures)
    rows = [future.result(0) for future in futures]
    old = [expected_log_probs(model, prompt, row.token_ids) for prompt, row in zip(PROMPTS, rows, strict=False)]
    try:
        with torch.no_grad():
            for name, parameter in model[1].named_parameters():
                parameter.mul_(factors[name])
        new = [expected_log_probs(model, prompt, row.token_ids) for prompt, row in zip(PROMPTS, rows, strict=False)]
    finally:
        with torch.no_grad():
            for name, parameter in model[1].named_parameters():
                parameter.div_(factors[name])
    for row, before, after in zip(rows, old, new, strict=True):
        assert row.versions == [1, 1, 1, 2, 2, 2, 2, 2]
        torch.testing.assert_close(torch.tensor(row.log_probs), torch.cat([before[:3], after[3:]]), atol=1e-4, rtol=0)
        assert (before - after).abs().max() > 1e-2


def test_scores_are_those_of_the_model(model):
    ids = [5, 9, 13, 17, 21]
    torch.testing.assert_close(torch.tensor(engine_on(model).score(ids)), expected_log_probs(model, ids[:1], ids[1:]),
                               atol=1e-4, rtol=0)


def test_a_weight_that_does_not_arrive_is_named(model):
    engine = engine_on(model)
    name = "model.layers.1.self_attn.k_proj.weight"
    kept = [pair for pair in model[1].named_parameters() if pair[0] != name]
    with pytest.raises(SyncError, match=rf"left 1 engine weights unwritten: {name}\."):
        engine.load_weights([writes(kept[:5]), writes(kept[5:])], version=2)
    with pytest.raises(PhaseError, match="without loaded weights"):
        engine.generate([Request([5], 1)])
