"""Make the demo's problems: sums of two three-digit numbers.

    python -m recipes.demo.make_data [folder]

writes sft.jsonl, train.jsonl and heldout.jsonl; the same bytes every time. No sum is in two of the files, not even
with its terms swapped. train and heldout have true answers. sft plays a corpus written by people who often slip:
in FORGET_FRAC of its rows the carries are forgotten, so a model fitted to it knows both ways and prefers the wrong
one. SHORT_FRAC of its rows have terms of one to three digits: without these the model takes long to find the columns.
"""

import json
import random
import sys
from pathlib import Path

SEED = 0
ROWS = {"heldout": 500, "train": 2000, "sft": 20000}
FORGET_FRAC = 0.75
SHORT_FRAC = 0.2

Pair = tuple[int, int]


def forget_carries(a: int, b: int) -> int:
    """Sum of two numbers below 1000, each column added on its own: 722 for 347 + 485, which is 832."""
    places = [place for place in (100, 10, 1) if place <= max(a, b, 1)]
    columns = [(place, a // place % 10 + b // place % 10) for place in places]
    return sum(place * (total if place == places[0] else total % 10) for place, total in columns)


def draw_problems(count: int, short_frac: float, taken: set[Pair], rng: random.Random) -> list[Pair]:
    """`count` pairs of terms that are not in `taken` in either order; adds them to it."""
    problems: list[Pair] = []
    while len(problems) < count:
        if rng.random() < short_frac:
            a, b = (rng.randrange(10 ** rng.randint(1, 3)) for _ in range(2))
        else:
            a, b = rng.randint(100, 999), rng.randint(100, 999)
        pair = (min(a, b), max(a, b))
        if pair not in taken:
            taken.add(pair)
            problems.append((a, b))
    return problems


def make_rows() -> dict[str, list[dict[str, str]]]:
    """Rows of each file by its name: prompt and answer as text."""
    rng = random.Random(SEED)
    taken: set[Pair] = set()
    rows = {}
    for name, count in ROWS.items():
        short_frac, forget_frac = (SHORT_FRAC, FORGET_FRAC) if name == "sft" else (0.0, 0.0)
        rows[name] = [
            {"prompt": f"{a}+{b}", "answer": str(forget_carries(a, b) if rng.random() < forget_frac else a + b)}
            for a, b in draw_problems(count, short_frac, taken, rng)
        ]
    return rows


def main(folder: Path) -> None:
    for name, rows in make_rows().items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{folder / name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
