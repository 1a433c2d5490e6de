import itertools
import math

import numpy as np
import pytest
import scipy.special

from reinforge.evaluation.statistics import (
    NUM_RANDOM_FLIPS,
    Improvement,
    compute_detectable_effect,
    compute_half_width,
    compute_mean_interval,
    compute_paired_difference,
    compute_unpaired_difference,
    count_independent,
    fair_coin_cdf,
    format_interval,
    summarize,
    t_quantile,
)


def arm(*scores):
    return {f"e{n}": float(score) for n, score in enumerate(scores)}


@pytest.mark.parametrize("level", [0.01, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999])
def test_t_quantile_matches_scipy(level):
    for df in (*range(1, 300), 499, 500, 999, 1000, 4999, 5000):
        assert t_quantile(df, level) == pytest.approx(scipy.special.stdtrit(df, (1 + level) / 2), rel=1e-11), df
    for df in (99_999, 100_000):  # scipy's own error is larger here
        assert t_quantile(df, level) == pytest.approx(scipy.special.stdtrit(df, (1 + level) / 2), rel=1e-9), df


def test_t_quantile_between_whole_numbers_is_close_to_scipy():
    for df in np.arange(1.05, 40, 0.05):
        found = t_quantile(float(df), 0.95) / scipy.special.stdtrit(df, 0.975)
        assert found == pytest.approx(1, abs=0.03 if df < 5 else 0.001), df


@pytest.mark.parametrize("n", [1, 2, 3, 12, 13, 20, 99, 100, 999, 1000, 5000])
def test_fair_coin_cdf_matches_scipy(n):
    for k in sorted({0, n // 7, n // 3, n // 2 - n // 50, n // 2}):
        assert fair_coin_cdf(k, n) == pytest.approx(scipy.special.bdtr(k, n, 0.5), rel=1e-10, abs=1e-290), k


def test_wilson_interval_matches_the_papers_formula():
    # 15 of 20: (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), z = 1.95996
    z, n, p = 1.959963985, 20, 0.75
    center, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    mean, low, high = compute_mean_interval([1] * 15 + [0] * 5)
    assert mean == 0.75
    assert (low, high) == pytest.approx(((center - half) / (1 + z * z / n), (center + half) / (1 + z * z / n)))


@pytest.mark.parametrize(
    ("values", "mean", "low", "high"),
    [
        ([1], 1, 0.2065, 1.0),
        ([0] * 10, 0, 0.0, 0.2775),
        ([True], 1, 0.2065, 1.0),
        ([1, 2, 3], 2, -0.4841, 4.4841),  # s = 1, n = 3, t(2) = 4.3027: half = 4.3027 / sqrt(3) = 2.4841
        ([0.5], 0.5, None, None),
        ([0.5, 0.5, 0.5], 0.5, None, None),
        ([-1.0, -1.0], -1.0, None, None),
    ],
)
def test_the_interval_of_a_mean(values, mean, low, high):
    """Equal scores of 0 and 1 have one inside 0 and 1, others a t interval, and without spread it is unknown."""
    assert compute_mean_interval(values) == pytest.approx((mean, low, high), abs=1e-4)


@pytest.mark.parametrize("values", [[], [0.5, float("nan")], [float("inf")]])
def test_scores_that_are_not_finite_are_rejected(values):
    with pytest.raises(ValueError, match="leave out examples without a score"):
        compute_mean_interval(values)


def test_summarize_counts_examples_without_a_score():
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
        "unscored_reason": None,
        "num_clusters": None,
    }
    assert summarize("wins", arm(1), 2, "timeout: late").unscored_reason == "timeout: late"
    assert summarize("wins", arm(1), 1, "timeout: late").unscored_reason is None
    with pytest.raises(ValueError, match="4 scores for 3 examples"):
        summarize("wins", arm(1, 0, 1, 1), num_examples=3)


def test_the_difference_is_over_examples_scored_by_both():
    base = {"a": 0.0, "b": 1.0, "only base": 1.0, "c": 2.0}
    tuned = {"c": 4.0, "b": 2.0, "a": 3.0, "only tuned": 0.0}
    found = compute_paired_difference(base, tuned)
    # differences 3, 1, 2: mean 2, s = 1; of 8 flips only +++ and --- are as extreme as +++
    assert found.num_pairs == 3
    assert (found.mean_difference, found.ci_low, found.ci_high) == pytest.approx((2.0, -0.4841, 4.4841), abs=1e-4)
    assert found.p_value == 0.25
    assert found.method == "paired t interval; sign-flip test, exact"
    assert found.as_dict()["p_value"] == 0.25


def test_the_interval_of_shares_ends_at_1():
    """15 of 16 went from 0 to 1: 0.9375 with a standard error of 0.25 / 4, times 2.131."""
    base, tuned = dict.fromkeys(map(str, range(16)), 0.0), dict.fromkeys(map(str, range(16)), 1.0) | {"3": 0.0}
    found = compute_paired_difference(base, tuned)
    assert (found.ci_low, found.ci_high) == (pytest.approx(0.9375 - 2.131 * 0.0625, abs=1e-3), 1.0)
    assert compute_paired_difference(tuned, base).ci_low == -1.0
    halves = compute_paired_difference(base, {id_: 0.9 * score for id_, score in tuned.items()} | {"5": 0.4})
    assert halves.ci_high == pytest.approx(halves.mean_difference + (halves.mean_difference - halves.ci_low))


def test_no_pair_is_an_error():
    with pytest.raises(ValueError, match="no example has a score from both models"):
        compute_paired_difference({"a": 1.0}, {"b": 1.0})


def test_the_unpaired_difference_of_shares_is_newcombes_method_10():
    """56 of 70 against 48 of 80: 0.2 [0.0524, 0.3339] in the first example of Newcombe (1998)."""
    found = compute_unpaired_difference(arm(*[1.0] * 48, *[0.0] * 32), arm(*[1.0] * 56, *[0.0] * 14))
    assert (found.mean_difference, found.ci_low, found.ci_high) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)
    assert found.num_pairs == 0
    back = compute_unpaired_difference(arm(*[1.0] * 56, *[0.0] * 14), arm(*[1.0] * 48, *[0.0] * 32))
    assert (back.ci_low, back.ci_high) == pytest.approx((-0.3339, -0.0524), abs=1e-4)
    assert back.p_value == pytest.approx(found.p_value, abs=0.01)


