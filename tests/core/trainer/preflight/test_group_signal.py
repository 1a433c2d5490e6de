"""The share of groups with signal: measured, and predicted for other group sizes."""

import numpy as np
import pytest

from reinforge.evaluation.statistics import compute_mean_interval, count_independent, predict_share
from reinforge.trainer.preflight.analysis import measure_signal_share, predict_signal_share


def test_groups_with_different_rewards_are_counted():
    groups = [[0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]]
    assert measure_signal_share(groups) == 0.5
    assert measure_signal_share([*groups, [1]]) == 0.5, "one reply says nothing"
    assert measure_signal_share([]) is None
    assert measure_signal_share([[1]]) is None


def test_a_spread_below_the_configured_one_is_no_signal():
    groups = [[0.0, 0.05], [0.0, 0.1], [0.0, 0.5]]
    assert measure_signal_share(groups, 0.1) == pytest.approx(2 / 3)
    assert predict_signal_share([[0.0, 0.04]] * 20, 8, 0.1) == 0.0
    assert predict_signal_share([[0.0, 0.04]] * 20, 8, 0.01) > 0.9


def test_examples_that_are_all_alike_follow_the_binomial():
    """Half of all replies are right, and every example has one or two or three of four: 1 - 2 * 0.5^G."""
    mixed = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]] * 8
    assert predict_signal_share(mixed, 4) == pytest.approx(1 - 2 * 0.5**4, abs=0.02)
    assert predict_signal_share(mixed, 8) == pytest.approx(1 - 2 * 0.5**8, abs=0.02)


def test_examples_that_are_always_or_never_solved_have_no_signal_at_any_size():
    groups = [[1, 1, 1, 1], [0, 0, 0, 0]] * 10
    assert predict_signal_share(groups, 4) < 0.03
    assert predict_signal_share(groups, 32) < 0.06


def test_a_prediction_at_the_measured_size_is_near_the_measurement():
    groups = [[0, 0, 0, 0]] * 8 + [[1, 0, 0, 0]] * 4 + [[1, 1, 0, 0]] * 4 + [[1, 1, 1, 1]] * 4
    assert predict_signal_share(groups, 4) == pytest.approx(measure_signal_share(groups), abs=0.08)
    sizes = [predict_signal_share(groups, size) for size in (2, 4, 8, 16, 32)]
    assert sizes == sorted(sizes), "larger groups have signal more often"


def test_rewards_of_one_value_are_no_signal_and_none_are_unknown():
    assert predict_signal_share([[0, 0], [0, 0]], 32) == pytest.approx(0.0)
    assert predict_signal_share([], 8) is None


@pytest.mark.parametrize(
    ("a", "b", "size", "num_run"), [(2, 2, 8, 64), (0.2, 3, 16, 8), (20, 20, 16, 8), (1, 100, 8, 64)]
)
def test_intervals_cover_what_runs_measure(a, b, size, num_run):
    """Examples with success rates Beta(a, b), 20 of them four times each, and then a run's first epoch and baseline."""
    random, covered = np.random.default_rng(0), np.zeros(2)
    names = [str(n // 4) for n in range(80)]
    for _ in range(150):
        sampled = (random.random((20, 4)) < random.beta(a, b, (20, 1))).astype(float)
        run = random.random((num_run, size)) < random.beta(a, b, (num_run, 1))
        share = predict_signal_share(sampled.tolist(), size)
        low, high = predict_share(share, count_independent(names) * 4 / size, num_run)
        covered[0] += low <= np.mean(run.any(1) & ~run.all(1)) <= high
        base = float(np.mean(random.random(num_run) < random.beta(a, b, num_run)))
        _, low, high = compute_mean_interval(sampled.ravel().tolist(), names=names, num_future=num_run)
        covered[1] += low <= base <= high
    assert (covered / 150 >= 0.93).all(), covered / 150
