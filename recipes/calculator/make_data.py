"""Make problems for a small model with a calculator: products of two numbers, each after examples of tool calls.

    python -m recipes.calculator.make_data [folder]

writes train.jsonl and heldout.jsonl; the same bytes every time. No product is in both.
"""

import json
import random
import sys
from pathlib import Path

from hybridrl.environments.tools.calculator import calculator

SEED = 0
ROWS = {"heldout": 64, "train": 200}
SYSTEM = "You have a calculator. Use it for every question, then answer with its result."
EXAMPLES = ("52 * 317", "84 * 906", "37 * 125")
"""What the model is shown before its own problem; no row asks for one of these."""


def question(product: str) -> dict[str, str]:
    """The user's message."""
    return {"role": "user", "content": f"What is {product}?"}


def shown(product: str) -> list[dict[str, str]]:
    """A question, and how it is answered with the tool."""
    call = {"name": "calculator", "arguments": {"expression": product}}
    result = calculator(product)
    return [question(product), {"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"},
            {"role": "tool", "content": result}, {"role": "assistant", "content": result}]


def make_rows() -> dict[str, list[dict[str, object]]]:
    """Rows of each file by its name: a conversation that ends with the question, and the answer."""
    rng, taken = random.Random(SEED), set(EXAMPLES)
    start = [{"role": "system", "content": SYSTEM}, *(message for product in EXAMPLES for message in shown(product))]
    rows: dict[str, list[dict[str, object]]] = {name: [] for name in ROWS}
    for name, count in ROWS.items():
        while len(rows[name]) < count:
            a, b = rng.randint(11, 99), rng.randint(101, 999)
            if f"{a} * {b}" not in taken:
                taken.add(f"{a} * {b}")
                rows[name].append({"prompt": [*start, question(f"{a} * {b}")], "answer": str(a * b)})
    return rows


def main(folder: Path) -> None:
    for name, rows in make_rows().items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{folder / name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