def test_the_permutation_test_counts_the_divisions_that_are_at_least_as_extreme():
    # of the 20 ways to choose 3 of 6 numbers, {4, 5, 6} and {1, 2, 3} are as extreme as the observed one
    found = compute_unpaired_difference(arm(1, 2, 3), arm(4, 5, 6))
    assert found.mean_difference == 3.0
    assert found.p_value == pytest.approx(2 / 20, abs=0.02)
    assert compute_unpaired_difference(arm(1, 2, 3), arm(1, 2, 3)).p_value == 1.0


def test_an_unknown_spread_of_one_side_leaves_the_interval_unknown():
    found = compute_unpaired_difference(arm(0.5, 0.5), arm(0.7, 0.9))
    assert (found.ci_low, found.ci_high) == (None, None)
    with pytest.raises(ValueError, match="one or more finite scores"):
        compute_unpaired_difference({}, arm(1))


@pytest.mark.parametrize(("p_value", "text"), [(0.0004, "p < 0.001"), (0.001, "p = 0.001"), (0.5, "p = 0.500")])
def test_a_p_value_is_never_shown_as_0(p_value, text):
    assert Improvement(0.1, 0.0, 0.2, p_value, 3, "").format_p_value() == text


def test_equal_differences_do_not_claim_certainty():
    # 12 of 12 went from 0 to 1; at most q = 1 - 0.025^(1/12) = 0.2646 behave differently, each by up to -1
    found = compute_paired_difference(arm(*[0] * 12), arm(*[1] * 12))
    assert (found.mean_difference, found.ci_low, found.ci_high) == pytest.approx((1.0, 1 - 2 * 0.26465, 1.0), abs=1e-4)
    assert found.p_value == 2 / 2**12
    assert found.method.startswith("exact bound")


def test_identical_arms_have_p_one():
    found = compute_paired_difference(arm(0, 1, 1, 0), arm(0, 1, 1, 0))
    assert (found.mean_difference, found.p_value) == (0.0, 1.0)
    assert found.ci_low == -found.ci_high < 0


