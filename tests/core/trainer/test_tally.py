"""What the episodes of a stage have in common."""

import pytest

from reinforge.trainer.context import EpisodeTally
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem
from reinforge.types.request import ModelReply, ModelRequest
from reinforge.types.trajectory import Outcome


def tally(*rewards, outcome=Outcome.OK, output="4", reason=None, question="2 + 2", expected="four"):
    counted = EpisodeTally()
    for number, reward in enumerate(rewards):
        item = EvalInputItem(
            id=number, input_obj=question, expected_output_obj=expected, output_obj=output, full_dataset_entry={}
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


@pytest.mark.parametrize(
    ("expected", "shown"), [(4, "4 (int)"), (4.0, None), ("4 ", '"4"')], ids=["type", "other", "space"]
)
def test_an_answer_without_reward_that_is_right_but_for_type_or_spaces_is_told_as_that(expected, shown):
    text = describe(tally(0, 0, 0, 0, output=" 4", expected=expected))
    assert ("They differ in type or in spaces" in text) == (shown is not None)
    assert f"expected {shown or '4.0 (float)'}. " in text


def test_rewards_that_differ_or_are_few_say_nothing():
    assert describe(tally(0.0, 0.0, 0.0, 1.0)) is None
    assert describe(tally(0.0, 0.0, 0.0)) is None
    assert describe(tally(None, None, None, None, outcome=Outcome.TOOL_ERROR)) is None


def test_of_a_conversation_the_last_message_is_quoted():
    asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2"}]
    assert 'question "2 + 2", answer "4"' in describe(tally(0, 0, 0, 0, question=asked))


def test_a_long_question_is_cut():
    assert f'question "{"x" * 157}..."' in describe(tally(0, 0, 0, 0, question="x" * 1000))


def test_policy_failures_are_told_as_that():
    text = describe(tally(0, 0, 0, 0, outcome=Outcome.POLICY_ERROR, reason="no JSON in the reply"))
    assert text == ("all 4 episodes failed because of the policy (reward 0): policy_error: no JSON in the reply")


def test_an_agent_that_forgot_to_return_is_named_with_its_line():
    text = describe(tally(0, 0, 0, 0, output=None))
    assert text == (
        "all 4 episodes have the reward 0; agent (task.py:3) returned None in all 4 episodes: is a `return` missing?"
    )
    assert tally(0, 0, 0, 0).describe_none_outputs("agent (task.py:3)") is None
    failed = tally(None, None, None, None, outcome=Outcome.JUDGE_ERROR, output=None)
    assert failed.describe_none_outputs("agent (task.py:3)") is not None, "the evaluator could not score None"


def test_figures_of_the_scored_episodes_do_not_depend_on_their_order():
    def call(num_tokens, finish_reason="stop"):
        reply = ModelReply({"role": "assistant", "content": ""}, finish_reason, None, num_completion_tokens=num_tokens)
        return ModelCall("c", "agent", "m", ModelRequest([]), reply, (), 0.0, 0.0)

    def episode(number, reward, *calls, outcome=Outcome.OK, **scores):
        item = EvalInputItem(id=number, input_obj="q", expected_output_obj=None, output_obj="", full_dataset_entry={})
        scored = {name: EvalOutputItem(id=number, score=score, reasoning=None) for name, score in scores.items()}
        key = EpisodeKey("collect", 0, str(number), 0)
        return EpisodeRecord(key, item, outcome, reward=reward, calls=list(calls), scores=scored)

    records = [
        episode(0, 0.0, call(4), call(6), correct=0, style=0.1),
        episode(1, 1.0, call(20, "length"), correct=1, style=None),
        episode(2, 0.5, call(30), correct=1, style=0.3),
        episode(3, None, call(99), outcome=Outcome.TIMEOUT),
    ]
    counted, reversed_ = EpisodeTally(), EpisodeTally()
    for one, other in zip(records, records[::-1], strict=True):
        counted.add(one)
        reversed_.add(other)
    found = counted.summarize()
    assert found == reversed_.summarize()
    assert found == {
        "reward_std": pytest.approx((1 / 6) ** 0.5),
        "completion_tokens": 20.0,
        "clipped_share": pytest.approx(1 / 3),
        "clipped_avg_reward": 1.0,
        "scores": {"correct": pytest.approx(2 / 3), "style": pytest.approx(0.2)},
    }
    assert EpisodeTally().summarize() == {}
