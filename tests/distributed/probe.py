"""A policy worker whose engines tests can reach into."""

from typing import Any

import torch
from tensordict import TensorDict

from hybridrl.algorithms.aggregation import aggregate
from hybridrl.batch import rows_of
from hybridrl.dispatch import to_all
from hybridrl.workers.policy import Phase, PolicyWorker
from hybridrl.workers.rollout.engine import Request
from hybridrl.workers.weights.buckets import full_buckets
from hybridrl.workers.weights.names import checkpoint_buckets
from hybridrl.workers.weights.sync import fingerprint_ids, largest_gap, training_log_probs


def plain_loss(log_probs, columns, entropies):
    """-sum(loss_weights * advantages * log_probs)."""
    weighted = -columns["advantages"] * log_probs
    return aggregate(weighted, columns["loss_weights"], columns["response_mask"]), {}


class ProbeWorker(PolicyWorker):
    @to_all
    def gap(self) -> float:
        """Log-prob gap of the engines as they are, without moving to another phase."""
        ids = fingerprint_ids(24, len(self.tokenizer))
        return largest_gap(self.rollout.score(ids), training_log_probs(self.training, ids))

    @to_all
    def scale_weights(self, factor: float) -> None:
        """Change every weight behind the worker's back."""
        with torch.no_grad():
            for _, weight in self.training.weights():
                weight.to_local().mul_(factor)
        self.changed = True

    @to_all
    def load_without(self, part: str) -> str:
        """A sync from which every weight with `part` in its name is missing; returns the error."""
        buckets = checkpoint_buckets(self.training.model.causal_lm,
                                     full_buckets(self.training.weights(), self.dtype, 1 << 20))
        kept = ([(name, weight) for name, weight in bucket if part not in name] for bucket in buckets)
        try:
            self.rollout.load_weights(kept, 99)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    @to_all
    def generate_across_a_sync(self, batch: TensorDict, tokens: int, before: int) -> Any:
        """Sample; after `before` engine steps change all weights and sync; return (ids, log-probs, versions) by row."""
        self._enter(Phase.ROLLOUT)
        requests = [Request(ids.tolist(), tokens, 1.0, seed)
                    for ids, seed in zip(rows_of(batch["prompt_ids"]), batch["seeds"].tolist(), strict=True)]
        futures = [self.rollout.submit(request) for request in requests] if self.rollout.leads else []
        steps, step = 0, self.rollout.step

        def counted():
            nonlocal steps
            steps += 1
            if steps == before + 1:
                with torch.no_grad():
                    for _, weight in self.training.weights():
                        weight.to_local().mul_(1.1)
                self.changed = True
                self._sync()
            return step()

        self.rollout.step = counted
        try:
            self.rollout.drive(futures)
        finally:
            self.rollout.step = step
        return [(c.token_ids, c.log_probs, c.versions) for c in (future.result() for future in futures)]

    @to_all
    def offered_later(self, first: list[int], second: list[int]) -> Any:
        """Submit a second request only once the first has begun: (both responses, steps taken)."""
        self._enter(Phase.ROLLOUT)
        step, steps, late = self.rollout.step, 0, []

        def counted():
            nonlocal steps
            steps += 1
            if steps == 3 and self.rollout.leads:
                late.append(self.rollout.submit(Request(second, 6, 1.0, 2)))
                futures.append(late[0])
            return step()

        futures = [self.rollout.submit(Request(first, 12, 1.0, 1))] if self.rollout.leads else []
        self.rollout.step = counted
        try:
            self.rollout.drive(futures)
        finally:
            self.rollout.step = step
        return [future.result().token_ids for future in futures], steps
