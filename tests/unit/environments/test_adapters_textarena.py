"""Games of TextArena, by scripted players and by an engine."""

import random
import sys

import pytest

from hybridrl.batch import make_batch, num_rows
from hybridrl.config import EnvironmentConfig, RolloutConfig
from hybridrl.controller.player import Player
from hybridrl.environments import Task
from hybridrl.environments.adapters.textarena import TextArena
from hybridrl.environments.binding import bind
from hybridrl.errors import ConfigError
from hybridrl.workers.rollout.episode_rows import episode_batch, tasks_of
from hybridrl.workers.rollout.episodes import EpisodeRunner
from tests.unit.environments.chats import chat_tokenizer
from tests.unit.environments.engines import ScriptedEngine
from tests.unit.environments.playing import episodes, said

TIC_TAC_TOE = {"game": "TicTacToe-v0", "players": 2}


def test_two_players_finish_a_game():
    """Player 0 takes the left column: 0, 3, 6; player 1 first tries a square that is taken."""
    ((replies, end),) = episodes("textarena", TIC_TAC_TOE, ["[0]", "[0]", "4", "<think>[1]</think>[3]", "[8]", "[6]"])
    assert [reply.agent for reply in replies[:-1]] == ["player 0", "player 1", "player 1", "player 0", "player 1",
                                                       "player 0"]
    assert end == {"player 0": 1.0, "player 1": -1.0} and replies[-1].done
    assert [reply.info.get("refused") for reply in replies] == [None, 0, 1, 0, 0, 0, 0]
    assert replies[-1].info["reason"] == "Player 0 has won!"
    assert said(replies[0]).startswith("You are Player 0 in Tic Tac Toe.")
    assert said(replies[1]).startswith("You are Player 1 in Tic Tac Toe.") and "[Player 0] [0]" in said(replies[1])
    assert "cell 0 is already occupied" in said(replies[2])
    board = " O | 1 | 2 \n---+---+---\n 3 | X | 5 \n---+---+---\n 6 | 7 | 8 "
    assert said(replies[3]).count("Current Board") == 1 and board in said(replies[3])
    assert "You are Player" not in said(replies[3]) and "[Player 0]" not in said(replies[3])
    assert "think" not in said(replies[4]) and "[Player 0] [3]" in said(replies[4])


def test_a_player_that_insists_on_an_invalid_move_loses():
    ((replies, end),) = episodes("textarena", TIC_TAC_TOE, ["[4]", "what?", "[4]"])
    assert end == {"player 0": 1.0, "player 1": -1.0}
    assert [reply.info["refused"] for reply in replies[1:]] == [0, 1, 1]


def test_a_single_player_guesses_a_hidden_number():
    """The hints bisect 1 to 20: won after at most 5 guesses, reward 1."""
    def guess(reply):
        nonlocal low, high
        text = said(reply)
        low, high = (last + 1, high) if "higher." in text else (low, last - 1) if "lower." in text else (low, high)
        return f"[{middle()}]"

    def middle():
        nonlocal last
        last = (low + high) // 2
        return last

    low, high, last = 1, 20, 0
    ((replies, end),) = episodes("textarena", {"game": "GuessTheNumber-v0"}, [guess] * 5)
    assert end == {"agent": 1.0} and replies[-1].done and {reply.agent for reply in replies} == {"agent"}


def test_checking_options_draws_no_random_numbers():
    random.seed(3)
    expected = random.Random(3).random()
    bind("textarena", TIC_TAC_TOE)
    assert random.random() == expected


def test_kinds_of_messages_may_be_names():
    first = bind("textarena", {"game": "Countdown-v0"}).build().reset(Task(seed=1))
    assert first.agent == "agent" and "532" in first.observation


def test_a_game_that_is_cut_has_no_rewards():
    assert [end for _, end in episodes("textarena", TIC_TAC_TOE, ["[4]"], [])] == [{}, {}]


def test_the_seed_deals_the_cards():
    options = {"game": "KuhnPoker-v0", "players": 2, "make": {"max_rounds": 1}}
    tasks = [Task(prompt="play", seed=seed) for seed in (7, 7, *range(12))]
    played = episodes("textarena", options, *[["[bet]", "[call]"]] * 14, tasks=tasks)
    assert played[0] == played[1]
    hands = set()
    for replies, end in played:
        cards = {replies[i].agent: said(replies[i]).partition("Your card is: '")[2][0] for i in (0, 1)}
        winner = max(cards, key=lambda player: "JQK".index(cards[player]))
        assert end == {player: 1.0 if player == winner else -1.0 for player in cards}
        hands.add(tuple(sorted(cards.items())))
    assert len(hands) > 3


def test_self_play_by_an_engine_gives_each_player_rows_of_its_own():
    """Player 0 always takes the first free square and player 1 the last: 0 8 1 7 2 wins for player 0."""
    tokenizer = chat_tokenizer("bytes")

    def script(prompt, rng):
        free = tokenizer.decode(prompt).rpartition("Available Moves: ")[2].partition("<|im_end|>")[0].split(", ")
        first = "As Player 0" in tokenizer.decode(prompt)
        return [*tokenizer(free[0 if first else -1].strip("'"), add_special_tokens=False)["input_ids"],
                tokenizer.eos_token_id]

    cfg = EnvironmentConfig(name="textarena", options=TIC_TAC_TOE)
    runner = EpisodeRunner(ScriptedEngine(range(10, 40), [tokenizer.eos_token_id], script=script), tokenizer,
                           RolloutConfig(max_prompt_tokens=3000, max_response_tokens=3000), cfg)

    class Policy:
        def play(self, batch, cfg, temperature=None):
            played = runner.play(tasks_of(batch, 0), list(range(num_rows(batch))), 1.0)
            return episode_batch(batch, played, runner.chat.plain)

    try:
        player = Player(cfg)
        batch = player(Policy(), make_batch(group_ids=[4, 4, 5]))
    finally:
        runner.close()
    assert player.metrics["episodes/played"] == 3 and player.metrics["episodes/failed"] == 0
    assert list(batch["agent"]) == ["player 0", "player 1"] * 3
    assert batch["group_ids"].tolist() == [4, 4, 4, 4, 5, 5] and len(set(batch["trajectory_ids"].tolist())) == 6
    assert batch["rewards"].tolist() == [1.0, -1.0] * 3
    moves = [[turn["action"] for turn in turns] for turns in batch["turns"]]
    assert moves == [["[0]", "[1]", "[2]"], ["[8]", "[7]"]] * 3


@pytest.mark.parametrize(("options", "message"), [
    ({"game": "TicTacTo-v0"}, "Unknown TextArena game 'TicTacTo-v0'. Did you mean TicTacToe-v0"),
    ({"game": "TicTacToe-v0"}, "can't begin TicTacToe-v0 with players=1 .*has to be 2, received 1"),
    (TIC_TAC_TOE | {"make": {"size": 4}}, "can't begin TicTacToe-v0 .*'size'"),
    ({"game": "Hangman-v0"}, "can't begin Hangman-v0 .*Resource .*words.* not found"), ({}, "needs 'game'")])
def test_what_can_not_be_played_is_refused(options, message, monkeypatch):
    monkeypatch.setattr("nltk.data.path", [])
    with pytest.raises(ConfigError, match=message):
        bind("textarena", options)


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena.envs.registration", None)
    with pytest.raises(ConfigError, match=r'environment.name=textarena needs .* pip install "hybridrl\[textarena\]"'):
        TextArena.check_options("TicTacToe-v0", 2)