def test_scores_that_are_all_equal_leave_the_interval_unknown():
    found = compute_paired_difference(arm(0.5, 0.5), arm(0.5, 0.5))
    assert (found.ci_low, found.ci_high, found.p_value) == (None, None, 1.0)


def test_one_pair_has_no_spread():
    found = compute_paired_difference(arm(0.2), arm(0.7))
    assert found.p_value == 1.0
    assert found.ci_low < 0 < found.ci_high


def test_exact_p_value_is_the_share_of_flips_at_least_as_extreme():
    differences = [0.3, -0.1, 0.25, 0.4, 0.0, -0.05]
    flips = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product([1, -1], repeat=6)
    ]
    share = sum(flip >= abs(sum(differences)) - 1e-9 for flip in flips) / 64
    assert compute_paired_difference(arm(*[0] * 6), arm(*differences)).p_value == share


def test_wins_and_losses_give_the_exact_sign_test():
    # 15 examples got better, 5 worse, 980 did not change: 2 P(Binomial(20, 1/2) <= 5) = 2 * 21700 / 2^20
    base = arm(*[0] * 15, *[1] * 5, *[1] * 980)
    tuned = arm(*[1] * 15, *[0] * 5, *[1] * 980)
    found = compute_paired_difference(base, tuned)
    assert found.p_value == pytest.approx(2 * 21700 / 2**20)
    assert found.mean_difference == pytest.approx(0.01)


def test_as_many_wins_as_losses_is_p_one():
    assert compute_paired_difference(arm(*[0] * 10, *[1] * 10), arm(*[1] * 10, *[0] * 10)).p_value == 1.0


def test_random_flips_are_reproducible_and_close_to_the_normal_p_value():
    random = np.random.default_rng(5)
    base, tuned = arm(*random.random(300)), arm(*(random.random(300) + 0.05))
    first, second = (
        compute_paired_difference(base, tuned),
        compute_paired_difference(dict(reversed(base.items())), tuned),
    )
    assert first == second
    assert f"{NUM_RANDOM_FLIPS:,} random flips" in first.method
    half = (first.ci_high - first.ci_low) / 2
    normal = math.erfc(abs(first.mean_difference) / (half / 1.968) / math.sqrt(2))
    assert first.p_value == pytest.approx(normal, abs=0.02)


def test_the_p_value_tests_against_the_margin():
    base, tuned = arm(*[0.0] * 8), arm(*[0.1, 0.2] * 4)
    assert compute_paired_difference(base, tuned).p_value == 2 / 2**8
    assert compute_paired_difference(base, tuned, margin=0.15).p_value == 1.0


def test_detectable_effect():
    # (1.95996 + 1.28155) * 0.5 / sqrt(100)
    assert compute_detectable_effect(100, 0.5) == pytest.approx(0.16208, abs=1e-5)


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
    assert str(Improvement(0.05, 0.01, 0.09, 0.02, 100, "")) == "+0.050 [+0.010, +0.090]"


def test_half_width_is_that_of_the_interval_it_announces():
    """16 of 64 examples change, as many for the better as for the worse: variance 1/4 (n / (n - 1) in the sample)."""
    base = {str(n): float(n % 8 == 0) for n in range(64)}
    tuned = {str(n): float(n % 8 == 1) for n in range(64)}
    found = compute_paired_difference(base, tuned)
    assert found.mean_difference == 0
    assert found.ci_high == pytest.approx(compute_half_width(64))
    assert compute_half_width(20) == pytest.approx(2.0930 * 0.5 / 19**0.5, abs=1e-4)  # 0.240
    assert compute_half_width(20, num_samples=4) == pytest.approx(compute_half_width(20) / 2)


def test_the_largest_scores_overflow_nowhere():
    low, high = arm(*[-1e9] * 20), arm(*[1e9 - n for n in range(20)])
    change = compute_paired_difference(low, high)
    assert change.mean_difference == pytest.approx(2e9, rel=1e-6)
    assert all(math.isfinite(value) for value in (change.ci_low, change.ci_high, change.p_value))
    assert compute_mean_interval([1e9, -1e9])[0] == 0
    for value in (1.1e9, -1e308, math.inf, math.nan):
        with pytest.raises(ValueError, match="expected one or more finite scores of at most 1e"):
            compute_mean_interval([value, 0.0])


