"""The comparison in production decides at any time, seldom wrongly, and not by a few users."""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from reinforge.routing.live_comparison import LiveComparison, LiveTest, compute_interval, describe_user

CONTINUE, PROMOTE, HARM, FUTILITY = range(4)


@dataclass(frozen=True)
class Users:
    """300 users of different taste, whose scores are 0 or 1.

    Attributes:
        effect: What the candidate adds to the probability of a 1.
        share: Of the conversations, with the candidate.
        heavy: 5 % of the users send 60 % of the scores.
        liars: The share of users who vote the opposite.
        conspire: The first 5 % of the users, the heavy ones, give the candidate 1 and the served version 0.
        burst: Conversations of a user that follow each other.
    """

    effect: float = 0.0
    share: float = 0.5
    base: float = 0.5
    heavy: bool = False
    liars: float = 0.0
    conspire: bool = False
    burst: int = 1


def simulate(worlds, runs, chats=4000, num_users=300, seed=0):
    """Returns the outcome of each run, which is looked at after every chat, and the chat that decided it.

    Both are `[world, run]`.
    """
    rng, rule = np.random.default_rng(seed), LiveTest(max_conversations=chats)
    each = {name: np.repeat([getattr(world, name) for world in worlds], runs) for name in Users.__annotations__}
    rows, few = np.arange(len(worlds) * runs), num_users // 20
    taste = each["base"][:, None] + 0.2 * rng.standard_normal((len(rows), num_users))
    p = np.clip(np.stack([taste + each["effect"][:, None], taste], -1), 0, 1)
    places = rng.permuted(np.tile(np.arange(num_users), (len(rows), 1)), axis=1)
    p = np.where((places < each["liars"][:, None] * num_users)[..., None], 1 - p, p)
    p[each["conspire"], :few] = [1, 0]
    of_few = np.where(each["heavy"], 0.6, few / num_users)  # of the scores
    held, sums = np.zeros((len(rows), num_users, 2, 2)), np.zeros((len(rows), 10))
    outcome, decided_at = np.zeros(len(rows), int), np.full(len(rows), chats)
    user = np.zeros(len(rows), int)

    def describe():
        with np.errstate(invalid="ignore"):
            averages = held[rows, user, :, 0] / held[rows, user, :, 1]
        return describe_user(averages[:, 0], averages[:, 1])

    for chat in range(chats):
        drawn = rng.random(len(rows))
        rest = few + (drawn - of_few) / (1 - of_few) * (num_users - few)
        drawn = np.where(drawn < of_few, drawn / of_few * few, rest).astype(int)
        user = np.where(chat % each["burst"] == 0, drawn, user)
        version = np.where(rng.random(len(rows)) < each["share"], 0, 1)
        before = describe()
        held[rows, user, version, 0] += rng.random(len(rows)) < p[rows, user, version]
        held[rows, user, version, 1] += 1
        sums += describe() - before
        ready = np.flatnonzero((outcome == 0) & (np.minimum(sums[:, 0], sums[:, 3]) > rule.min_users - 0.5))
        if not len(ready):
            if outcome.all():
                break
            continue
        _, low, high = compute_interval(sums[ready], rule.expected, rule.confidence)
        harm = compute_interval(sums[ready], rule.expected, rule.harm_confidence)[2] < 0
        found = np.select([low > rule.margin, harm, high < rule.worthwhile], [PROMOTE, HARM, FUTILITY], CONTINUE)
        outcome[ready], decided_at[ready] = found, np.where(found, chat + 1, chats)
    return outcome.reshape(len(worlds), runs), decided_at.reshape(len(worlds), runs)


def test_the_interval_of_a_hand_checked_difference():
    """100 users with 1 and 100 others with 0: each variance is (0 + 1) / (100 * 101), from the two added users."""
    nothing = np.full(100, np.nan)
    sums = (describe_user(np.ones(100), nothing) + describe_user(nothing, np.zeros(100))).sum(0)
    difference, low, high = compute_interval(sums, 0.1, 0.95)
    squared_error = 2 / (100 * 101)
    r = 0.01 / squared_error
    half = math.sqrt(squared_error * (1 + 1 / r) * (math.log(1 + r) + 2 * math.log(20)))
    assert (difference, high) == (1, 1)
    assert low == pytest.approx(1 - half)
    assert half == pytest.approx(0.0448, abs=1e-4)


def test_what_both_versions_share_makes_the_interval_narrow():
    """Users who give both versions 1, or both 0: the difference is 0, and only the added users are uncertain."""
    tastes = np.repeat([0.0, 1.0], 100)
    together = describe_user(tastes, tastes).sum(0)
    nothing = np.full(200, np.nan)
    apart = (describe_user(tastes, nothing) + describe_user(nothing, tastes)).sum(0)
    (_, _, paired), (_, _, unpaired) = (compute_interval(each, 0.1, 0.95) for each in (together, apart))
    assert paired < unpaired / 4


