"""The commonest reason beside a count of missing scores."""

from reinforge.evaluation import reasons
from reinforge.evaluation.reasons import ReasonCounts, find_commonest_reason, find_unscored_reason
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem
from reinforge.types.trajectory import Outcome


def test_reasons_that_differ_in_numbers_count_as_one():
    assert find_commonest_reason(["timeout", "no row 3", "no row 18"]) == "no row 3 (2 of 3)"
    assert find_commonest_reason(["no row 3", "no row 18"]) == "no row 3"
    assert find_commonest_reason([]) is None


def test_a_reason_is_one_short_line_without_control_codes():
    text = find_commonest_reason(["Error:\n\x1b[31mred " + "x" * 1000])
    assert text.startswith("Error: \\x1b[31mred xxx")
    assert len(text) == reasons.MAX_REASON_CHARACTERS
    assert text.endswith("...")


def test_counts_come_back_and_stay_bounded():
    """An agent may fail with a new text in each of a million episodes."""
    counts = ReasonCounts()
    for number in range(500):
        counts.add("no row " + "x" * (number % 200))
    assert len(counts.as_dict()) == reasons.MAX_KINDS + 1
    assert sum(counts.as_dict().values()) == 500
    assert ReasonCounts(counts.as_dict()).find_commonest() == counts.find_commonest()


def test_an_unscored_example_is_explained_by_its_episode_or_by_its_evaluator():
    def record(outcome, reason, **scores):
        item = EvalInputItem(id="1", input_obj="q", expected_output_obj="a", full_dataset_entry={})
        made = EpisodeRecord(EpisodeKey("validate", 0, "1", 0), item, seed=0, outcome=outcome, reason=reason)
        made.scores = {
            name: EvalOutputItem(id="1", score=None, reasoning=None, error=error) if error else
            EvalOutputItem(id="1", score=1.0, reasoning=None)
            for name, error in scores.items()
        }  # fmt: skip
        return made

    broken = record(Outcome.TOOL_ERROR, "AttributeError")
    half = record(Outcome.OK, None, wins=None, judge="the judge is silent")
    assert find_unscored_reason([broken, half], "wins") == "tool_error: AttributeError"
    assert find_unscored_reason([half], "judge") == "the judge is silent"
    assert find_unscored_reason([half], "wins") is None
