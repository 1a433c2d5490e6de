"""Demonstrations from rows of every shape, and which of their messages are trained on."""

import pytest

from reinforge.evaluation.demonstrations import detect_row_shape, parse_demonstrations
from reinforge.evaluation.shapes import InvalidRowError

USER, BOT, TOOL = ({"role": role, "content": role} for role in ("user", "assistant", "tool"))


def demonstrate(row):
    return parse_demonstrations(row, detect_row_shape([row]))


def test_every_assistant_message_or_only_the_last_one_is_trained_on():
    [each] = demonstrate({"messages": [USER, BOT, TOOL, BOT]})
    assert (each.replies(), each.replies(last_only=True), each.reward) == ([1, 3], [3], 1.0)


def test_a_message_of_weight_zero_is_context():
    [each] = demonstrate({"messages": [USER, {**BOT, "weight": 0}, USER, {**BOT, "weight": 1}]})
    assert each.replies() == [3]


def test_only_the_completion_is_trained_on():
    [each] = demonstrate({"prompt": [USER, BOT, USER], "completion": [BOT, TOOL, BOT], "tools": [{"type": "function"}]})
    assert (each.replies(), each.tools) == ([3, 5], [{"type": "function"}])
    [each] = demonstrate({"prompt": "2+3?", "completion": "5"})
    assert each.messages == [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {
            "input": {"messages": [{"role": "user", "content": "q"}]},
            "preferred_output": [{"role": "assistant", "content": "good"}],
            "non_preferred_output": [{"role": "assistant", "content": "bad"}],
        },
    ],
)
def test_a_preference_gives_two_conversations_with_the_same_prompt(row):
    chosen, rejected = demonstrate(row)
    assert chosen.messages[:1] == rejected.messages[:1] == [{"role": "user", "content": "q"}]
    assert [(each.messages[1]["content"], each.reward) for each in (chosen, rejected)] == [("good", 1.0), ("bad", 0.0)]


@pytest.mark.parametrize(("label", "reward"), [(True, 1.0), (False, 0.0)])
def test_a_label_is_the_reward(label, reward):
    assert [each.reward for each in demonstrate({"prompt": "q", "completion": "a", "label": label})] == [reward]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [USER, BOT, USER]}, "messages: the last message has role user, expected assistant"),
        ({"prompt": "q", "completion": [BOT, TOOL]}, "completion: the last message has role tool, expected assistant"),
        ({"prompt": "q", "chosen": "", "rejected": "bad"}, "chosen: the text is empty"),
        ({"messages": [USER, BOT], "tools": "search"}, "tools: expected a list"),
    ],
)
def test_rows_without_a_final_reply_are_rejected(row, message):
    with pytest.raises(InvalidRowError, match=message):
        demonstrate(row)
