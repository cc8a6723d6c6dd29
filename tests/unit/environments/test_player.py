"""Episodes as a stage of a loop: counted, checked, evaluated."""

import math

import pytest
import torch

from hybridrl.algorithms.algorithm import Algorithm
from hybridrl.batch import make_batch, num_rows, padded, rows_of
from hybridrl.config import (
    AlgorithmConfig,
    Choice,
    EnvironmentConfig,
    RewardConfig,
    RewardFunctionConfig,
    RolloutConfig,
    validate_all,
)
from hybridrl.controller.evaluation import evaluation_metrics
from hybridrl.controller.played_rewards import add_rewards
from hybridrl.controller.player import Player
from hybridrl.errors import ConfigError, EpisodeError
from hybridrl.rewards import Rewarder
from hybridrl.workers.rollout.episode_rows import episode_batch, tasks_of
from hybridrl.workers.rollout.episodes import EpisodeRunner
from tests.unit.environments.chats import chat_tokenizer
from tests.unit.environments.engines import ScriptedEngine

NAN = math.nan
FAULTY = "tests.unit.environments.misbehaving"


class ScriptedPolicy:
    """`PolicyWorker.play` over an engine that says what it is told: `script(prompt ids, random)` gives ids."""

    def __init__(self, cfg, template="chatml", script=None):
        self.tokenizer = chat_tokenizer("characters", template)
        engine = ScriptedEngine(range(10, 40), [self.tokenizer.eos_token_id], script=script)
        self.runner = EpisodeRunner(engine, self.tokenizer,
                                    RolloutConfig(max_prompt_tokens=300, max_response_tokens=400), cfg)

    def play(self, batch, cfg, temperature=None):
        episodes = self.runner.play(tasks_of(batch, 0), list(range(num_rows(batch))), 1.0)
        return episode_batch(batch, episodes, self.runner.chat.plain)


@pytest.fixture
def played():
    """`played(cfg, batch, ...)`: the rows, and the player's metrics."""
    policies = []

    def play(cfg, batch, rewards=None, **options):
        policies.append(ScriptedPolicy(cfg, **options))
        player = Player(cfg, rewards)
        return player(policies[-1], batch), player.metrics

    yield play
    for policy in policies:
        policy.runner.close()


def says(*texts):
    """A script that writes a text by the number of turns before; of two texts the second after an observation."""
    tokenizer = chat_tokenizer("characters")

    def script(prompt, rng):
        turns = tokenizer.decode(prompt).count("assistant") - 1
        ids = tokenizer(texts[min(turns, len(texts) - 1)], add_special_tokens=False)["input_ids"]
        return [*ids, tokenizer.eos_token_id]

    return script


def scripted(**options):
    return EnvironmentConfig(name=f"{FAULTY}:Scripted", **options)


def test_episodes_are_counted_by_how_they_ended(played):
    tasks = [{"turns": 1}, {"turns": 9}, {"turns": 2, "where": "step", "fault": "raise", "at": 2},
             {"where": "reset", "fault": "die"}]
    batch, metrics = played(scripted(max_turns=3), make_batch(task=tasks, group_ids=[0, 0, 1, 1]), script=says("1"))
    assert metrics == {"episodes/played": 4, "episodes/rows": 4, "episodes/failed": 2, "episodes/failed_died": 1,
                       "episodes/failed_raised": 1, "episodes/done": 1, "episodes/max_turns": 1,
                       "episodes/turns_mean": 2.0, "episodes/turn_tokens_mean": 2.0,
                       "episodes/info/count": (1 + 1 + 2 + 3) / 4}
    rewards = batch["rewards"].tolist()
    assert rewards[:2] == [1.5, 4.5] and all(map(math.isnan, rewards[2:]))
    assert [len(ids) > 0 for ids in batch["response_ids"].unbind()] == [True, True, True, False]


def test_failed_episodes_are_left_out_of_their_group_and_of_the_loss(played):
    tasks = [{"turns": 1}, {"turns": 2}, {"where": "verify", "fault": "raise"}, {"where": "reset", "fault": "raise"}]
    batch, _ = played(scripted(min_success_frac=0.5), make_batch(task=tasks, group_ids=[0] * 4), script=says("1"))
    batch["old_log_probs"] = batch["rollout_log_probs"]
    algorithm = Algorithm(AlgorithmConfig(responses_per_prompt=4), 400)
    batch = algorithm.shape(batch)
    advantages = padded(algorithm.advantages(batch))
    # rewards 1.5 and 3.0: mean 2.25, standard deviation 1.06066
    assert advantages[0].max() == 0 and advantages[0].min() == pytest.approx(-0.7071, abs=1e-4)
    assert advantages[1].max() == pytest.approx(0.7071, abs=1e-4)
    assert advantages[2:].abs().sum() == 0
    assert padded(batch["response_mask"]).any(1).tolist() == [True, True, False, False]
    (mini_batch,) = algorithm.mini_batches(batch)
    weights = padded(mini_batch["loss_weights"])
    assert weights[padded(batch["response_mask"])].sum() == pytest.approx(1.0)