def test_the_interval_over_clusters_is_that_of_their_sums():
    found = compute_paired_difference(arm(2, 0, 0, 0), arm(3, 1, 0, 0), clusters={"e0": "a", "e1": "a"})
    # mean 0.5; sums of d - 0.5: a 1, e2 -0.5, e3 -0.5; sizes 2, 1, 1
    # se^2 = (1 / (1 - 2/4) + 0.25 / (1 - 1/4) + 0.25 / (1 - 1/4)) / 4^2 = 1/6; df = 16 / (160/9 - 16 + 64/9) = 1.8
    half = t_quantile(1.8, 0.95) / math.sqrt(6)
    assert (found.ci_low, found.ci_high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-5)
    assert found.p_value == 1.0, "the only cluster that changed may as well have changed the other way"
    assert found.num_pairs == 4
    assert found.method == "paired t interval over 3 clusters; sign-flip test, exact"


def test_the_mean_of_copies_has_the_interval_of_the_originals():
    once = compute_mean_interval([1, 0, 1, 1, 0, 0.5])
    names = [str(n) for n in range(6) for _ in range(7)]
    assert compute_mean_interval([v for v in (1, 0, 1, 1, 0, 0.5) for _ in range(7)], names=names) == pytest.approx(
        once
    )
    low, high = compute_mean_interval([1.0] * 35, names=[str(n // 7) for n in range(35)])[1:]
    assert (low, high) == pytest.approx(compute_mean_interval([1.0] * 5)[1:]), "five prompts, each seven times"
    shares = [v for v in (1.0, 0, 1, 1, 0) for _ in range(7)]
    copied = compute_mean_interval(shares, names=[str(n // 7) for n in range(35)])
    assert copied[2] - copied[1] > 2 * (compute_mean_interval(shares)[2] - compute_mean_interval(shares)[1])


def test_independent_values_of_clusters():
    assert count_independent(["a", "a", "b", "b"]) == 2
    assert count_independent(["a", "a", "a", "b"]) == pytest.approx(1.6)
    assert count_independent(["a", "b", "c"]) == 3


def test_copies_of_examples_in_a_cluster_bring_no_certainty():
    base, tuned = arm(0, 1, 0, 1, 0, 0), arm(1, 1, 1, 0, 1, 1)
    once = compute_paired_difference(base, tuned)
    more_base, more_tuned = ({f"{key}/{n}": v for key, v in each.items() for n in range(5)} for each in (base, tuned))
    clusters = {key: key.partition("/")[0] for key in more_base}
    five = compute_paired_difference(more_base, more_tuned, clusters=clusters)
    assert (five.ci_low, five.ci_high, five.p_value) == pytest.approx((once.ci_low, once.ci_high, once.p_value))
    blind = compute_paired_difference(more_base, more_tuned)
    assert blind.ci_low > 0 > once.ci_low, "without clusters, copies would have been an improvement"


def test_equal_differences_are_bounded_by_the_number_of_clusters():
    clusters = {f"e{n}": str(n // 4) for n in range(12)}
    found = compute_paired_difference(arm(*[0] * 12), arm(*[1] * 12), clusters=clusters)
    assert found.ci_low == pytest.approx(compute_paired_difference(arm(0, 0, 0), arm(1, 1, 1)).ci_low)
    one = compute_paired_difference(arm(0, 1), arm(1, 1), clusters={"e0": "a", "e1": "a"})
    assert (one.ci_low, one.ci_high) == (None, None)


def test_clusters_with_equal_means_do_not_claim_certainty():
    # in each of six conversations one of two examples improves: no cluster differs from the others
    clusters = {f"e{n}": str(n // 2) for n in range(12)}
    found = compute_paired_difference(arm(*[0] * 12), arm(*[0, 1] * 6), clusters=clusters)
    q = 1 - 0.025 ** (1 / 6)
    assert (found.ci_low, found.ci_high) == pytest.approx((0.5 * (1 - q) - q, 0.5 * (1 - q) + q))
    assert found.method == "exact bound for equal differences over 6 clusters; sign-flip test, exact"
