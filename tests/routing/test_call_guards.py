"""What the calls with a candidate cost stops it or holds its promotion, rated or not."""

import math

import numpy as np
import pytest

from reinforge.routing.live_comparison import LiveCall, LiveComparison, LiveLimits, LiveTest


def put_calls(comparison, candidate, served, count=100):
    """Puts one call of each of `count` users with each version; (seconds, tokens, is_error), or a function of a number.

    The users of one version are not those of the other.
    """
    for is_candidate, cost in ((True, candidate), (False, served)):
        for number in range(count):
            found = cost(number) if callable(cost) else cost
            comparison.guards.put(LiveCall(1, f"{is_candidate} {number}", 0, *found), is_candidate=is_candidate)


def rate_well(comparison):
    for number in range(100):
        comparison.put(f"c{number}", f"True {number}", 1.0, is_candidate=True)
        comparison.put(f"s{number}", f"False {number}", 0.0, is_candidate=False)


def judge(candidate, served, count=100, **limits):
    """Returns the guards, and the outcome of a candidate whose scores are much better."""
    comparison = LiveComparison(LiveTest(guards=LiveLimits(**limits)))
    put_calls(comparison, candidate, served, count)
    unrated = comparison.judge()
    rate_well(comparison)
    rated = comparison.judge()
    assert unrated.guards == rated.guards
    return unrated.guards, unrated.outcome, rated


def test_a_candidate_that_takes_twice_as_long_is_stopped():
    """Seconds 2 and 1, limit 1.5: on a scale of 1.5 * 5 * 1 = 7.5 the averages are 2 / 7.5 and 1.5 / 7.5."""
    guards, unrated, rated = judge((2.0, 10, False), (1.0, 10, False))
    c, s = 2 / 7.5, 1.5 / 7.5
    squared_error = (c**2 + (1 - c) ** 2 + s**2 + (1 - s) ** 2) / (100 * 101)
    r = 0.01 / squared_error
    half = 7.5 * math.sqrt(squared_error * (1 + 1 / r) * (math.log(1 + r) + 2 * math.log(1 / 0.03)))
    latency = guards["latency"]
    assert (latency.candidate, latency.served, latency.value) == pytest.approx((2, 1, 2))
    assert (latency.ci_low, latency.ci_high) == pytest.approx((2 - half, 2 + half))
    assert half == pytest.approx(0.288, abs=1e-3)
    assert (latency.num_users, latency.state) == ((100, 100), "beyond")
    assert (guards["length"].value, guards["length"].state) == (pytest.approx(1), "ok")
    assert (unrated, rated.outcome) == ("guard", "guard")
    assert rated.reason == (
        "stopped by the guard latency: 2 seconds per reply against 1 of the served version, ratio 2 [1.71, 2.29], "
        "limit 1.5"
    )


def test_a_candidate_whose_calls_fail_is_stopped():
    """Of 100 users, 30 of the candidate have a call that failed, which has no reply, and 2 of the served version."""
    fails = lambda count: lambda number: (None, None, True) if number < count else (1.0, 10, False)  # noqa: E731
    guards, unrated, rated = judge(fails(30), fails(2))
    errors = guards["errors"]
    assert (errors.candidate, errors.served, errors.value) == pytest.approx((0.3, 0.02, 0.28))
    assert 0.02 < errors.ci_low < 0.28 < errors.ci_high
    assert guards["latency"].num_users == (70, 98)
    assert (unrated, rated.outcome) == ("guard", "guard")
    assert "the guard errors: 0.3 of the calls failed or were cut against 0.02" in rated.reason


def test_a_candidate_above_a_limit_is_not_promoted_and_one_below_is():
    guards, unrated, rated = judge((1.0, 16, False), (1.0, 10, False))
    assert (guards["length"].value, guards["length"].state) == (pytest.approx(1.6), "above")
    assert (unrated, rated.outcome) == ("continue", "continue")
    assert "not promoted because of the guard length: 16 tokens per reply against 10" in rated.reason
    assert judge((1.0, 14, False), (1.0, 10, False))[2].outcome == "promote"


@pytest.mark.parametrize("length", [16, 25])
def test_without_a_guard_a_candidate_with_long_replies_is_promoted(length):
    """Mutation: the guard is switched off. A candidate with 1.6 and one with 2.5 times as many tokens pass."""
    assert judge((1.0, length, False), (1.0, 10, False))[2].outcome in ("continue", "guard")
    guards, unrated, rated = judge((1.0, length, False), (1.0, 10, False), length=None)
    assert (set(guards), unrated, rated.outcome) == ({"latency", "errors"}, "continue", "promote")


def test_without_enough_users_a_guard_stops_nothing():
    guards, unrated, _ = judge((9.0, 10, False), (1.0, 10, False), count=99)
    assert (guards["latency"].ci_low > 1.5, guards["latency"].state, unrated) == (True, "above", "continue")


def test_one_call_that_hung_and_one_heavy_user_stop_nothing():
    """The average of a user counts at most 5 times that of the median user: (99 * 1 + 5) / 100 = 1.04."""
    comparison = LiveComparison()
    put_calls(comparison, lambda number: (1e6 if number == 0 else 1.0, 10, False), (1.0, 10, False))
    assert comparison.judge().guards["latency"].value == pytest.approx(1.04)
    for _ in range(1000):
        comparison.guards.put(LiveCall(1, "True 1", 0, 5.0, 50, True), is_candidate=True)
    found = comparison.judge()
    assert [each.state for each in found.guards.values()] == ["ok"] * 3
    assert found.guards["latency"].value == pytest.approx(1.08, abs=1e-3)


def test_a_candidate_above_a_guard_ends_with_the_comparison():
    comparison = LiveComparison(LiveTest(max_conversations=200))
    put_calls(comparison, (1.6, 10, False), (1.0, 10, False))
    rate_well(comparison)
    assert comparison.judge().outcome == "futility"


def test_a_candidate_that_costs_the_same_is_seldom_stopped():
    """Seconds of one log-normal distribution (sigma 1) for both, looked at after every twentieth user."""
    rng, num_stopped = np.random.default_rng(0), 0
    for _ in range(20):
        comparison = LiveComparison()
        for number in range(400):
            seconds, is_candidate = float(rng.lognormal()), bool(rng.random() < 0.5)
            comparison.guards.put(LiveCall(1, f"user {number}", 0, seconds, 10, False), is_candidate=is_candidate)
            if number % 20 == 0 and comparison.judge().outcome == "guard":
                num_stopped += 1
                break
    assert num_stopped == 0
