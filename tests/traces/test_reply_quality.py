"""Which recorded replies are too bad to be imitated."""

import pytest

from reinforge.traces.reply_quality import find_bad_replies


@pytest.mark.parametrize(
    ("scores", "floor", "text"),
    [
        ([1, 1, 0, 1], 0.5, "score 0.750 on average; nothing is trained on the 1 below 0.5"),
        ([0.9, 0.7, 0.8, 0.3], 0.45, "score 0.675 on average; nothing is trained on the 1 below 0.45"),
        ([1, None, 0, 1], 0.5, "score 0.667 on average; 1 have no score; nothing is trained on the 1 below 0.5"),
        ([0.9, 0.7, 0.8, 0.6], None, "score 0.750 on average; all are trained on"),
        ([1, 0, 0, 0], None, "score 0.250 on average; all are trained on"),
        ([0, 0, 0, 0], None, "score 0.000 on average; all are trained on"),
        ([None] * 4, None, "the evaluator has no score for any recorded reply; all are trained on"),
    ],
)
def test_replies_below_half_of_the_best_score_are_not_imitated_if_enough_others_are_left(scores, floor, text):
    found = find_bad_replies({f"r{number}": score for number, score in enumerate(scores)}, 2)
    assert found.floor == floor
    assert str(found).endswith(text)
