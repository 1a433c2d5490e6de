"""Not worse by more than a margin: hand-checked intervals, examples that are still needed, slices, and errors."""

import numpy as np
import pytest

from reinforge.evaluation.non_inferiority import (
    NonInferiority,
    find_slices,
    judge_non_inferiority,
    judge_slices,
    judge_with_slices,
)
from reinforge.types.evaluation import EvalInputItem


def judge(student, teacher, margin, clusters=None, confidence=0.95):
    arms = ({str(n): float(score) for n, score in enumerate(scores)} for scores in (student, teacher))
    return judge_non_inferiority(*arms, clusters, margin, confidence)


def test_equal_scores_of_0_and_1_exclude_a_loss_that_enough_examples_would_have_shown():
    """Without a difference the score interval ends at z^2 / (n + z^2): 3.8415 / 203.8415 for 200 examples."""
    found = judge([1, 0] * 100, [1, 0] * 100, 0.02)
    assert (found.outcome, found.num_more) == ("not worse", None)
    assert (found.ci_low, found.ci_high) == (pytest.approx(-0.018845, abs=1e-6), pytest.approx(0.018845, abs=1e-6))
    # (1.96 + 0.8416)^2 * 0.98 / 0.02 = 384.6
    found = judge([1, 0] * 75, [1, 0] * 75, 0.02)
    assert (found.outcome, found.num_more) == ("not decided", 385 - 150)


def test_one_lost_example_of_200_does_not_exclude_a_loss_of_two_percent():
    """Student's t would: -0.005 +- 1.97 * 0.005. Tango's statistic is (4 - 1) / sqrt(200 * 0.0196) = 1.515."""
    found = judge([0] + [1] * 199, [1] * 200, 0.02)
    assert found.outcome == "not decided"
    assert found.difference == -0.005
    assert found.num_more == 484  # 200 * (2.8016 / 1.5152)^2 = 683.7


@pytest.mark.parametrize(
    ("lost", "gained", "margin", "outcome"),
    [(6, 8, 0.05, "not worse"), (6, 8, 0.02, "not decided"), (40, 4, 0.05, "worse"), (20, 8, 0.05, "not decided")],
)
def test_outcomes_of_200_examples(lost, gained, margin, outcome):
    teacher = [1] * lost + [0] * gained + [1] * (200 - lost - gained)
    student = [0] * lost + [1] * gained + [1] * (200 - lost - gained)
    found = judge(student, teacher, margin)
    assert found.outcome == outcome
    assert found.ci_low < (gained - lost) / 200 == found.difference < found.ci_high
    mirrored = judge(teacher, student, margin)
    assert (mirrored.ci_low, mirrored.ci_high) == pytest.approx((-found.ci_high, -found.ci_low), abs=1e-9)


def test_other_scores_get_the_interval_of_student():
    """Differences +-0.02 of 10 examples: standard deviation 0.02108, error 0.00667, times t 2.262."""
    student = [0.52, 0.48] * 5
    found = judge(student, [0.5] * 10, 0.02)
    assert (found.outcome, found.ci_low) == ("not worse", pytest.approx(-0.01508, abs=1e-5))
    assert found.method == "paired t interval"
    found = judge(student, [0.5] * 10, 0.01)
    assert (found.outcome, found.num_more) == ("not decided", 25)  # (2.8016 * 0.02108 / 0.01)^2 = 34.9
    assert judge([0.4, 0.42] * 5, [0.5] * 10, 0.02).outcome == "worse"


def test_examples_of_one_conversation_count_once():
    student, teacher = [0] * 10 + [1] * 190, [1] * 200
    clusters = {str(n): f"chat {n // 10}" for n in range(200)}
    assert judge(student, teacher, 0.1).outcome == "not worse"
    found = judge(student, teacher, 0.1, clusters)
    assert (found.outcome, found.num_pairs, found.num_clusters) == ("not decided", 200, 20)
    assert found.method == "score interval for paired proportions over 20 clusters"
    equal = judge([1] * 200, [1] * 200, 0.1, clusters)  # like 20 examples: 3.84 / 23.84
    assert equal.ci_low == pytest.approx(-0.1611, abs=1e-4)


