"""What a rollout engine is: requests in at any time, completions out as futures, weights in by version.

    submit ──> inbox ──> step ──> Completion in the request's future
                          ^
    load_weights ─────────┘   (a version per sync; every sampled token carries the one that produced it)

`drive` is the one loop. Single-turn batches, environments that submit their next turn from another thread,
and generation that goes on while weights change all run through it.
"""

import itertools
import math
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from hybridrl.errors import DeadlineError, PhaseError
from hybridrl.workers.routing import Mixture
from hybridrl.workers.weights.changes import as_bits, overwrite
from hybridrl.workers.weights.regions import Copy, Write

Rename = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Weights of the transformers module to what a saved checkpoint holds."""

Changes = Iterable[tuple[str, np.ndarray, np.ndarray]]
"""(parameter, flat positions [k] int64, their new bits [k] as unsigned integers of the dtype's size)."""

Inspect = Callable[[str, Tensor], None]
"""Called with an engine parameter's name and its values."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue."""

    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    version: int | None = None
    """Version of the weights that it must start under; None: whichever are loaded."""
    score: bool = False
    """Whether the completion is to have `prompt_scores`."""


class PromptScore(NamedTuple):
    """Of a prompt's token at temperature 1, given what precedes it: its log-prob; the likeliest token and its own."""

    log_prob: float
    top_id: int
    top_log_prob: float


PromptScores = Sequence[PromptScore]
"""Of the tokens of a prompt but for the first."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled for one request.

    `log_probs` are of the distribution sampled from; `versions` is the weight version of each token;
    `finish_reason` is `stop` (an end token, which is part of token_ids), `length` or `aborted`; `experts` are those of
    prompt and response but for its last token, as they travel (see Mixture), where the engine keeps them;
    `prompt_scores` are there when the request asks for them.
    """

    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: str
    experts: Tensor | None = None
    prompt_scores: PromptScores | None = None


Listener = Callable[[Completion], None]
"""Takes what a request that goes on has come to, in the thread of the engine; it is `aborted` there."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What the first tensor-parallel peer decides before a step, for all peers; `late` says that time has run out."""

    arrived: list[tuple[str, Request]]
    cancelled: list[str]
    done: bool
    late: str


class RolloutEngine(ABC):
    """Base of the engines: the inbox, the loop and the version; subclasses compute.

    Args:
        stop_ids: token ids that end a response.
    """

    mixture: Mixture | None = None
    """The shape of the experts that completions carry; None when they carry none."""

    def __init__(self, stop_ids: Sequence[int]):
        self.stop_ids = sorted(set(stop_ids))
        self.version: int | None = None
        self.awake = True
        self.first_token_at: float | None = None
        """When the first token of all was sampled, in seconds since 1970."""
        self._stepped = False
        self._ids = itertools.count()
        self._inbox: queue.SimpleQueue[tuple[str, Request]] = queue.SimpleQueue()
        self._cancelled: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._futures: dict[str, Future[Completion]] = {}
        self._listeners: dict[str, tuple[Listener, list[int]]] = {}
        """With the weight versions of the tokens that they know of."""
        self._running: set[str] = set()

    # ---- what subclasses provide

    @abstractmethod
    def add(self, request_id: str, request: Request) -> None:
        """Hand one request to the engine."""

    @abstractmethod
    def step(self) -> list[tuple[str, Completion]]:
        """Advance every running request once; return those that finished, and call `progressed` for the others."""

    @abstractmethod
    def busy(self) -> bool:
        """Whether any request is running or waiting."""

    @abstractmethod
    def cancel(self, request_ids: Sequence[str]) -> None:
        """Stop requests; their tokens are lost."""

    @abstractmethod
    def layout(self, weights: Mapping[str, Tensor], rename: Rename) -> list[Copy]:
        """Where this rank's parameters take their elements from.

        Args:
            weights: meta tensors in the shapes and under the names of the transformers module.
            rename: turns them into those of a checkpoint.
        Raises:
            SyncError: parameters that none of the weights fills.
        """

    @abstractmethod
    def write_weights(self, writes: Iterable[list[Write]], inspect: Inspect | None = None) -> None:
        """Make the writes, which together fill every parameter as `layout` said.

        Args:
            inspect: sees every parameter once it is filled, in the layout's shape: before the engine packs it.
        Raises:
            SyncError: naming what did not arrive.
        """

    @abstractmethod
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of token_ids[1:] given what precedes each, at temperature 1."""

    def share(self, orders: Orders) -> Orders:
        """Give every tensor-parallel peer the first peer's orders. Without peers: the orders themselves."""
        return orders

    def sleep(self) -> None:
        """Give the engine's memory to training as far as the device allows."""
        self.awake = False

    def wake(self) -> None:
        """Take the weights' memory back; they must be loaded before sampling."""
        self.awake = True

    def wake_cache(self) -> None:  # noqa: B027
        """Take the key-value cache's memory back, once the weights are loaded."""

    def close(self) -> None:  # noqa: B027
        """Free the engine."""

    # ---- the loop

    def submit(self, request: Request, listener: Listener | None = None) -> Future[Completion]:
        """Queue a request; callable from any thread, at any time. Cancelling the future cancels the request.

        A listener is told of it after each step, until the future has the whole.
        """
        request_id = str(next(self._ids))
        future: Future[Completion] = Future()
        self._futures[request_id] = future
        if listener is not None:
            self._listeners[request_id] = listener, []
        future.add_done_callback(lambda f: self._cancelled.put(request_id) if f.cancelled() else None)
        self._inbox.put((request_id, request))
        return future

    def listened_to(self, request_id: str) -> bool:
        """Whether anybody is to be told how a request goes on."""
        return request_id in self._listeners

    def progressed(self, request_id: str, token_ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Tell who listens to a request that goes on all that was sampled for it."""
        if request_id in self._listeners:
            listener, versions = self._listeners[request_id]
            versions += [-1 if self.version is None else self.version] * (len(token_ids) - len(versions))
            listener(Completion(list(token_ids), list(log_probs), list(versions), "aborted"))

    def drive(self, futures: Sequence[Future[Any]], deadline_s: float = math.inf) -> None:
        """Run the loop until all of `futures` are done.

        Every tensor-parallel peer calls this; what the first peer submits is what all of them run. An error ends
        every request, those of other threads too: it is what their futures raise.
        Raises PhaseError without loaded weights or while asleep, DeadlineError when the time runs out.
        """
        self._check_ready()
        began = time.monotonic()
        try:
            while not (orders := self.share(self._orders(futures, began, deadline_s))).done:
                self._follow(orders)
                if orders.late:
                    raise DeadlineError(orders.late)
                if not self.busy():
                    time.sleep(0.001)  # an environment thread is about to submit
                    continue
                finished = self.step()
                if not self._stepped:
                    self._stepped, self.first_token_at = True, time.time()
                for request_id, completion in finished:
                    self._finish(request_id, completion)
            self._follow(orders)
        except BaseException as error:
            self._abandon(error)
            raise

    def _check_ready(self) -> None:
        if not self.awake or self.version is None:
            state = "asleep" if not self.awake else "without loaded weights"
            raise PhaseError(f"the rollout engine is {state}: sync weights before sampling.")

    def _orders(self, futures: Sequence[Future[Any]], began: float, deadline_s: float) -> Orders:
        cancelled = _drained(self._cancelled)  # before the arrivals: what is cancelled has arrived
        done, late = all(f.done() for f in futures), ""
        if not done and time.monotonic() - began > deadline_s:
            waiting = sum(not f.done() for f in futures)
            late = f"rollout: {waiting} of {len(futures)} responses not finished after {deadline_s:g} s."
        return Orders(_drained(self._inbox), cancelled, done, late)

    def _follow(self, orders: Orders) -> None:
        for request_id, request in orders.arrived:
            if request.version not in (None, self.version):
                self._refuse(request_id, request)
                continue
            self._running.add(request_id)
            self.add(request_id, request)
        cancelled = [request_id for request_id in orders.cancelled if request_id in self._running]
        if cancelled:
            self.cancel(cancelled)
        for request_id in cancelled:
            self._running.discard(request_id)
            self._taken(request_id)

    def _taken(self, request_id: str) -> "Future[Completion] | None":
        """The future of a request that is over; on a peer there is none: futures live on the first rank."""
        self._listeners.pop(request_id, None)
        return self._futures.pop(request_id, None)

    def _refuse(self, request_id: str, request: Request) -> None:
        future = self._taken(request_id)
        if future is not None:
            with suppress(InvalidStateError):
                future.set_exception(PhaseError(f"a request asks for weights of version {request.version}, the rollout "
                                                f"engine holds version {self.version}: sync weights first."))

    def _finish(self, request_id: str, completion: Completion) -> None:
        self._running.discard(request_id)
        future = self._taken(request_id)
        if future is not None:
            with suppress(InvalidStateError):  # cancelled while it ran
                future.set_result(completion)

    def _abandon(self, error: BaseException) -> None:
        """End every request, waiting or running, so that nobody waits for it and none turns up in a later drive."""
        self.cancel(list(self._running))
        self._running.clear()
        _drained(self._inbox)
        futures, self._futures = self._futures, {}
        self._listeners.clear()
        for future in futures.values():
            with suppress(InvalidStateError):
                future.set_exception(error)
        _drained(self._cancelled)

    def generate(self, requests: Sequence[Request], deadline_s: float = math.inf) -> list[Completion]:
        """Completions of `requests` in order; on a tensor-parallel peer that is not the first: an empty list."""
        self._check_ready()  # before anything is queued, which a later drive would run
        futures = [self.submit(request) for request in requests] if self.leads else []
        self.drive(futures, deadline_s)
        return [future.result() for future in futures]

    @property
    def cache_tokens(self) -> int | None:
        """Tokens that the key-value cache holds; None when there is no such limit."""
        return None

    @property
    def leads(self) -> bool:
        """Whether this rank decides what its tensor-parallel group submits."""
        return True

    def load_weights(self, writes: Iterable[list[Write]], version: int, inspect: Inspect | None = None) -> None:
        """Replace every weight and stamp what is sampled from now on with `version`.

        A load that fails leaves an engine that refuses to sample, never a mixture.
        Raises SyncError naming the weights that did not arrive.
        """
        self.version = None
        self.write_weights(writes, inspect)
        self.version = version

    @property
    def parameters(self) -> Mapping[str, Tensor] | None:
        """Parameters under the names of `layout`, where they can be written in place at any time, asleep or awake.

        None where the engine packs them, or gives them up while it sleeps.
        """
        return None

    def patch_weights(self, changes: Changes, version: int, inspect: Inspect | None = None) -> None:
        """Overwrite some elements of `parameters`; otherwise as `load_weights`."""
        parameters = self.parameters
        assert parameters is not None, "the caller asks first whether parameters can be written in place"
        self.version = None
        for name, index, bits in changes:
            overwrite(as_bits(parameters[name]), index, bits)
        self.forget_cache()
        if inspect is not None:
            for name, parameter in parameters.items():
                inspect(name, parameter)
        self.version = version

    def forget_cache(self) -> None:  # noqa: B027
        """Have what was computed under other weights, of running requests too, computed anew."""


def _drained(waiting: queue.SimpleQueue) -> list[Any]:
    items = []
    while not waiting.empty():
        items.append(waiting.get())
    return items
