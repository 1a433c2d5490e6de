"""A sudden shift of users' scores is found, seldom without one, and not because of one user."""

import numpy as np
import pytest

from reinforge.routing.live_comparison import SHIFT_ALPHA, LiveComparison, LiveTest
from reinforge.routing.score_shift import ShiftCheck


def simulate(runs, chats, shift=0.0, begins=1500, seed=0):
    """Returns, for each comparison of 300 users of different taste, after how many chats it was paused; 0: never.

    From the chat `begins` on, the probability that the served version is liked changes by `shift`.
    """
    rng, found = np.random.default_rng(seed), []
    for _ in range(runs):
        taste = 0.5 + 0.2 * rng.standard_normal(300)
        users, versions, draws = rng.integers(0, 300, chats), rng.integers(0, 2, chats), rng.random(chats)
        p = np.clip(taste[users] + shift * (versions == 1) * (np.arange(chats) >= begins), 0, 1)
        checks, scores = [ShiftCheck(SHIFT_ALPHA / 2, 50, 100) for _ in range(2)], (draws < p).astype(float)
        found.append(0)
        for chat, (user, version, score) in enumerate(
            zip(users.tolist(), versions.tolist(), scores.tolist(), strict=True)
        ):
            if checks[version].add(str(user), score) is not None:
                found[-1] = chat + 1
                break
    return np.array(found)


def test_a_shift_is_found_and_ends_once_the_scores_are_stable():
    """Each 1 before the shift has a rank drawn from (0, 1), and each 0 after it one from (0, number of zeros / t)."""
    check = ShiftCheck(0.025, num_others=50, num_stable=100)
    assert [check.add(f"early {number}", 1.0) for number in range(100)] == [None] * 100
    found = [check.add(f"late {number}", 0.0) for number in range(20)]
    assert found == [None] * 19 + ["down"]
    assert (check.num_counted, check.num_left) == (120, 100)
    assert [check.add(f"later {number}", 0.0) for number in range(99)] == [None] * 99
    assert check.num_left == 1
    check.add("the last", 0.0)
    assert check.num_left == 0


def rate_heavily(num_others):
    rng, check = np.random.default_rng(0), ShiftCheck(0.025, num_others, 100)
    for number in range(200):
        check.add(f"user {number}", float(rng.random() < 0.5))
    found = []
    for number in range(400):
        user, score = ("heavy", 0.0) if number % 4 else (f"user {number}", float(rng.random() < 0.5))
        found.append(check.add(user, score))
    return any(found)


def test_one_heavy_user_pauses_nothing():
    assert not rate_heavily(num_others=50)


def test_without_the_limit_on_a_user_one_heavy_user_pauses_promotion():
    """Mutation: all scores of a user count, also those that follow each other."""
    assert rate_heavily(num_others=0)


def put_all(comparison, scores, begin=0):
    """Puts the scores (candidate, served) of users."""
    for number, (candidate, served) in enumerate(scores, begin):
        comparison.put(f"c{number}", f"user {number}", candidate, is_candidate=True)
        comparison.put(f"s{number}", f"user {number}", served, is_candidate=False)


def test_a_shift_pauses_promotion_until_the_scores_are_stable():
    comparison = LiveComparison(LiveTest(min_users=100))
    put_all(comparison, [(1.0, 1.0)] * 100)
    assert comparison.judge().paused is None
    put_all(comparison, [(1.0, 0.0)] * 99, 100)
    found = comparison.judge()
    assert (found.outcome, found.ci_low > 0) == ("continue", True)
    assert found.paused == found.pauses[0]
    assert found.paused.startswith("the scores of the served version shifted down, found after 122 scores of its users")
    assert f"promotion is paused: {found.paused}" in found.reason
    put_all(comparison, [(1.0, 0.0)] * 23, 199)
    found = comparison.judge()
    assert (found.outcome, found.paused, len(found.pauses)) == ("promote", None, 1)


def test_a_shift_never_keeps_a_candidate_from_being_stopped_for_harm():
    comparison = LiveComparison(LiveTest(min_users=100))
    put_all(comparison, [(1.0, 1.0)] * 100 + [(0.0, 1.0)] * 99)
    found = comparison.judge()
    assert found.paused.startswith("the scores of the candidate shifted down")
    assert found.outcome == "harm"


def test_few_comparisons_are_paused_without_a_shift_and_most_with_one():
    assert (simulate(20, 1000) > 0).mean() <= 0.1
    found = simulate(20, 2000, shift=-0.3, begins=500)
    assert ((found > 500) & (found < 2000)).mean() >= 0.8


@pytest.mark.parametrize(
    "runs", [pytest.param(200, marks=pytest.mark.slow), pytest.param(500, marks=pytest.mark.fault)]
)
def test_at_most_one_comparison_in_20_is_paused_without_a_shift(runs):
    assert (simulate(runs, 4000) > 0).mean() <= 0.05
