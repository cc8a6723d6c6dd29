"""What a rollout engine is: requests in at any time, completions out as futures, weights in by version.

    submit ──> inbox ──> step ──> Completion in the request's future
                          ^
    load_weights ─────────┘   (a version per sync; every sampled token carries the one that produced it)

`drive` is the one loop. Single-turn batches, environments that submit their next turn from another thread,
and generation that goes on while weights change all run through it.
"""

import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

from torch import Tensor

from hybridrl.errors import DeadlineError, PhaseError

Bucket = list[tuple[str, Tensor]]
"""Some named full weights, already in the engine's dtype."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue."""

    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled for one request.

    `log_probs` are of the distribution sampled from; `versions` is the weight version of each token;
    `finish_reason` is `stop` (an end token, which is part of token_ids), `length` or `aborted`.
    """

    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: str


class RolloutEngine(ABC):
    """Base of the engines: the inbox, the loop and the version; subclasses compute.

    Args:
        stop_ids: token ids that end a response.
        peers: ranks of the tensor-parallel group this engine spans; the first one decides what is submitted.
    """

    checkpoint_names = True
    """Whether `load_weights` takes the names of a saved checkpoint, or those of the transformers module."""

    def __init__(self, stop_ids: Sequence[int]):
        self.stop_ids = sorted(set(stop_ids))
        self.version: int | None = None
        self.awake = True
        self.first_token_at: float | None = None
        """When the first token of all was sampled, in seconds since 1970."""
        self._stepped = False
        self._inbox: queue.SimpleQueue[tuple[str, Request]] = queue.SimpleQueue()
        self._futures: dict[str, Future[Completion]] = {}
        self._submitted = 0

    # ---- what subclasses provide

    @abstractmethod
    def add(self, request_id: str, request: Request) -> None:
        """Hand one request to the engine."""

    @abstractmethod
    def step(self) -> list[tuple[str, Completion]]:
        """Advance every running request once; return those that finished."""

    @abstractmethod
    def busy(self) -> bool:
        """Whether any request is running or waiting."""

    @abstractmethod
    def cancel(self, request_ids: Sequence[str]) -> None:
        """Stop requests; their tokens are lost."""

    @abstractmethod
    def write_weights(self, buckets: Iterable[Bucket]) -> None:
        """Replace every weight; raise SyncError naming what did not arrive."""

    @abstractmethod
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of token_ids[1:] given what precedes each, at temperature 1."""

    def share(self, message: tuple[list[tuple[str, Request]], bool]) -> tuple[list[tuple[str, Request]], bool]:
        """Give every tensor-parallel peer the first peer's message. Without peers: the message itself."""
        return message

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

    def submit(self, request: Request) -> Future[Completion]:
        """Queue a request; callable from any thread, at any time. Cancelling the future cancels the request."""
        request_id = str(self._submitted)
        self._submitted += 1
        future: Future[Completion] = Future()
        self._futures[request_id] = future
        self._inbox.put((request_id, request))
        return future

    def drive(self, futures: Sequence[Future[Completion]], deadline_s: float = 3600.0) -> None:
        """Run the loop until all of `futures` are done.

        Every tensor-parallel peer calls this; what the first peer submits is what all of them run.
        Raises PhaseError without loaded weights or while asleep, DeadlineError when the time runs out.
        """
        if not self.awake or self.version is None:
            state = "asleep" if not self.awake else "without loaded weights"
            raise PhaseError(f"the rollout engine is {state}: sync weights before sampling.")
        ends = time.monotonic() + deadline_s
        try:
            while True:
                arrived, done = self.share((self._arrived(), all(f.done() for f in futures)))
                for request_id, request in arrived:
                    self.add(request_id, request)
                if done:
                    return
                if self.busy():
                    finished = self.step()
                    if not self._stepped:
                        self._stepped, self.first_token_at = True, time.time()
                    for request_id, completion in finished:
                        self._finish(request_id, completion)
                else:
                    time.sleep(0.001)  # an environment thread is about to submit
                if time.monotonic() > ends:
                    waiting = sum(not f.done() for f in futures)
                    raise DeadlineError(f"rollout: {waiting} of {len(futures)} responses not finished "
                                        f"after {deadline_s:.0f} s.")
        except BaseException:
            self.cancel(list(self._futures))
            self._futures.clear()
            raise

    def _arrived(self) -> list[tuple[str, Request]]:
        arrived = []
        while not self._inbox.empty():
            request_id, request = self._inbox.get()
            if self._futures[request_id].cancelled():
                del self._futures[request_id]
            else:
                arrived.append((request_id, request))
        return arrived

    def _finish(self, request_id: str, completion: Completion) -> None:
        future = self._futures.pop(request_id, None)
        if future is None:
            return  # a peer: its futures live on the first rank
        try:
            future.set_result(completion)
        except InvalidStateError:
            pass  # cancelled while it ran

    def generate(self, requests: Sequence[Request], deadline_s: float = 3600.0) -> list[Completion]:
        """Completions of `requests` in order; on a tensor-parallel peer that is not the first: an empty list."""
        futures = [self.submit(request) for request in requests] if self.leads else []
        self.drive(futures, deadline_s)
        return [future.result() for future in futures]

    @property
    def leads(self) -> bool:
        """Whether this rank decides what its tensor-parallel group submits."""
        return True

    def load_weights(self, buckets: Iterable[Bucket], version: int) -> None:
        """Replace every weight and stamp what is sampled from now on with `version`.

        A load that fails leaves an engine that refuses to sample, never a mixture.
        Raises SyncError naming the weights that did not arrive.
        """
        self.version = None
        self.write_weights(buckets)
        self.version = version