def test_a_trajectory_of_several_rows_counts_once(played):
    """Two episodes, one of two turns whose template merges turns: three rows, two trajectories in the statistics."""
    tasks = [{"turns": 1}, {"turns": 2}]
    batch, metrics = played(scripted(), make_batch(task=tasks, group_ids=[0, 0]), script=says("1"), template="merging")
    assert metrics["episodes/rows"] == 3 and metrics["episodes/played"] == 2
    assert batch["rewards"].tolist() == [1.5, 3.0, 3.0]
    assert padded(batch["token_rewards"]).sum(1).tolist() == [1.5, 0.5, 2.5]
    advantages = Algorithm(AlgorithmConfig(responses_per_prompt=2), 400).advantages(batch)
    expected = torch.tensor([-0.7071, 0.7071, 0.7071])
    values = torch.stack([row[row.abs().argmax()] for row in padded(advantages)])
    torch.testing.assert_close(values, expected, atol=1e-4, rtol=0)
    assert evaluation_metrics(batch)["accuracy"] == pytest.approx((1.5 + 3) / 2)


def test_a_task_has_its_rows_seed_or_one_of_its_group():
    rows = [{"seed": 7}, {"seed": 7}, {}, None, {"seed": -1}, {"seed": "x"}]
    tasks = tasks_of(make_batch(task=rows, group_ids=[0, 1, 2, 2, 3, 2**31]), seed=5)
    assert [task.seed for task in tasks] == [7, 7, 5 * 2**32 + 2, 5 * 2**32 + 2, 5 * 2**32 + 3, 5 * 2**32 + 2**31]


def test_turn_rewards_reach_turn_level_advantages(played):
    batch, _ = played(scripted(), make_batch(task=[{"turns": 2}], group_ids=[0]), script=says("1"))
    algorithm = Algorithm(AlgorithmConfig(advantage=Choice(name="turn_level", options={"baseline": "none"})), 400)
    advantages, turns = padded(algorithm.advantages(batch))[0], batch["turns"][0]
    # 0.5 each turn, 2 from verify at the end: 3.0 from the first turn on, 2.5 from the second
    assert [float(advantages[turn["start"]]) for turn in turns] == [3.0, 2.5]
    assert [turn["reward"] for turn in turns] == [0.5, 2.5]
    rewards = padded(batch["token_rewards"])[0]
    assert {i: float(rewards[i]) for i in rewards.nonzero().flatten().tolist()} == {
        turns[0]["stop"] - 1: 0.5, turns[1]["stop"] - 1: 2.5}
    assert turns[0]["stop"] - turns[0]["start"] == 2


@pytest.mark.parametrize(("failing", "least", "stops"), [
    (2, 0.5, False), (3, 0.5, True), (3, 0.25, False), (4, 0.0, True), (1, 1.0, True), (0, 1.0, False)])
def test_too_many_failures_are_one_clear_error(played, failing, least, stops):
    tasks = [{"where": "step", "fault": "raise"}] * failing + [{}] * (4 - failing)
    batch = make_batch(task=tasks, group_ids=[0] * 4)
    if not stops:
        _, metrics = played(scripted(min_success_frac=least), batch)
        assert metrics["episodes/failed"] == failing
        return
    with pytest.raises(EpisodeError, match=rf"{failing} of 4 episodes failed \({failing} raised\), "
                                           r"environment.min_success_frac=\S+ must succeed; the first: raised: step: "
                                           r"ValueError: asked to raise \(misbehaving.py"):
        played(scripted(min_success_frac=least), batch)


def test_a_guessing_game_is_won_by_halving(played):
    """7 wins against 4 in the first guess after 'higher'; with one guess only, nobody wins."""
    cfg = EnvironmentConfig(name="guess", options={"low": 1, "high": 7, "guesses": 2, "hint_reward": 0.25})
    batch, metrics = played(cfg, make_batch(answer=["7", "2", "4"], group_ids=[0, 1, 2]), script=says("4", "is it 7"))
    assert batch["rewards"].tolist() == [1.5, 0.25, 1.25]
    assert [[turn["action"] for turn in turns] for turns in batch["turns"]] == [["4", "is it 7"]] * 2 + [["4"]]
    assert batch["turns"][0][1]["observation"] == [{"role": "user", "content": "higher"}]
    assert batch["turns"][1][1]["state"] == {"hidden": 2, "from": 1, "to": 3, "left": 0}
    assert metrics["episodes/info/sensible"] == pytest.approx(4 / 5)
    found = evaluation_metrics(batch)
    assert {name: value for name, value in found.items() if "_" not in name} == {
        "accuracy": pytest.approx((1.5 + 0.25 + 1.25) / 3), "pass@1": pytest.approx(2 / 3), "problems": 3,
        "responses": 3, "unscored": 0}


