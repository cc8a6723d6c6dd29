"""Scores by content, so that equal responses to one problem are scored once."""

import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hybridrl.rewards.pool import Outcome

Key = bytes | None
"""Of a row's content; None is like no other."""


def content_key(values: Iterable[Any]) -> Key:
    """A digest of values, in which order, type and nesting count; None when one can't be pickled."""
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        try:
            part = pickle.dumps(value)
        except Exception:  # pickling runs methods of whatever the value holds
            return None
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


class ScoreCache:
    """The scores of up to `size` contents; those that were not met for longest go first. Failures are not held.

    Rows are described by their keys, see `content_key`.
    """

    def __init__(self, size: int):
        self.size = size
        self._held: OrderedDict[Key, list[float]] = OrderedDict()

    def unknown(self, keys: Sequence[Key]) -> list[int]:
        """The rows to score: the first of each content that is not held."""
        first = {key: row for row, key in reversed(list(enumerate(keys)))}
        return [row for row, key in enumerate(keys) if key is None or key not in self._held and first[key] == row]

    def complete(self, keys: Sequence[Key], scored: Mapping[int, Outcome]) -> list[Outcome | None]:
        """An outcome of every row, from those of the scored rows, whose good ones are held from here on.

        None for a row whose content is not held and failed in another row.
        """
        known: dict[Key, list[float]] = {}
        for key in dict.fromkeys(keys):
            if key in self._held:
                self._held.move_to_end(key)
                known[key] = self._held[key]
        for row, outcome in scored.items():
            if keys[row] is not None and not outcome.error:
                known[keys[row]] = outcome.scores
                self._hold(keys[row], outcome.scores)
        return [scored[row] if row in scored else Outcome(list(known[key])) if key in known else None
                for row, key in enumerate(keys)]

    def _hold(self, key: Key, scores: list[float]) -> None:
        self._held[key] = list(scores)
        if len(self._held) > self.size:
            self._held.popitem(last=False)
