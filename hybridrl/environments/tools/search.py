"""A search engine over a small local corpus: BM25 in memory."""

import collections
import json
import math
import re
from pathlib import Path

_WORD = re.compile(r"\w+")
SATURATION, LENGTH_WEIGHT = 1.2, 0.75
"""BM25's k1 and b."""


class Search:
    """Finds passages by their words.

        score(d) = sum over words w of the query of idf(w) f (k1 + 1) / (f + k1 (1 - b + b |d| / mean |d|))

    with f the count of w in d, n documents, n_w of them with w, and idf(w) = log(1 + (n - n_w + 0.5) / (n_w + 0.5)).

    Args:
        corpus: a file; `.jsonl` has a document a line, an object with `text` and maybe `title`; in any other file
            a blank line ends a document.
        top: most documents to show.
    Raises:
        ValueError: the file can't be read, has no documents or lines that are none.
    Source: Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond (2009), section 3.
    """

    def __init__(self, corpus: str, top: int = 3):
        if top < 1:
            raise ValueError(f"top must be at least 1, got {top}")
        self._top, self._documents = top, _documents(Path(corpus))
        self._counts = [collections.Counter(_words(text)) for text in self._documents]
        self._lengths = [sum(counts.values()) for counts in self._counts]
        self._mean = max(sum(self._lengths) / len(self._lengths), 1)
        self._with_word = collections.Counter(word for counts in self._counts for word in counts)

    def __call__(self, query: str) -> str:
        """
        Search a collection of texts; returns the passages that fit best.

        Args:
            query: words to look for
        """
        words = set(_words(query))
        scores = [self._score(words, i) for i in range(len(self._documents))]
        best = sorted((i for i, score in enumerate(scores) if score > 0), key=lambda i: -scores[i])[:self._top]
        return "\n\n".join(f"[{rank}] {self._documents[i]}" for rank, i in enumerate(best, 1)) or "Nothing was found."

    def _score(self, words: set[str], i: int) -> float:
        score = 0.0
        for word in words & self._counts[i].keys():
            count, seen = self._counts[i][word], self._with_word[word]
            idf = math.log(1 + (len(self._documents) - seen + 0.5) / (seen + 0.5))
            length = 1 - LENGTH_WEIGHT + LENGTH_WEIGHT * self._lengths[i] / self._mean
            score += idf * count * (SATURATION + 1) / (count + SATURATION * length)
        return score


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _documents(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"corpus {str(path)!r} can't be read: {error}") from error
    if path.suffix == ".jsonl":
        found = [_document(path, i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    else:
        found = [piece.strip() for piece in re.split(r"\n\s*\n", text) if piece.strip()]
    if not found:
        raise ValueError(f"corpus {str(path)!r} has no documents")
    return found


def _document(path: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
        return f"{row['title']}: {row['text']}" if "title" in row else str(row["text"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"line {number} of corpus {str(path)!r} must be an object with text, "
                         f"got {line[:80]!r}") from None
