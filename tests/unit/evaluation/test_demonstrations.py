"""What rows show, by shape, and which messages of it are learnt."""

import pytest

from reinforge.evaluation.demonstrations import demonstrations_of, shape_of_rows
from reinforge.evaluation.shapes import BadRow

USER, BOT, TOOL = ({"role": role, "content": role} for role in ("user", "assistant", "tool"))


def shown(row):
    return demonstrations_of(row, shape_of_rows([row]))


def test_every_assistant_message_of_a_conversation_is_learnt_or_the_last_one():
    [each] = shown({"messages": [USER, BOT, TOOL, BOT]})
    assert (each.replies(), each.replies(last_only=True), each.reward) == ([1, 3], [3], 1.0)


def test_a_message_of_weight_zero_is_context():
    [each] = shown({"messages": [USER, {**BOT, "weight": 0}, USER, {**BOT, "weight": 1}]})
    assert each.replies() == [3]


def test_of_prompt_and_completion_only_the_completion_is_learnt():
    [each] = shown({"prompt": [USER, BOT, USER], "completion": [BOT, TOOL, BOT], "tools": [{"type": "function"}]})
    assert (each.replies(), each.tools) == ([3, 5], [{"type": "function"}])
    [each] = shown({"prompt": "2+3?", "completion": "5"})
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
def test_a_preference_is_two_conversations_of_one_prompt(row):
    chosen, rejected = shown(row)
    assert chosen.messages[:1] == rejected.messages[:1] == [{"role": "user", "content": "q"}]
    assert [(each.messages[1]["content"], each.reward) for each in (chosen, rejected)] == [("good", 1.0), ("bad", 0.0)]


@pytest.mark.parametrize(("label", "reward"), [(True, 1.0), (False, 0.0)])
def test_a_label_is_the_reward(label, reward):
    assert [each.reward for each in shown({"prompt": "q", "completion": "a", "label": label})] == [reward]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [USER, BOT, USER]}, "the last one is not the assistant's"),
        ({"prompt": "q", "completion": [BOT, TOOL]}, "completion: the last message is not the assistant's"),
        ({"prompt": "q", "chosen": "", "rejected": "bad"}, "chosen: the text is empty"),
        ({"messages": [USER, BOT], "tools": "search"}, "tools: expected a list"),
    ],
)
def test_rows_that_show_nothing_are_refused(row, said):
    with pytest.raises(BadRow, match=said):
        shown(row)