def test_groups_play_the_same_task_and_numbers_of_episodes_go_on(played):
    cfg = EnvironmentConfig(name="guess", options={"high": 1000})
    policy, play = ScriptedPolicy(cfg, script=says("1")), Player(cfg)
    try:
        first, second = (play(policy, make_batch(group_ids=[5, 5, 6, 6])) for _ in range(2))
    finally:
        policy.runner.close()
    hidden = [turns[0]["state"]["hidden"] for turns in first["turns"]]
    assert hidden[0] == hidden[1] != hidden[2] == hidden[3]
    assert hidden == [turns[0]["state"]["hidden"] for turns in second["turns"]]
    assert first["episode_ids"].tolist() + second["episode_ids"].tolist() == list(range(8))


@pytest.mark.parametrize(("options", "said"), [
    ({"max_turns": 0}, "environment.max_turns must be at least 1, got 0"),
    ({"turn_timeout_s": 0.0}, "environment.turn_timeout_s must be positive"),
    ({"min_success_frac": 1.5}, "environment.min_success_frac must be from 0 to 1"),
    ({"chat_template": False, "system_prompt": "hi"}, "empty with chat_template=false")])
def test_options_out_of_range(options, said):
    with pytest.raises(ConfigError, match=said):
        validate_all(EnvironmentConfig(name="guess", **options), "environment")


# Rewards on top


SHOWN = "tests.unit.environments.scoring:shown"


def test_functions_score_what_trajectories_came_to(played):
    """Of two turns (3.0 of the environment), of one (1.5), without an answer to compare with, and one that failed."""
    functions = [RewardFunctionConfig(name="numeric", weight=10.0), RewardFunctionConfig(name=SHOWN, weight=0.001)]
    tasks = [{"turns": 2}, {"turns": 1}, {"turns": 1}, {"where": "reset", "fault": "raise"}]
    batch = make_batch(task=tasks, answer=["12", "12", None, "1"], group_ids=[0] * 4)
    with Rewarder(RewardConfig(functions=functions, workers=1)) as rewards:
        batch, metrics = played(scripted(), batch, rewards, script=says("1", "12"))
    # before the last action: begin, 1, turn 1; only begin
    assert batch["rewards"].tolist() == pytest.approx([3 + 10 + 0.302, 1.5 + 0 + 0.101, NAN, NAN], nan_ok=True)
    torch.testing.assert_close(batch["reward_components"], torch.tensor(
        [[3, 1, 302], [1.5, 0, 101], [NAN] * 3, [NAN] * 3]), equal_nan=True)
    assert "no reference answer" in batch["reward_error"][2] and batch["reward_error"][3].startswith("raised: reset")
    assert batch["reward/environment"][:2].tolist() == [3, 1.5] and batch["reward/shown"][:2].tolist() == [302, 101]
    assert (metrics["reward/environment"], metrics["reward/numeric"], metrics["reward/failed"]) == (2.25, 0.5, 1)
    assert (metrics["episodes/failed"], metrics["episodes/done"]) == (1, 3)
    tokens, turns = rows_of(batch["token_rewards"]), batch["turns"][0]
    assert tokens[0].nonzero().flatten().tolist() == [turn["stop"] - 1 for turn in turns]
    assert tokens[0][turns[0]["stop"] - 1] == 0.5 and tokens[0].sum() == pytest.approx(13.302)
    assert tokens[2].isnan().all()


def test_a_trajectory_of_several_rows_is_scored_once(played):
    """The template merges turns: its second turn is a row of its own, and the whole of it was said before."""
    batch = make_batch(task=[{"turns": 2}], prompt=["p"], group_ids=[0])
    with Rewarder(RewardConfig(functions=[RewardFunctionConfig(name=SHOWN)], workers=1)) as rewards:
        batch, _ = played(scripted(), batch, rewards, script=says("1"), template="merging")
    assert num_rows(batch) == 2 and batch["rewards"].tolist() == [304, 304]
    sums = [float(row.sum()) for row in rows_of(batch["token_rewards"])]
    assert sums == [0.5, 303.5]


def test_an_environment_that_shows_the_rows_prompt(played):
    batch = make_batch(prompt=["p"], answer=["1"], task=[{}], group_ids=[0])
    cfg = EnvironmentConfig(name="verifier", options={"function": "numeric"})
    with Rewarder(RewardConfig(functions=[RewardFunctionConfig(name=SHOWN)], workers=1)) as rewards:
        batch, _ = played(cfg, batch, rewards, script=says("1"))
    assert batch["rewards"].tolist() == [1 + 101]


def test_nothing_is_scored_where_every_episode_failed():
    failed = make_batch(trajectory_ids=[0], turns=[[]], rewards=[NAN], token_rewards=[[NAN]], reward_error=["died: x"],
                        response_ids=[[1]], response=[""], prompt=["p"])
    with Rewarder(RewardConfig(functions=[RewardFunctionConfig(name=SHOWN)])) as rewards:
        assert add_rewards(failed, rewards)["reward_error"][0] == "died: x"