def test_a_user_counts_once_for_each_version():
    comparison = LiveComparison(LiveTest(min_users=10))
    for number in range(1000):
        comparison.put(f"heavy {number}", "heavy", 1.0, is_candidate=True)
    for number in range(9):
        comparison.put(f"c{number}", f"user {number}", 0.5, is_candidate=True)
        comparison.put(f"s{number}", f"user {number}", 0.5, is_candidate=False)
    found = comparison.judge()
    assert found.difference == pytest.approx(0.05)  # (1 + 9 * 0.5) / 10 - 0.5
    assert (found.num_users, found.num_conversations) == ((10, 9), (1009, 9))
    assert found.outcome == "continue"
    assert "fewer than 10 users" in found.reason


def test_scores_are_replaced_and_taken_back():
    comparison, same = LiveComparison(), LiveComparison()
    comparison.put("1", "ann", 0.2, is_candidate=True)
    comparison.put("1", "ann", 0.8, is_candidate=True)
    comparison.put("2", "ben", 0.4, is_candidate=False)
    comparison.put("3", "ben", 0.9, is_candidate=False)
    comparison.put("3", "ben", None, is_candidate=False)
    same.put("1", "ann", 0.8, is_candidate=True)
    same.put("2", "ben", 0.4, is_candidate=False)
    found, expected = comparison.judge(), same.judge()
    assert found.num_users == expected.num_users == (1, 1)
    assert found.num_conversations == expected.num_conversations == (1, 1)
    assert found.difference == pytest.approx(0.4)
    assert comparison._sums == pytest.approx(same._sums)
    comparison.put("1", "ann", None, is_candidate=True)
    assert comparison.judge().difference is None
    with pytest.raises(ValueError, match="from 0 to 1"):
        comparison.put("5", "ann", 1.5, is_candidate=True)


@pytest.mark.parametrize(("effect", "outcome"), [(0.5, "promote"), (-0.5, "harm")])
def test_a_large_difference_decides_soon(effect, outcome):
    comparison, rng = LiveComparison(), np.random.default_rng(0)
    for number in range(1000):
        is_candidate = bool(rng.random() < 0.5)
        score = float(rng.random() < 0.5 + effect * (is_candidate - 0.5))
        comparison.put(str(number), f"user {number % 300}", score, is_candidate=is_candidate)
        if (found := comparison.judge()).outcome != "continue":
            break
    assert found.outcome == outcome
    assert number < 400
    assert (found.ci_low > 0) if outcome == "promote" else (found.difference < -0.2)


def test_what_is_not_decided_ends():
    comparison = LiveComparison(LiveTest(min_users=10, max_conversations=3))
    for number in range(3):
        assert comparison.judge().outcome == "continue"
        comparison.put(str(number), "ann", 1.0, is_candidate=True)
    assert comparison.judge().outcome == "futility"


BETTER = [Users(effect=0.1, share=share) for share in (0.5, 0.2)]
HARMFUL = [
    Users(effect=-0.1, liars=0.2),
    Users(effect=-0.1, heavy=True),
    Users(effect=-0.1, heavy=True, liars=0.2),
    Users(effect=-0.1, heavy=True, conspire=True),
    Users(effect=-0.05, liars=0.2, burst=5),
]


@pytest.mark.slow
def test_an_effect_of_a_tenth_decides_within_4000_chats_and_nothing_harmful_is_promoted():
    outcomes, decided_at = simulate([*BETTER, *HARMFUL], 20)
    for outcome, chats in zip(outcomes[:2], decided_at[:2], strict=True):
        assert (outcome == PROMOTE).mean() >= 0.9
        assert (outcome > PROMOTE).mean() <= 0.02
        assert np.median(chats) < 2000
    assert not (outcomes[2:] == PROMOTE).any()


def test_without_the_cap_few_users_decide():
    """Mutation check: if each score counted as a user of its own, the conspirators above would have their way."""
    rng, comparison = np.random.default_rng(0), LiveComparison()
    for number in range(1000):
        conspires, is_candidate = rng.random() < 0.6, bool(rng.random() < 0.5)
        score = float(is_candidate) if conspires else float(rng.random() < 0.5 - 0.1 * is_candidate)
        comparison.put(str(number), f"user of {number}", score, is_candidate=is_candidate)
    assert comparison.judge().outcome == "promote"


@pytest.mark.parametrize(
    "runs", [pytest.param(500, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.fault)]
)
@pytest.mark.parametrize(
    "world", [Users(), Users(share=0.1), Users(burst=5), Users(base=0.9), Users(heavy=True)], ids=str
)
def test_without_effect_few_of_many_runs_promote(world, runs):
    outcome, _ = simulate([world], runs)
    assert (outcome == PROMOTE).mean() <= 0.025
