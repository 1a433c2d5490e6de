"""P-values by hand, and the threshold that they lead to."""

import numpy as np
import pytest

from reinforge.routing.risk import (
    calibrate,
    compute_betting_p_values,
    compute_bounded_p_values,
    compute_p_values,
)

MARGIN = 0.02


def losses(count, num_losses):
    values = np.zeros((1, count))
    values[0, :num_losses] = 1
    return values


@pytest.mark.parametrize(
    ("num_losses", "expected"),
    [(0, 0.98**200), (1, 0.98**200 + 200 * 0.02 * 0.98**199), (4, 1.0), (9, 1.0)],
)
def test_the_binomial_probability_of_no_more_losses(num_losses, expected):
    assert compute_bounded_p_values(losses(200, num_losses), MARGIN) == pytest.approx(expected)


def test_losses_between_0_and_1_get_the_bound_of_hoeffding_and_bentkus():
    """Losses of 0.005: kl(0.005, 0.02) = 0.00818, and e P(Bin(200, 0.02) <= 1) = 2.718 * 0.0894 = 0.243 is larger."""
    assert compute_bounded_p_values(np.full((1, 200), 0.005), MARGIN) == pytest.approx(
        np.exp(-200 * 0.0081834), rel=1e-3
    )
    # of 1,000, e P(Bin(1000, 0.02) <= 5) = 2.718 * 0.000064 is the smaller one
    assert compute_bounded_p_values(np.full((1, 1000), 0.005), MARGIN) == pytest.approx(1.74e-4, rel=1e-2)


def test_the_capital_of_a_gambler_by_hand():
    """Bets of sqrt(2 log(1 / 0.99) / (2 * 0.02)) = 0.709 and, after a gain of 0.5, sqrt(0.0201 / 0.27) = 0.273.

    At the level 0.05 both are capped at 0.8.
    """
    gains = np.array([[0.5, 0.5]])
    assert compute_betting_p_values(gains, 1.0, 0.99) == pytest.approx(1 / (1.3544 * 1.1364), rel=1e-3)
    assert compute_betting_p_values(gains, 1.0, 0.05) == pytest.approx(1 / (1.4 * 1.4))
    assert compute_betting_p_values(np.array([[0.5, -0.25]]), 1.0, 0.05) == pytest.approx(1 / 1.4), "the largest"
    assert compute_betting_p_values(np.array([[-0.25, 0.1]]), 1.0, 0.05) == 1.0


def test_gains_of_the_student_count_in_the_bets_alone():
    """60 lost and 58 won of 3,000: the losses alone are at the margin, their balance is far below."""
    values = np.concatenate([np.ones(60), -np.ones(58), np.zeros(2882)])[None]
    assert compute_bounded_p_values(np.maximum(values, 0), MARGIN) > 0.5
    assert compute_p_values(values, MARGIN, 0.05)[0] < 0.001


@pytest.mark.parametrize("size", [1, 4])
def test_p_values_are_valid_at_the_edge(size):
    """Of 1,000 sets whose mean loss is the margin, at most 5 % get a p-value of 0.05 (own error 0.7 %)."""
    random = np.random.default_rng(size)
    drawn = random.random((1000, 100))
    values = np.repeat(np.where(drawn < 0.05, 1.0, np.where(drawn > 0.97, -1.0, 0.0)), size, axis=1)
    codes = np.repeat(np.arange(100), size)
    assert (compute_p_values(values, MARGIN, 0.05, codes) <= 0.05).mean() <= 0.05
    if size > 1:  # without clusters, four copies of a request count as four
        assert (compute_p_values(values, MARGIN, 0.05) <= 0.05).mean() > 0.05


def requests(count=1000):
    """The student is right above a confidence of 0.4, and below it at every second request."""
    confidences = (np.arange(count) * 7919 % count) / count
    student = np.where(confidences >= 0.4, 1.0, np.arange(count) % 2)
    return confidences, student, np.ones(count)


