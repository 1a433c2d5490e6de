"""Every evaluator before and after, and the warning about a gain of one part alone."""

import pytest

from reinforge.evaluation.changes import MetricChange, compare_reports, find_one_sided_gain
from reinforge.types.evaluation import EvaluationReport

NONE, HALF, ALL = [0.0] * 20, [0.0, 1.0] * 10, [1.0] * 20


def report(num_examples=20, **scores):
    by_metric = {name: {f"e{n}": s for n, s in enumerate(values) if s is not None} for name, values in scores.items()}
    return EvaluationReport("confirm", 0, by_metric, num_examples, {}, next(iter(scores)))


def compare(weights, **arms):
    base = report(**{name: before for name, (before, _) in arms.items()})
    tuned = report(**{name: after for name, (_, after) in arms.items()})
    return compare_reports(base, tuned, weights)


def test_every_evaluator_is_compared_on_the_examples_that_both_models_have():
    judge, other = compare({"judge": 0.8}, judge=([0.0] * 10 + [None] * 10, HALF), other=(HALF, ALL))
    assert (judge.before.num_examples, judge.after.mean, judge.improvement.mean_difference) == (10, 0.5, 0.5)
    assert (judge.weight, judge.after.num_unscored) == (0.8, 10)
    assert (other.weight, other.improvement.mean_difference) == (None, 0.5)


WEIGHTS = {"judge": 0.8, "format": 0.2}


def test_a_gain_of_one_part_alone_is_told():
    """The judge's part is 0 before and after, the format went from 0 to 1: the sum rose from 0 to 0.2."""
    text = find_one_sided_gain(compare(WEIGHTS, judge=(NONE, NONE), format=(NONE, ALL)))
    assert text.startswith(
        "the gain is that of format alone: format (weight 0.2) 0.000 -> 1.000; "
        "judge (weight 0.8) 0.000 -> 0.000 did not measurably move."
    )
    assert "finetuning.gate.metric: judge" in text


def test_a_part_that_fell_is_told():
    text = find_one_sided_gain(compare(WEIGHTS, judge=(ALL, HALF), format=(NONE, ALL)))
    assert "judge (weight 0.8) 1.000 -> 0.500 got worse" in text


def test_a_penalty_counts_the_other_way_round():
    weights = {"judge": 1.0, "length": -0.5}
    assert find_one_sided_gain(compare(weights, judge=(NONE, ALL), length=(ALL, NONE))) is None
    assert "length (weight -0.5) 0.000 -> 1.000 got worse" in find_one_sided_gain(
        compare(weights, judge=(NONE, ALL), length=(NONE, ALL))
    )


@pytest.mark.parametrize(
    "arms",
    [
        {"judge": (NONE, ALL), "format": (NONE, ALL)},
        {"judge": (NONE, NONE), "format": (NONE, NONE)},
        {"judge": (HALF, NONE), "format": (HALF, NONE)},
        {"format": (NONE, ALL)},
    ],
)
def test_no_warning_where_all_parts_rose_or_none_did(arms):
    assert find_one_sided_gain(compare(WEIGHTS, **arms)) is None


def test_evaluators_that_are_no_parts_of_the_reward_do_not_count():
    assert find_one_sided_gain(compare({}, judge=(NONE, NONE), format=(NONE, ALL))) is None


def test_a_change_comes_back_from_json():
    for change in [*compare(WEIGHTS, judge=(NONE, HALF), format=(HALF, ALL)), MetricChange("m", "select", None, None)]:
        assert MetricChange.from_dict(change.as_dict()) == change
