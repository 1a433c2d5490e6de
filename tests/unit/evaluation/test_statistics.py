from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from reinforge.evaluation.statistics import (
    NUM_RANDOM_FLIPS,
    Improvement,
    detectable_effect,
    format_interval,
    mean_interval,
    paired_difference,
    summarize,
)


def arm(*scores):
    return {f"e{n}": float(score) for n, score in enumerate(scores)}


def test_wilson_interval_is_that_of_the_paper():
    # 15 of 20: (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), z = 1.95996
    z, n, p = 1.959963985, 20, 0.75
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    mean, low, high = mean_interval([1] * 15 + [0] * 5)
    assert mean == 0.75
    assert (low, high) == pytest.approx(((centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)))


@pytest.mark.parametrize(
    ("values", "low", "high"), [([1], 0.2065, 1.0), ([0] * 10, 0.0, 0.2775), ([True], 0.2065, 1.0)]
)
def test_scores_of_one_kind_keep_an_interval_with_width_inside_0_and_1(values, low, high):
    assert mean_interval(values)[1:] == pytest.approx((low, high), abs=1e-4)


def test_other_scores_get_students_t():
    # mean 2, s = 1, n = 3, t(2) = 4.3027: half = 4.3027 / sqrt(3) = 2.4841
    assert mean_interval([1, 2, 3]) == pytest.approx((2.0, -0.4841, 4.4841), abs=1e-4)


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5, 0.5], [-1.0, -1.0]])
def test_without_spread_the_ends_are_unknown(values):
    assert mean_interval(values) == (values[0], None, None)


@pytest.mark.parametrize("values", [[], [0.5, float("nan")], [float("inf")]])
def test_unknown_scores_are_refused(values):
    with pytest.raises(ValueError, match="leave missing ones out"):
        mean_interval(values)


def test_summarize_counts_what_is_missing():
    summary = summarize("wins", arm(1, 0, 1, 1), num_examples=6)
    assert (summary.metric, summary.mean, summary.num_examples, summary.num_unscored) == ("wins", 0.75, 4, 2)
    assert summary.ci_low == pytest.approx(0.3006, abs=1e-4)
    assert summarize("wins", {}, 6).as_dict() == {
        "metric": "wins",
        "mean": None,
        "ci_low": None,
        "ci_high": None,
        "num_examples": 0,
        "num_unscored": 6,
    }
    with pytest.raises(ValueError, match="4 scores for 3 examples"):
        summarize("wins", arm(1, 0, 1, 1), num_examples=3)


def test_difference_is_taken_over_examples_scored_in_both():
    base = {"a": 0.0, "b": 1.0, "only base": 1.0, "c": 2.0}
    tuned = {"c": 4.0, "b": 2.0, "a": 3.0, "only tuned": 0.0}
    found = paired_difference(base, tuned)
    # differences 3, 1, 2: mean 2, s = 1; flips as far out as +++: +++ and ---, 2 of 8
    assert found.num_pairs == 3
    assert (found.mean_difference, found.ci_low, found.ci_high) == pytest.approx((2.0, -0.4841, 4.4841), abs=1e-4)
    assert found.p_value == 0.25
    assert found.method == "paired t interval; sign-flip test, exact"
    assert found.as_dict()["p_value"] == 0.25


def test_no_pair_is_an_error():
    with pytest.raises(ValueError, match="no example is scored in both arms"):
        paired_difference({"a": 1.0}, {"b": 1.0})


def test_equal_differences_do_not_claim_certainty():
    # 12 of 12 went from 0 to 1; at most q = 1 - 0.025^(1/12) = 0.2646 behave otherwise, each by up to -1
    found = paired_difference(arm(*[0] * 12), arm(*[1] * 12))
    assert (found.mean_difference, found.ci_low, found.ci_high) == pytest.approx((1.0, 1 - 2 * 0.26465, 1.0), abs=1e-4)
    assert found.p_value == 2 / 2**12
    assert found.method.startswith("exact bound")


def test_identical_arms_have_p_one():
    found = paired_difference(arm(0, 1, 1, 0), arm(0, 1, 1, 0))
    assert (found.mean_difference, found.p_value) == (0.0, 1.0)
    assert found.ci_low == -found.ci_high < 0


def test_scores_that_are_all_one_number_leave_the_interval_unknown():
    found = paired_difference(arm(0.5, 0.5), arm(0.5, 0.5))
    assert (found.ci_low, found.ci_high, found.p_value) == (None, None, 1.0)


def test_one_pair_has_no_spread():
    found = paired_difference(arm(0.2), arm(0.7))
    assert found.p_value == 1.0
    assert found.ci_low < 0 < found.ci_high


def test_exact_p_value_is_the_share_of_flips_as_far_out():
    differences = [0.3, -0.1, 0.25, 0.4, 0.0, -0.05]
    flips = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product([1, -1], repeat=6)
    ]
    share = sum(flip >= abs(sum(differences)) - 1e-9 for flip in flips) / 64
    assert paired_difference(arm(*[0] * 6), arm(*differences)).p_value == share


def test_wins_and_losses_give_the_exact_sign_test():
    # 15 examples got better, 5 worse, 980 did not change: 2 P(Binomial(20, 1/2) <= 5) = 2 * 21700 / 2^20
    base = arm(*[0] * 15, *[1] * 5, *[1] * 980)
    tuned = arm(*[1] * 15, *[0] * 5, *[1] * 980)
    found = paired_difference(base, tuned)
    assert found.p_value == pytest.approx(2 * 21700 / 2**20)
    assert found.mean_difference == pytest.approx(0.01)


def test_as_many_wins_as_losses_is_p_one():
    assert paired_difference(arm(*[0] * 10, *[1] * 10), arm(*[1] * 10, *[0] * 10)).p_value == 1.0


def test_random_flips_are_the_same_every_time_and_near_the_normal_value():
    random = np.random.default_rng(5)
    base, tuned = arm(*random.random(300)), arm(*(random.random(300) + 0.05))
    first, second = paired_difference(base, tuned), paired_difference(dict(reversed(base.items())), tuned)
    assert first == second
    assert f"{NUM_RANDOM_FLIPS:,} random flips" in first.method
    half = (first.ci_high - first.ci_low) / 2
    normal = math.erfc(abs(first.mean_difference) / (half / 1.968) / math.sqrt(2))
    assert first.p_value == pytest.approx(normal, abs=0.02)


def test_margin_moves_what_the_p_value_tests():
    base, tuned = arm(*[0.0] * 8), arm(*[0.1, 0.2] * 4)
    assert paired_difference(base, tuned).p_value == 2 / 2**8
    assert paired_difference(base, tuned, margin=0.15).p_value == 1.0


def test_detectable_effect():
    # (1.95996 + 1.28155) * 0.5 / sqrt(100)
    assert detectable_effect(100, 0.5) == pytest.approx(0.16208, abs=1e-5)


@pytest.mark.parametrize(
    ("numbers", "signed", "text"),
    [
        ((0.5, 0.4, 0.6), False, "0.500 [0.400, 0.600]"),
        ((0.5, -0.1, 1.1), True, "+0.500 [-0.100, +1.100]"),
        ((0.5, None, None), False, "0.500 (interval unknown)"),
        ((None, None, None), False, "unknown"),
    ],
)
def test_format_interval(numbers, signed, text):
    assert format_interval(*numbers, signed=signed) == text


def test_improvement_reads_as_its_interval():
    assert str(Improvement(0.05, 0.01, 0.09, 0.02, 100, "")) == "+0.050 [+0.010, +0.090]"