def test_unknown_spread_decides_nothing():
    found = judge([0.5] * 20, [0.5] * 20, 0.02)
    assert (found.outcome, found.ci_low, found.num_more) == ("not decided", None, None)
    one = judge([0, 1] * 10, [1] * 20, 0.02, {str(n): "one" for n in range(20)})
    assert (one.outcome, one.ci_low) == ("not decided", None)


@pytest.mark.parametrize(("margin", "count"), [(0.0, 5), (-0.1, 5), (float("nan"), 5), (0.1, 1)])
def test_what_cannot_be_judged_is_an_error(margin, count):
    with pytest.raises(ValueError, match="expected a margin above 0 and two examples with both scores"):
        judge([1] * count, [1] * count, margin)


def test_the_sentence():
    found = NonInferiority("not worse", 0.02, -0.004, -0.015, 0.007, 1200, 900, None, 0.95, "", "logs")
    shown = (
        "not worse than logs by more than 0.02 (difference -0.004 [-0.015, +0.007] on 1,200 examples of 900 prompts)"
    )
    assert str(found) == shown
    found = NonInferiority("not decided", 0.02, -0.01, -0.03, 0.01, 300, 300, 400, 0.95, "")
    assert str(found).startswith("not decided whether it is worse than the teacher by more than 0.02 (")
    assert str(found).endswith("; about 400 more examples are needed")


def make_item(number, **row):
    call = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "search"}}]}]
    expected = call if number % 2 else "text"
    given = "x" * (1 + number)
    return EvalInputItem(id=str(number), input_obj=given, expected_output_obj=expected, full_dataset_entry=row)


def test_slices_by_tag_tool_length_and_day():
    days = ["2026-01-01T10:00:00Z", "2026-01-02", "soon", 7]
    items = [
        make_item(number, tags=["billing", "mail"] if number < 2 else [], date=days[number]) for number in range(4)
    ]
    assert find_slices(items) == {
        "tag billing": ["0", "1"],
        "tag mail": ["0", "1"],
        "tool search": ["1", "3"],
        "length short": ["0", "1"],
        "length medium": ["2"],
        "length long": ["3"],
        "day 2026-01-01": ["0"],
        "day 2026-01-02": ["1"],
    }
    assert find_slices([make_item(0, tag="a", tags=5), make_item(1)])["length short"] == ["0"]


def test_slices_hold_together_and_small_ones_are_left_out():
    teacher = {str(n): 1.0 for n in range(40)}
    student = {**teacher, **{str(n): 0.0 for n in range(10)}}
    slices = {"tag a": [str(n) for n in range(20)], "tag b": [str(n) for n in range(20, 40)], "tag c": ["1"]}
    found = judge_slices(student, teacher, None, 0.1, {**slices, "all": list(teacher)})
    assert list(found) == ["tag a", "tag b"]
    assert found["tag a"].confidence == 0.975  # of two
    assert [each.outcome for each in found.values()] == ["worse", "not decided"]
    whole = judge_with_slices(student, teacher, None, 0.1, [make_item(n, tag="odd"[n % 2]) for n in range(40)], "logs")
    assert whole.slices["tag o"].reference == whole.reference == "logs"
    assert NonInferiority.from_dict(whole.as_dict()) == whole


@pytest.mark.parametrize(
    ("gained", "lost", "count"),
    [
        (0.0, 0.05, 100),
        pytest.param(0.03, 0.08, 200, marks=pytest.mark.slow),
        pytest.param(0.01, 0.06, 400, marks=pytest.mark.slow),
    ],
)
def test_a_model_that_is_worse_by_the_margin_is_seldom_called_not_worse(gained, lost, count):
    """Of 1,000 comparisons at the edge of the margin at most 2.5 % pass, and their own error is 0.5 %."""
    random = np.random.default_rng([count, int(100 * lost)])
    found = 0
    for _ in range(1000):
        draws = random.random(count)
        teacher = np.where(draws < lost, 1, 0)
        student = np.where(draws > 1 - gained, 1, 0)
        found += judge(student, teacher, 0.05).outcome == "not worse"
    assert found / 1000 <= 0.035