def test_the_lowest_threshold_that_keeps_the_promise():
    thresholds = [0.9, 0.8, 0.6, 0.4, 0.38, 0.3, 0.1]
    found = calibrate(*requests(), MARGIN, thresholds=thresholds)
    assert found.kept == (0.9, 0.8, 0.6, 0.4, 0.38)  # ten losses of 1,000 at 0.38: P(Bin <= 10) = 0.0102
    assert (found.threshold, found.share, found.num_requests) == (0.38, 0.62, 1000)
    assert found.share_low < 0.62 < found.share_high
    assert [point.share for point in found.curve] == pytest.approx([0.1, 0.2, 0.4, 0.6, 0.62, 0.7, 0.9])
    assert found.curve[3].difference == 0
    assert found.curve[5].difference == pytest.approx(-0.05)
    assert found.curve[5].p_value == 1
    told = (
        "62% of the requests stay local [59%, 65%]: not worse than the teacher by more than 0.02 with 95 % confidence"
    )
    assert str(found).startswith(told)


def test_testing_stops_at_the_first_threshold_that_fails():
    confidences, student, teacher = requests()
    student = np.where(confidences >= 0.9, 0.0, 1.0)  # sure and wrong
    found = calibrate(confidences, student, teacher, MARGIN, thresholds=[0.9, 0.5, 0.1])
    assert (found.threshold, found.kept, found.share, found.difference) == (None, (), 0.0, 0.0)
    assert str(found).startswith("No request stays local: no threshold was shown to lose at most 0.02 with 95 % ")


def test_a_threshold_that_no_request_reaches_says_so():
    found = calibrate(*requests(), MARGIN, thresholds=[1.5, 0.1])
    assert (found.threshold, found.share) == (1.5, 0.0)
    lowest = "the lowest threshold that was shown to lose at most 0.02 with 95 % confidence is 1.5"
    assert str(found) == f"No request stays local: {lowest}, above the confidences of all 1,000 requests"
    few = calibrate(*requests(), MARGIN, thresholds=[0.998, 0.1])
    assert str(few).startswith("less than 1% of the requests stay local [0%, 1%]: ")


def test_without_thresholds_a_tenth_of_the_requests_gives_them():
    found = calibrate(*requests(), MARGIN)
    assert found.num_requests == 900
    assert 0.3 < found.threshold <= 0.45
    assert calibrate(*requests(), MARGIN) == found, "the same seed"
    assert calibrate(*requests(), MARGIN, seed=1) != found


def test_conversations_count_once():
    values = [np.repeat(each, 5) for each in requests(200)]
    names = [f"chat {n // 5}" for n in range(1000)]
    one = calibrate(*requests(200), MARGIN, thresholds=[0.9, 0.6, 0.4])
    many = calibrate(*values, MARGIN, clusters=names, thresholds=[0.9, 0.6, 0.4])
    assert (many.num_requests, many.num_clusters) == (1000, 200)
    assert many.kept == one.kept == (0.9, 0.6, 0.4)
    assert (many.share_low, many.share_high) == pytest.approx((one.share_low, one.share_high), abs=0.01)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"confidences": [0.1]}, "one confidence, two scores and one cluster of each request"),
        ({"confidences": [float("nan")] * 100}, "finite confidences and scores from 0 to 1"),
        ({"student_scores": [2.0] * 100}, "finite confidences and scores from 0 to 1"),
        ({"margin": 0.0}, "a margin between 0 and 1"),
        ({"clusters": ["one"] * 100}, "requests of two clusters or more"),
    ],
)
def test_what_cannot_be_calibrated_is_an_error(change, said):
    names = ("confidences", "student_scores", "teacher_scores")
    given = {**dict(zip(names, requests(100), strict=True)), "margin": MARGIN, **change}
    with pytest.raises(ValueError, match=said):
        calibrate(**given)
