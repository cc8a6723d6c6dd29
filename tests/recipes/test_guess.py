"""The games that the guessing demo starts from."""

import random

from recipes.guess.make_game import GAME, played_game


def test_players_keep_the_rules_and_one_in_four_halves():
    """Every row is the game up to one more guess; every hint is right; the game ends on a hit or the last guess."""
    rng, low, high, halved, won = random.Random(1), GAME["low"], GAME["high"], 0, 0
    for _ in range(2000):
        rows = [row["prompt"] for row in played_game(rng)]
        game, left, halving = rows[-1], range(low, high + 1), True
        assert rows == [game[:2 * i + 2] for i in range(len(rows))]
        assert game[0] == {"role": "user", "content": "Guess 1 to 15."}
        for said, heard in zip(game[1::2], [*game[2::2], None], strict=True):
            guess = int(said["content"])
            assert said["role"] == "assistant" and low <= guess <= high
            halving &= guess in left and guess == sorted(left)[len(left) // 2]
            if heard is None:
                assert len(rows) == GAME["guesses"] or guess in left
            else:
                left = [n for n in left if (n > guess) == (heard["content"] == "higher") and n != guess]
                assert left and heard["role"] == "user" and heard["content"] in ("higher", "lower")
        halved, won = halved + halving, won + (halving and guess in left)
    assert 0.22 < halved / 2000 < 0.35  # one in four, and whoever names 8 at once by luck
    assert won == halved, "halving always wins"
