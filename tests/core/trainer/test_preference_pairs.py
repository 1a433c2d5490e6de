"""Candidates of a turn become preference pairs."""

import json
from collections import Counter

import pytest

from reinforge.files import to_json
from reinforge.runs.journal.episode_json import dump_episode, parse_episode
from reinforge.trainer.builders.preference_pairs import (
    CandidateStep,
    DPOTrajectoryBuilder,
    DPOTrajectoryBuilderConfig,
    find_candidates,
    make_turn_pairs,
)
from reinforge.types.episode import EpisodeKey, EpisodeRecord, Mark
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.steps import IntermediateStepPayload, IntermediateStepType, TTCEventData
from reinforge.types.trajectory import Outcome


def candidates(**scores):
    return [CandidateStep("e", "t", index, "q", name, score) for index, (name, score) in enumerate(scores.items())]


def pairs_of(turn, **settings):
    left_out = Counter()
    made = make_turn_pairs(turn, DPOTrajectoryBuilderConfig(**settings), left_out)
    return [pair.chosen.response + pair.rejected.response for pair in made], dict(left_out)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["ac", "ab", "bc"]),
        ({"exhaustive_pairs": False}, ["ac"]),
        ({"min_score_diff": 0.4}, ["ac", "ab"]),
        ({"max_pairs_per_turn": 2}, ["ac", "ab"]),
    ],
)
def test_the_pairs_of_a_turn(settings, expected):
    assert pairs_of(candidates(b=0.5, a=0.9, c=0.2), **settings)[0] == expected


def test_ties_and_equal_texts_and_single_candidates_make_no_pair():
    assert pairs_of(candidates(a=0.5, b=0.5)) == ([], {"pairs whose scores are too close": 1})
    same = [CandidateStep("e", "t", index, "q", "a", score) for index, score in enumerate((0.1, 0.9))]
    assert pairs_of(same) == ([], {"pairs of equal replies": 1})
    assert pairs_of(candidates(a=0.5)) == ([], {"turns with a single candidate": 1})
    other = [CandidateStep("e", "t", 0, "q", "a", 1.0), CandidateStep("e", "t", 1, "p", "b", 0.0)]
    assert pairs_of(other) == ([], {"turns whose candidates answer different prompts": 1})


def record(*marks, generation=0, outcome=Outcome.OK):
    item = EvalInputItem(id="e", input_obj="q", expected_output_obj=None, full_dataset_entry={})
    made = EpisodeRecord(EpisodeKey("collect", 0, "e", generation), item, outcome=outcome)
    made.marks = [Mark(0, None, data, (), 0.0) for data in marks]
    return made


def event(score, output, **fields):
    return TTCEventData(**{"turn_id": "t1", "input": "q", "score": score, "output": output, **fields})


def step(name):
    return IntermediateStepPayload(event_type=IntermediateStepType.TTC_END, name=name, data=event(0.1, name), UUID="u")


def test_candidates_are_events_of_the_agent_and_steps_of_the_configured_name():
    left_out = Counter()
    marks = [event(0.9, "own"), step("dpo_candidate_move"), step("other"), {"note": 1}, event(None, "unscored")]
    found = find_candidates(record(*marks), "dpo_candidate_move", left_out)
    assert [candidate.response for candidate in found] == ["own", "dpo_candidate_move"]
    assert left_out == {"candidates without score, input or output": 1}


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_no_number_makes_no_pair(score):
    """Compared with anything, NaN is neither greater nor less: its pairs were kept, with the reward NaN."""
    left_out = Counter()
    found = find_candidates(record(event(0.9, "a"), event(score, "b")), "dpo_candidate_move", left_out)
    assert [candidate.response for candidate in found] == ["a"]
    assert left_out == {"candidates whose score is not finite": 1}


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


@pytest.mark.parametrize(
    "fields",
    [
        {"input": [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "user", "content": "q"}]},
        {"input": [{"role": "tool", "content": "2", "tool_call_id": "c1"}]},
        {"output": {"role": "assistant", "content": None, "tool_calls": [CALL]}},
    ],
)
def test_candidates_with_tool_calls_are_left_out_and_counted(fields):
    """A pair holds role and content only: trained without its calls, a prompt is one that the model never had."""
    left_out = Counter()
    data = TTCEventData(**{"turn_id": "t1", "input": "q", "score": 0.5, "output": "a", **fields})
    assert find_candidates(record(data), "dpo_candidate_move", left_out) == []
    assert left_out == {"candidates with tool calls, which a pair of strings cannot hold": 1}


def test_candidates_from_the_journal_are_the_same():
    item = EvalInputItem(id="e", input_obj="q", expected_output_obj=None, full_dataset_entry={})
    fresh = record(event(0.9, "a"), step("dpo_candidate_move"), {"note": 1})
    read = parse_episode(json.loads(to_json(dump_episode(fresh))), item)
    expected = find_candidates(fresh, "dpo_candidate_move", Counter())
    assert len(expected) == 2
    assert find_candidates(read, "dpo_candidate_move", Counter()) == expected


async def test_equal_pairs_of_several_episodes_are_kept_once_and_missing_ones_make_none():
    builder = DPOTrajectoryBuilder(DPOTrajectoryBuilderConfig(num_generations=3))
    marks = [
        event(0.9, "a", input=[{"role": "user", "content": "q"}]),
        event(0.2, "b", input=[{"role": "user", "content": "q"}]),
    ]
    records = [
        record(*marks),
        record(*marks, generation=1),
        record(event(1.0, "c"), event(0.0, "d"), generation=2, outcome=Outcome.TOOL_ERROR),
    ]
    ((trajectory,),) = await builder._build_groups(records, {})
    (item,) = trajectory.pairs
    assert [message.model_dump() for message in item.prompt] == [{"role": "user", "content": "q"}]
    assert (item.chosen_response, item.rejected_response) == ("a", "b")
    assert trajectory.reward == pytest.approx(0.7)
    assert trajectory.metadata["chosen_score"] == 0.9
    assert builder.take_notes() == ["1 preference pairs; left out: 1 pairs twice"]
    assert builder.take_notes() == []
