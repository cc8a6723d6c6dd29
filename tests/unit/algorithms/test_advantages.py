"""Every estimator against loops in plain Python, and its edge cases."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.algorithms import (
    AgentBaselines,
    MovingBaseline,
    compute_advantages,
    fold_rewards,
    kl_in_reward,
    mean_return,
    place_outcome,
    turn_ids,
    whiten,
)
from hybridrl.errors import BatchError
from tests.unit.algorithms import reference
from tests.unit.algorithms.cases import batches, make_columns

QUICK = settings(max_examples=25)


def same(got, expected):
    torch.testing.assert_close(got.double(), expected, atol=1e-9, rtol=1e-9)


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


def only(columns, *names):
    return {name: columns[name] for name in ("mask", *names)}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {}),
        ("grpo", {"std": "batch"}),
        ("grpo", {"std": "none"}),
        ("dr_grpo", {}),
        ("rloo", {}),
        ("opo", {}),
        ("gpg", {"scale": 2.0}),
        ("pass_at_k_marginal", {}),
    ],
)
@QUICK
@given(columns=batches)
def test_group_estimators(name, options, columns):
    given = only(columns, "rewards", "group_ids")
    expected = reference.group_scalars(columns, name, **options)
    same(compute_advantages(name, given, options).advantages, reference.spread(expected, columns["mask"]))


@QUICK
@given(columns=batches)
def test_maxrl(columns):
    columns["rewards"] = columns["rewards"].abs()
    expected = reference.group_scalars(columns, "maxrl")
    got = compute_advantages("maxrl", only(columns, "rewards", "group_ids")).advantages
    same(got, reference.spread(expected, columns["mask"]))


@settings(max_examples=40)
@given(seed=st.integers(0, 1000), sizes=st.lists(st.integers(3, 7), min_size=1, max_size=3), k=st.integers(1, 3))
def test_pass_at_k_is_the_mean_over_subsets(seed, sizes, k):
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(sizes)])
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(ids), generator=g)
    columns = {
        "group_ids": ids[order],
        "rewards": torch.randint(0, 2, (len(ids),), generator=g).double(),
        "mask": torch.ones(len(ids), 2, dtype=torch.bool),
    }
    expected = reference.group_scalars(columns, "pass_at_k", k=k)
    got = compute_advantages("pass_at_k", columns, {"k": k}).advantages
    torch.testing.assert_close(got, reference.spread(expected, columns["mask"]), atol=1e-9, rtol=1e-9)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(3, 6), min_size=1, max_size=3),
    k=st.integers(1, 3),
    baseline=st.sampled_from(["subset", "none"]),
    ties=st.booleans(),
)
def test_max_at_k_is_a_sum_over_subsets(seed, sizes, k, baseline, ties):
    g = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(sizes)])
    ids = ids[torch.randperm(len(ids), generator=g)]
    rewards = torch.randn(len(ids), generator=g, dtype=torch.float64)
    columns = {
        "group_ids": ids,
        "rewards": rewards.round() if ties else rewards,
        "mask": torch.ones(len(ids), 2, dtype=torch.bool),
    }
    expected = []
    for row in range(len(ids)):
        peers = reference.members(columns, row)
        group = columns["rewards"][peers].tolist()
        expected.append(reference.subset_max_at_k(group, peers.index(row), k, baseline == "subset"))
    got = compute_advantages("max_at_k", columns, {"k": k, "baseline": baseline}).advantages
    torch.testing.assert_close(got, reference.spread(expected, columns["mask"]), atol=1e-9, rtol=1e-9)


@QUICK
@given(columns=batches, gamma=st.sampled_from([1.0, 0.9, 0.0]))
def test_reinforce_baselines(columns, gamma):
    mask, rewards = columns["mask"], columns["rewards"]
    valid = [reference.is_score(r) for r in rewards.tolist()]
    g = reference.returns(reference.place(rewards, mask), mask, gamma)
    episodes = {
        b: row[flags.index(True)]
        for b, (row, flags) in enumerate(zip(g, mask.tolist(), strict=True))
        if any(flags) and valid[b]
    }
    ids = columns["group_ids"].tolist()
    keep = mask & torch.tensor(valid)[:, None]
    for baseline in ("none", "batch", "group", "moving"):
        expected = torch.zeros(mask.shape).double()
        for b in episodes:
            peers = [episodes[j] for j in episodes if ids[j] == ids[b]]
            c = {
                "none": 0.0,
                "batch": reference.mean(list(episodes.values())),
                "group": reference.mean(peers),
                "moving": 0.25,
            }[baseline]
            expected[b] = f64(g[b]) - c
            if baseline == "group" and len(peers) == 1:
                expected[b] = 0
        got = compute_advantages(
            "reinforce",
            {**only(columns, "rewards", "group_ids"), "moving_baseline": 0.25},
            {"baseline": baseline, "gamma": gamma},
        )
        same(got.advantages, torch.where(keep, expected, 0.0))
        same(got.returns, f64(g).reshape(mask.shape))


@QUICK
@given(columns=batches, kl_coef=st.sampled_from([0.0, 0.3]))
def test_reinforce_pp(columns, kl_coef):
    mask, rewards = columns["mask"], columns["rewards"]
    valid = [reference.is_score(r) for r in rewards.tolist()]
    placed = f64(reference.place(rewards, mask)).reshape(mask.shape)
    kl = torch.where(mask, columns["old_log_probs"] - columns["ref_log_probs"], 0.0)
    g = reference.returns((placed - kl_coef * kl).tolist(), mask, 1.0)
    got = compute_advantages(
        "reinforce_pp", only(columns, "rewards", "old_log_probs", "ref_log_probs"), {"kl_coef": kl_coef}
    )
    torch.testing.assert_close(got.advantages, reference.whiten(g, mask, valid), atol=1e-6, rtol=1e-6)


@QUICK
@given(columns=batches)
def test_reinforce_pp_baseline(columns):
    mask = columns["mask"]
    valid = [reference.is_score(r) for r in columns["rewards"].tolist()]
    scalars = reference.group_scalars(columns, "dr_grpo")
    expected = reference.whiten(reference.spread(scalars, mask).tolist(), mask, valid)
    got = compute_advantages("reinforce_pp_baseline", only(columns, "rewards", "group_ids")).advantages
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


@QUICK
@given(columns=batches)
def test_remax(columns):
    mask, rewards = columns["mask"], columns["rewards"].nan_to_num(nan=0.5)
    got = compute_advantages("remax", {**only(columns, "greedy_rewards"), "rewards": rewards}).advantages
    # With one outcome on the last token and no discount every token's return is the outcome.
    same(got, reference.spread((rewards - columns["greedy_rewards"]).tolist(), mask))


@QUICK
@given(
    columns=batches,
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([1.0, 0.8, 0.0]),
    critic_lam=st.sampled_from([None, 0.5]),
    lam_alpha=st.sampled_from([None, 0.7]),
)
def test_gae(columns, gamma, lam, critic_lam, lam_alpha):
    mask = columns["mask"]
    token_rewards = columns["returns"] + 0.1  # non-zero on environment tokens: they fold
    given = {**only(columns, "values", "bootstrap_values"), "token_rewards": token_rewards}
    options = {"gamma": gamma, "lam": lam, "critic_lam": critic_lam, "lam_alpha": lam_alpha, "whiten": False}
    got = compute_advantages("gae", given, options)
    folded, n = reference.fold(token_rewards, mask), mask.sum(1).tolist()
    lams = [lam if lam_alpha is None else min(max(1 - 1 / (lam_alpha * max(x, 1)), 0), 1) for x in n]
    a, g = reference.gae(columns, folded, gamma, lams)
    if critic_lam is not None:
        _, g = reference.gae(columns, folded, gamma, [critic_lam] * len(n))
    same(got.advantages, a)
    same(got.returns, g)
    white = compute_advantages("gae", given, {**options, "whiten": True})
    same(white.returns, g)
    torch.testing.assert_close(
        white.advantages, reference.whiten(a.tolist(), mask, [True] * len(n)), atol=1e-5, rtol=1e-5
    )


def test_gae_lambda_limits():
    columns = make_columns(4)
    given = {**only(columns, "values"), "token_rewards": columns["returns"]}
    folded = fold_rewards(columns["returns"], columns["mask"])
    monte_carlo = compute_advantages("gae", given, {"lam": 1.0, "whiten": False}).returns
    same(monte_carlo, f64(reference.returns(folded.tolist(), columns["mask"], 1.0)))


@QUICK
@given(columns=batches)
def test_gdpo(columns):
    mask, w = columns["mask"], [1.0, 0.5, 2.0]
    total = [0.0] * len(mask)
    for k in range(3):
        part = reference.group_scalars({**columns, "rewards": columns["reward_components"][:, k]}, "grpo")
        total = [x + w[k] * y for x, y in zip(total, part, strict=True)]
    s = reference.std(total)
    flat = max(total) == min(total)
    expected = [0.0 if flat else (x - reference.mean(total)) / (s + 1e-6) for x in total]
    got = compute_advantages("gdpo", only(columns, "reward_components", "group_ids"), {"weights": w}).advantages
    torch.testing.assert_close(got, reference.spread(expected, mask), atol=1e-6, rtol=1e-6)


def test_turn_level_by_hand():
    mask = torch.tensor([[1, 1, 0, 1, 0, 0], [1, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()
    rewards = torch.tensor([[0.0, 0, 1, 0, 4, 0], [2, 0, 0, 0, 0, 3], [7, 0, 0, 0, 0, 0]])
    assert turn_ids(mask).tolist() == [[0, 0, -1, 1, -1, -1], [0, -1, -1, 1, 1, 1], [-1] * 6]
    # Rewards on environment tokens belong to the turn before: row 0 has turns 1 and 4, row 1 turns 2 and 3.
    got = compute_advantages(
        "turn_level",
        {"mask": mask, "token_rewards": rewards, "group_ids": torch.zeros(3).long()},
        {"gamma": 0.5},
    )
    assert got.returns.tolist() == [[3, 3, 0, 4, 0, 0], [3.5, 0, 0, 3, 3, 3], [0] * 6]
    # The mean of G_1 over rows with a turn is 3.25.
    assert got.advantages.tolist() == [[-0.25, -0.25, 0, 0.75, 0, 0], [0.25, 0, 0, -0.25, -0.25, -0.25], [0] * 6]


def test_distillation():
    mask = torch.tensor([[True, True, False]])
    teacher, old = torch.tensor([[-1.0, -torch.inf, torch.nan]]), torch.tensor([[-2.0, -1.0, 0.0]])
    columns = {"teacher_log_probs": teacher, "old_log_probs": old, "mask": mask, "rewards": torch.tensor([3.0])}
    assert compute_advantages("distill", columns).advantages.tolist() == [[1, -20, 0]]
    assert compute_advantages("distill", columns, {"reward_coef": 2.0}).advantages.tolist() == [[7, -14, 0]]


# ---- edge cases of the specification's table


def test_constant_group_is_exactly_zero():
    for value in (0.1, 1 / 3, 1e6 + 0.1):
        columns = {
            "rewards": torch.full((5,), value),
            "group_ids": torch.zeros(5).long(),
            "mask": torch.ones(5, 2, dtype=torch.bool),
        }
        for name in ("grpo", "dr_grpo", "rloo", "opo", "gpg", "reinforce_pp_baseline", "maxrl", "reinforce_pp"):
            assert not compute_advantages(name, columns).advantages.any(), name
        assert not compute_advantages("grpo", columns, {"std": "batch"}).advantages.any()
        for baseline in ("batch", "group"):
            assert not compute_advantages("reinforce", columns, {"baseline": baseline}).advantages.any()


def test_lone_member():
    columns = {
        "rewards": torch.tensor([0.7, 1.0, 0.0]),
        "group_ids": torch.tensor([5, 6, 6]),
        "mask": torch.ones(3, 1, dtype=torch.bool),
    }
    for name in ("grpo", "dr_grpo", "rloo"):
        assert compute_advantages(name, columns).advantages[0].item() == 0
        raw = compute_advantages(name, columns, {"singleton": "raw"}).advantages
        assert raw[0].item() == pytest.approx(0.7)
        assert raw[1:].abs().min() > 0
    for name in ("opo", "gpg", "pass_at_k_marginal", "maxrl"):
        assert compute_advantages(name, columns).advantages[0].item() == 0


def test_huge_offset_does_not_matter():
    base = torch.tensor([0.0, 1.0, 1.0, 0.0, 3.0], dtype=torch.float64)
    columns = {"group_ids": torch.tensor([0, 0, 0, 1, 1]), "mask": torch.ones(5, 1, dtype=torch.bool)}
    for name in ("grpo", "dr_grpo", "rloo", "opo", "gpg", "reinforce_pp_baseline", "pass_at_k_marginal"):
        plain = compute_advantages(name, {**columns, "rewards": base}).advantages
        moved = compute_advantages(name, {**columns, "rewards": base + 2.0**40}).advantages
        torch.testing.assert_close(moved, plain, atol=1e-9, rtol=1e-9)


def test_empty_row_counts_in_its_group():
    columns = {
        "rewards": torch.tensor([1.0, 0.0, 0.0]),
        "group_ids": torch.zeros(3).long(),
        "mask": torch.tensor([[True], [True], [False]]),
    }
    got = compute_advantages("dr_grpo", columns).advantages
    torch.testing.assert_close(got, torch.tensor([[2 / 3], [-1 / 3], [0.0]]))
    # The same with token rewards: the empty row has no place for its reward, but keeps its score.
    token_rewards = torch.tensor([[1.0], [0.0], [0.0]])
    again = compute_advantages("dr_grpo", {**columns, "token_rewards": token_rewards}).advantages
    torch.testing.assert_close(again, got)


def test_unscorable_members():
    columns = {
        "rewards": torch.tensor([1.0, torch.nan, 0.0, torch.nan, torch.inf]),
        "group_ids": torch.tensor([0, 0, 0, 1, 1]),
        "mask": torch.ones(5, 1, dtype=torch.bool),
    }
    assert compute_advantages("dr_grpo", columns).advantages.flatten().tolist() == [0.5, 0, -0.5, 0, 0]
    assert compute_advantages("pass_at_k", columns, {"k": 2}).advantages.flatten().tolist() == [0, 0, 0, 0, 0]


def test_environment_rewards_are_folded():
    mask = torch.tensor([[0, 1, 0, 1, 0]]).bool()
    folded = fold_rewards(torch.tensor([[9.0, 1, 2, 4, 8]]), mask)
    assert folded.tolist() == [[0, 3, 0, 12, 0]]


def test_whitening_corner_cases():
    one = torch.tensor([[True, False]])
    assert whiten(torch.tensor([[3.0, torch.nan]]), one).tolist() == [[0, 0]]
    flat = torch.full((2, 3), 0.1)
    assert not whiten(flat, torch.ones(2, 3, dtype=torch.bool)).any()
    x = torch.tensor([[1.0, 2.0, 4.0]])
    kept_mean = whiten(x, torch.ones(1, 3, dtype=torch.bool), shift_mean=False)
    assert kept_mean.mean().item() == pytest.approx(7 / 3)


def test_trajectories_count_once():
    # Trajectory 10 has three rows; with its group mate 11 the mean is 0.5, not 0.75.
    columns = {
        "rewards": torch.tensor([1.0, 1.0, 0.0, 1.0]),
        "group_ids": torch.zeros(4).long(),
        "trajectory_ids": torch.tensor([10, 10, 11, 10]),
        "mask": torch.ones(4, 1, dtype=torch.bool),
    }
    assert compute_advantages("dr_grpo", columns).advantages.flatten().tolist() == [0.5, 0.5, -0.5, 0.5]
    reinforced = compute_advantages("reinforce", columns, {"baseline": "batch"}).advantages
    torch.testing.assert_close(reinforced.flatten(), torch.tensor([0.5, 0.5, -0.5, 0.5]))
    with pytest.raises(BatchError, match="share 'rewards'"):
        compute_advantages("dr_grpo", {**columns, "rewards": torch.tensor([1.0, 0.0, 0.0, 1.0])})


# Trajectory 5 is rows 0 and 2: tokens with rewards 0, 1, then 0, 4.
ROWS = {
    "mask": torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 1]]).bool(),
    "token_rewards": torch.tensor([[0.0, 1, 0], [2, 0, 0], [0, 0, 4]]),
    "group_ids": torch.zeros(3).long(),
    "trajectory_ids": torch.tensor([5, 3, 5]),
}


def test_later_rows_of_a_trajectory_are_credited_to_earlier_ones():
    discounted = compute_advantages("reinforce", ROWS, {"gamma": 0.5}).returns
    assert discounted.tolist() == [[1, 2, 0], [2, 0, 0], [2, 0, 4]]
    centred = compute_advantages("reinforce", ROWS, {"baseline": "group"}).advantages  # mean of 5 and 2
    assert centred.tolist() == [[1.5, 1.5, 0], [-1.5, 0, 0], [0.5, 0, 0.5]]
    turns = compute_advantages("turn_level", ROWS, {"gamma": 0.5, "baseline": "none"}).returns
    assert turns.tolist() == [[2, 2, 0], [2, 0, 0], [2, 0, 4]]
    values = {"values": torch.ones(3, 3), "bootstrap_values": torch.tensor([9.0, 0.0, 2.0])}
    estimated = compute_advantages("gae", ROWS | values, {"lam": 0.5, "whiten": False}).advantages
    assert estimated.tolist() == [[1.125, 2.25, 0], [1, 0, 0], [2.5, 0, 5]]  # deltas 0, 1, 0, 5 and 1
    assert mean_return(ROWS["mask"], None, ROWS["token_rewards"], ROWS["trajectory_ids"]) == 3.5
    one_failed = ROWS | {"rewards": torch.tensor([1.0, 2.0, torch.nan])}
    assert compute_advantages("reinforce", one_failed).advantages.tolist() == [[0, 0, 0], [2, 0, 0], [0, 0, 0]]
    with pytest.raises(BatchError, match="share 'group_ids'"):
        compute_advantages("reinforce", ROWS | {"group_ids": torch.tensor([0, 0, 1])})
    with pytest.raises(BatchError, match=r"'token_rewards' must be \[3, 3\] like 'mask', or one value a row"):
        compute_advantages("reinforce", ROWS | {"token_rewards": torch.zeros(3, 2)})


@pytest.mark.parametrize("name", ["gae", "optimal_token_baseline", "reinforce", "reinforce_pp", "remax", "turn_level"])
def test_rows_of_a_trajectory_are_as_one_long_row(name):
    g, shape = torch.Generator().manual_seed(0), (6, 4)
    rows = {
        "mask": torch.rand(shape, generator=g) < 0.6,
        **{column: torch.randn(shape, generator=g).double() for column in ("token_rewards", "values")},
        **{column: -torch.rand(shape, generator=g).double() for column in ("old_log_probs", "ref_log_probs")},
        "sum_squared_probs": torch.rand(shape, generator=g).double(),
    }
    ids, groups = torch.tensor([2, 7, 2, 9, 7, 2]), torch.tensor([0, 1, 0, 0, 1, 0])
    order = {2: [0, 2, 5], 7: [1, 4], 9: [3]}
    long = {column: torch.zeros(3, 15, dtype=x.dtype) for column, x in rows.items()}
    for i, members in enumerate(order.values()):
        for k, b in enumerate(members):
            for column, x in rows.items():
                long[column][i, 5 * k:5 * k + 4] = x[b]
    greedy = {2: 0.3, 7: 0.1, 9: 0.4}
    rows |= {"group_ids": groups, "trajectory_ids": ids, "greedy_rewards": torch.tensor([greedy[int(i)] for i in ids])}
    long |= {"group_ids": torch.tensor([0, 1, 0]), "greedy_rewards": torch.tensor(list(greedy.values()))}
    options = {"reinforce": {"gamma": 0.9, "baseline": "batch"}, "gae": {"gamma": 0.9, "lam": 0.8, "lam_alpha": 0.5},
               "reinforce_pp": {"kl_coef": 0.1}}.get(name, {})
    got, expected = (compute_advantages(name, columns, options) for columns in (rows, long))
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.any()
        for i, members in enumerate(order.values()):
            for k, b in enumerate(members):
                torch.testing.assert_close(ours[b], theirs[i, 5 * k:5 * k + 4])


def test_batches_without_a_response_token():
    nothing = torch.zeros(3, 0, dtype=torch.bool)
    columns = {"values": torch.zeros(3, 0), "mask": nothing, "rewards": torch.ones(3)}
    for further in {}, {"trajectory_ids": torch.tensor([1, 1, 2])}:
        for name in "gae", "reinforce":
            assert compute_advantages(name, columns | further).returns.shape == (3, 0)


def test_kl_in_reward_enters_before_the_baseline():
    mask = torch.ones(2, 2, dtype=torch.bool)
    old, ref = torch.tensor([[-1.0, -1.0], [-1.0, -2.0]]), torch.tensor([[-1.5, -1.0], [-1.0, -1.0]])
    placed = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    shaped = kl_in_reward(placed, old, ref, mask, kl_coef=0.1)
    torch.testing.assert_close(shaped, torch.tensor([[-0.05, 1.0], [0.0, 1.1]]))
    columns = {"rewards": torch.ones(2), "token_rewards": shaped, "group_ids": torch.zeros(2).long(), "mask": mask}
    got = compute_advantages("dr_grpo", columns).advantages
    torch.testing.assert_close(got[:, 0], torch.tensor([-0.075, 0.075]))


@QUICK
@given(columns=batches)
def test_optimal_token_baseline(columns):
    mask, rewards = columns["mask"], columns["rewards"]
    token_rewards = torch.where(mask, columns["returns"], 0.0) + place_outcome(rewards.nan_to_num(), mask)
    g = reference.returns(token_rewards.tolist(), mask, 1.0)
    ids = columns["group_ids"].tolist()
    tokens = {}  # (group, position) -> list of (row, column, weight, return)
    for b in range(len(ids)):
        if not reference.is_score(rewards[b].item()):
            continue
        weight = 0.0
        for j, t in enumerate(mask[b].nonzero().flatten().tolist()):
            p, squares = columns["old_log_probs"][b, t].exp().item(), columns["sum_squared_probs"][b, t].item()
            weight += max(1 - 2 * p + squares, 0.0)
            tokens.setdefault((ids[b], j), []).append((b, t, weight, g[b][t]))
    expected = torch.zeros(mask.shape, dtype=torch.float64)
    for members in tokens.values():
        c = sum(w * x for _, _, w, x in members) / sum(w for _, _, w, _ in members)
        for b, t, _, x in members:
            expected[b, t] = x - c if len(members) > 1 else 0.0
    given_columns = only(columns, "rewards", "group_ids", "old_log_probs", "sum_squared_probs")
    got = compute_advantages("optimal_token_baseline", {**given_columns, "token_rewards": token_rewards})
    same(got.advantages, expected)


def test_baselines_per_agent():
    baselines = AgentBaselines(decay=0.5)
    agents, mask = torch.tensor([3, 8, 3]), torch.tensor([[True], [True], [True]])
    assert baselines.rows(agents).tolist() == [0, 0, 0]
    baselines.update(agents, mask, torch.tensor([1.0, -1.0, 3.0]))
    baselines.update(agents, mask, torch.tensor([4.0, torch.nan, torch.nan]))
    assert baselines.rows(agents).tolist() == [3, -1, 3]
    columns = {"mask": mask, "rewards": torch.tensor([1.0, 1.0, 1.0]), "moving_baseline": baselines.rows(agents)}
    got = compute_advantages("reinforce", columns, {"baseline": "moving"}).advantages
    assert got.flatten().tolist() == [-2, 2, -2]
    copy = AgentBaselines()
    copy.load_state_dict(baselines.state_dict())
    assert copy.rows(agents).tolist() == [3, -1, 3]


def test_moving_baseline_reads_only_the_past():
    baseline = MovingBaseline(decay=0.5)
    assert baseline.value == 0
    mask = torch.ones(2, 1, dtype=torch.bool)
    baseline.update(mean_return(mask, torch.tensor([1.0, 3.0])))
    baseline.update(mean_return(mask, torch.tensor([0.0, torch.nan])))
    assert baseline.value == pytest.approx(1.0)
    copy = MovingBaseline()
    copy.load_state_dict(baseline.state_dict())
    assert vars(copy) == vars(baseline)
