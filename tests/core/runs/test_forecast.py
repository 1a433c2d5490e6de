"""Share and time left of a run, with numbers that can be added up by hand."""

from dataclasses import replace

import pytest

from reinforge.runs.forecast import COLLECT, HELD_OUT, TRAIN, Forecast, RunSize
from reinforge.trainer.preflight.durations import PredictedTime, TimePart, predict_each

SIZE = RunSize(
    num_epochs=4, examples_per_epoch=5, group_size=4, groups_per_example=1, num_select=10, num_validations=2,
    num_confirm=20, num_samples=1,
)  # fmt: skip
"""80 episodes to collect, 10 + 2 x 10 to validate, 40 for the verdict, 4 epochs to train."""
EACH = {HELD_OUT: 1.0, COLLECT: 0.5, TRAIN: 5.0}
"""70 x 1 + 80 x 0.5 + 4 x 5 = 130 s."""


def after(stages, predicted=None):
    forecast = Forecast(SIZE, predicted or {})
    for stage, seconds, num_done in stages:
        forecast.end_stage(stage, seconds, num_done)
    return forecast


def test_the_costs_of_a_preflight_give_the_time_before_anything_was_measured():
    share, left_s = Forecast(SIZE, EACH).estimate(None, "LOAD", 3.0, 0)
    assert (share, left_s) == (0.0, pytest.approx(130))
    parts = {"baseline": 10, "validate": 20, "verdict": 40, "collect": 40, "train": 12, "publish": 8}
    assert predict_each(SIZE, PredictedTime([TimePart(name, seconds, "") for name, seconds in parts.items()])) == EACH
    assert predict_each(SIZE, PredictedTime([TimePart("train", None, "")])) == {}, "no training was measured"


def test_without_a_preflight_the_running_stage_tells():
    """5 of 10 episodes in 10 s: 2 s each for 65 + 80 that are left, and training guessed at 2 x 2 s x 20 an epoch."""
    assert Forecast(SIZE, {}).estimate(None, "BASELINE", 1.0, 0) is None
    slow = Forecast(replace(SIZE, num_select=50), {})
    assert slow.estimate(None, "BASELINE", 29.0, 1) is None, "the first of many that run at once"
    assert slow.estimate(None, "BASELINE", 30.0, 1) is not None, "there is nothing better"
    share, left_s = Forecast(SIZE, {}).estimate(None, "BASELINE", 10.0, 5)
    assert left_s == pytest.approx(2 * (65 + 80) + 4 * 80)
    assert share == pytest.approx(5 * 2 / (2 * 150 + 4 * 80))


def test_the_first_episodes_of_a_stage_do_not_count_against_what_is_known():
    """2 of 20 episodes are a tenth; the first one alone, after 30 s of all 20 at once, says nothing about the speed."""
    early, _ = Forecast(SIZE, EACH).estimate(0, "COLLECT", 30.0, 1)
    assert early == pytest.approx((10 + 1 * 0.5) / 130)
    _, left_s = Forecast(SIZE, EACH).estimate(0, "COLLECT", 30.0, 2)
    assert left_s == pytest.approx(60 + 78 * 15 + 20)


def test_a_training_job_is_measured_by_its_share_or_else_by_its_time():
    known = after([("BASELINE", 10.0, 10), ("COLLECT", 10.0, 20)], EACH)
    assert known.estimate(0, "AWAIT", 3.0, 0)[1] == pytest.approx(60 + 60 * 0.5 + 20 - 3)
    assert known.estimate(0, "AWAIT", 60.0, 0)[1] == pytest.approx(60 + 60 * 0.5 + 15), "not less than the other epochs"
    assert known.estimate(0, "AWAIT", 4.0, 0.5)[1] == pytest.approx(60 + 60 * 0.5 + 3.5 * 8)


def test_each_stage_leaves_what_follows_it():
    known = after([("BASELINE", 10.0, 10), ("COLLECT", 10.0, 20), ("AWAIT", 5.0, 0)], EACH)
    assert known.estimate(0, "ADOPT", 0.0, 0)[1] == pytest.approx(60 + 60 * 0.5 + 15)
    assert known.estimate(1, "VALIDATE", 4.0, 4)[1] == pytest.approx(10 + 40 + 6 + 40 * 0.5 + 10)
    assert known.estimate(None, "CONFIRM_BASE", 5.0, 5)[1] == pytest.approx(15 + 20)
    assert known.estimate(None, "CONFIRM_TUNED", 0.0, 20) == (1.0, 0.0)
    assert known.estimate(None, "TRANSFER_BASE", 0.0, 3) == (1.0, 0.0)


def test_a_run_that_is_followed_has_the_planned_episodes_of_ended_stages():
    share, left_s = after([("BASELINE", 20.0, 0), ("COLLECT", 20.0, 0), ("AWAIT", 7.0, 0)]).estimate(
        1, "COLLECT", 0.0, 0
    )
    assert left_s == pytest.approx(2 * (15 + 40) + 60 * 1 + 3 * 7)
    assert share == pytest.approx(1 - left_s / (2 * 70 + 80 * 1 + 4 * 7))


def test_rows_that_are_only_trained_on_are_known_once_a_job_has_moved():
    rows = Forecast(RunSize(1, 100, 0, 1, 10, 1, 20, 1), {})
    rows.end_stage("BASELINE", 10.0, 10)
    assert rows.estimate(0, "AWAIT", 30.0, 0) is None
    assert rows.estimate(0, "AWAIT", 30.0, 0.25)[1] == pytest.approx(90 + 10 + 40)
