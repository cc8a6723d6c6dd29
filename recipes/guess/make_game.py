"""Make what a policy needs before it learns to guess numbers: games that were played by people, and an untrained model.

    python -m recipes.guess.make_game <folder>

writes games.jsonl and the untrained model into <folder>; the same bytes every time. There are two kinds of players: in
HALVING_FRAC of the games one who halves what the hints leave, and always wins; in the others one who names any number
and forgets the hints. So a model fitted to the games knows both ways and mostly takes the wrong one. Each row is a game
up to one of its guesses, which is the response to learn.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridrl.environments import Task
from hybridrl.environments.guess import GuessNumber
from recipes.demo.make_model import make_model, make_tokenizer

SEED = 0
GAMES = 8000
HALVING_FRAC = 0.25
GAME: dict[str, Any] = {"low": 1, "high": 15, "guesses": 4}
"""The game of `experiment=demo_agent`: halving always wins."""
SHAPE = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 2}


def played_game(rng: random.Random) -> Iterator[dict[str, list[dict[str, str]]]]:
    """A row for each guess of one game."""
    game, halving = GuessNumber(**GAME), rng.random() < HALVING_FRAC
    messages = [{"role": "user", "content": str(game.reset(Task(answer=rng.randint(game.low, game.high))))}]
    done = False
    while not done:
        guess = str((game.at_least + game.at_most) // 2 if halving else rng.randint(game.low, game.high))
        messages.append({"role": "assistant", "content": guess})
        yield {"prompt": list(messages)}
        hint, _, done, _ = game.step(guess)[:4]
        messages.append({"role": "user", "content": str(hint)})


def make_rows() -> list[dict[str, list[dict[str, str]]]]:
    """The rows of GAMES games."""
    rng = random.Random(SEED)
    return [row for _ in range(GAMES) for row in played_game(rng)]


def main(folder: Path) -> None:
    tokenizer = make_tokenizer()
    make_model(len(tokenizer), **SHAPE).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = make_rows()
    (folder / "games.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"Wrote an untrained model and {len(rows)} guesses of {GAMES} games to {folder}.")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Usage: python -m recipes.guess.make_game <folder>")
    main(Path(sys.argv[1]))
