"""What the episodes of a stage have in common."""

from __future__ import annotations

import pytest

from reinforge.trainer.tally import EpisodeTally
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.trajectory import Outcome


def tally(*rewards, outcome=Outcome.OK, output="4", reason=None, question="2 + 2"):
    counted = EpisodeTally()
    for number, reward in enumerate(rewards):
        item = EvalInputItem(
            id=number, input_obj=question, expected_output_obj="four", output_obj=output, full_dataset_entry={}
        )
        counted.add(EpisodeRecord(EpisodeKey("collect", 0, str(number), 0), item, outcome, reason, reward=reward))
    return counted


def describe(counted):
    return counted.describe_constant_reward("right", "agent (task.py:3)")


@pytest.mark.parametrize(
    ("reward", "advice"),
    [
        (0.0, "If that answer should earn something, correct the evaluator right or the form of the answer"),
        (1.0, "the model solves every example already"),
        (0.5, "The evaluator right does not distinguish the answers"),
    ],
)
def test_a_constant_reward_says_which_with_question_answer_and_expected_value(reward, advice):
    text = describe(tally(*[reward] * 4))
    assert text.startswith(
        f'all 4 episodes have the reward {reward:g}; example 0: question "2 + 2", answer "4", expected "four". '
    )
    assert advice in text


def test_rewards_that_differ_or_are_few_say_nothing():
    assert describe(tally(0.0, 0.0, 0.0, 1.0)) is None
    assert describe(tally(0.0, 0.0, 0.0)) is None
    assert describe(tally(None, None, None, None, outcome=Outcome.TOOL_ERROR)) is None


def test_a_long_question_is_cut():
    assert f'question "{"x" * 157}..."' in describe(tally(0, 0, 0, 0, question="x" * 1000))


def test_policy_failures_are_told_as_that():
    text = describe(tally(0, 0, 0, 0, outcome=Outcome.POLICY_ERROR, reason="no JSON in the reply"))
    assert text == ("all 4 episodes failed by the policy's own fault (reward 0): policy_error: no JSON in the reply")


def test_an_agent_that_forgot_to_return_is_named_with_its_line():
    text = describe(tally(0, 0, 0, 0, output=None))
    assert text == (
        "all 4 episodes have the reward 0; agent (task.py:3) returned None in all 4 episodes: is a `return` missing?"
    )
    assert tally(0, 0, 0, 0).describe_none_outputs("agent (task.py:3)") is None
    failed = tally(None, None, None, None, outcome=Outcome.JUDGE_ERROR, output=None)
    assert failed.describe_none_outputs("agent (task.py:3)") is not None, "the evaluator could not score None"
