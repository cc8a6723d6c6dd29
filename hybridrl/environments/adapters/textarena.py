"""Games of TextArena for one or more players, all played by the policy. Source: Guertler et al., arXiv:2504.11442."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

from hybridrl.environments.environment import AGENT, Environment, Rewards, Step, Task, Trajectory
from hybridrl.errors import ConfigError, extra, unknown

KEY = "environment.options"


class TextArena(Environment):
    """Plays a game with `players` agents, `player 0`, `player 1` and so on; the only one is called `agent`.

    Each agent is shown what the game and the others said since its last turn, of several boards the last; its own
    turns are in its conversation already. The others don't see what it wrote before `</think>`. The rewards are those
    of the game, at its end; a game that `environment.max_turns` cut has none: 0 for everybody. The game is built anew
    for each episode, and what it draws comes from the task's seed.

    Args:
        game: registered name, for instance `TicTacToe-v0`.
        players: how many play.
        make: keyword arguments of `textarena.make`.
    """

    def __init__(self, game: str, players: int = 1, make: dict[str, Any] | None = None):
        self._arguments, self._players = (game, make or {}), players

    @staticmethod
    def check_options(game: str, players: int = 1, make: dict[str, Any] | None = None) -> None:
        """Begin a game. Raises ConfigError when the game does not exist or refuses the options."""
        with extra("textarena", "environment.name=textarena"):
            from textarena.envs.registration import ENV_REGISTRY
        if game not in ENV_REGISTRY:
            raise ConfigError(f"{KEY}.game: " + unknown("TextArena game", game, ENV_REGISTRY))
        drawn = random.getstate()  # games seed the generator of the whole process
        try:
            _made(game, make or {}).reset(num_players=players, seed=0)
        except Exception as error:  # games raise any kind for options that they don't know
            said = " ".join(str(error).replace("*", "").split())[:300]
            raise ConfigError(f"{KEY}: TextArena can't begin {game} with players={players} and make={make or {}}: "
                              f"{type(error).__name__}: {said}") from error
        finally:
            random.setstate(drawn)

    def reset(self, task: Task) -> Step:
        game, make = self._arguments
        self._game = _made(game, make)
        self._game.reset(num_players=self._players, seed=task.seed)
        return self._next()

    def step(self, action: str) -> Step:
        actor = self._game.state.current_player_id
        done, _ = self._game.step(action=str(action).rpartition("</think>")[2].strip())
        state = self._game.state
        refused = state.game_info[actor].get("invalid_move") or getattr(state, "error_count", 0) > 0
        info = {"refused": int(bool(refused))}
        if not done:
            return self._next()._replace(info=info)
        reason = state.game_info[actor].get("reason")
        return Step(done=True, info=info | ({"reason": str(reason)[:200]} if reason else {}))

    def state(self) -> dict[str, Any]:
        return {"turn": self._game.state.turn, "next": self._agent(self._game.state.current_player_id)}

    def verify(self, trajectory: Trajectory) -> Rewards:
        rewards = self._game.state.rewards if self._game.state.done else None
        return {self._agent(player): float(reward) for player, reward in (rewards or {}).items()}

    def _next(self) -> Step:
        """Who acts next, and what was said since that player's last turn."""
        player, messages = self._game.get_observation()
        others = [(sender, text, getattr(kind, "name", kind))  # some games give the name itself
                  for sender, text, kind in messages or [] if sender != player]
        boards = [i for i, (*_, kind) in enumerate(others) if kind == "GAME_BOARD"]
        roles = self._game.state.role_mapping
        said = [text if kind == "PROMPT" else f"[{roles.get(sender, f'Player {sender}')}] {text}"
                for i, (sender, text, kind) in enumerate(others) if i not in boards[:-1]]
        return Step("\n".join(said) or "Your turn.", agent=self._agent(player))

    def _agent(self, player: int) -> str:
        return AGENT if self._players == 1 else f"player {player}"


def _made(game: str, options: dict[str, Any]) -> Any:
    """A game without the wrappers that repeat the whole history in each observation: a conversation holds it."""
    import textarena

    with _nothing_fetched():
        made = textarena.make(game, **options)
    wrappers = []
    while isinstance(made, textarena.Wrapper):
        wrappers.append(type(made))
        made = made.env
    for wrapper in reversed(wrappers):
        if issubclass(wrapper, textarena.ActionWrapper):
            made = wrapper(made)
    return made


@contextlib.contextmanager
def _nothing_fetched() -> Iterator[None]:
    """Some games download word lists when they are made; a list that is missing is an error of its own."""
    import nltk

    download, nltk.download = nltk.download, lambda *names, **options: False
    try:
        yield
    finally:
        nltk.download = download
