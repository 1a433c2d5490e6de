"""Demonstrations from rows of every shape, and which of their messages are trained on."""

import pytest

from reinforge.evaluation.demonstrations import RowFormat, detect_format, detect_row_shape, parse_demonstrations
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


CONVERSATION = {"messages": [USER, BOT]}
PAIR = {"prompt": "q", "completion": "a"}


@pytest.mark.parametrize("row", [CONVERSATION, PAIR])
@pytest.mark.parametrize(
    ("columns", "configured", "reward"),
    [
        ({"reward": 0.25}, None, 0.25),
        ({"score": -3}, None, -3.0),
        ({"score": "0.5"}, None, 0.5),  # a cell of a CSV file
        ({"score": True}, None, 1.0),
        ({"score": 1, "grade": 0.75}, "grade", 0.75),
        ({"score": "good"}, None, 1.0),  # no number, so it is some other column
        ({"score": float("nan")}, None, 1.0),
        ({"score": 1e300}, None, 1.0),
        ({}, None, 1.0),
    ],
)
def test_a_rows_reward_is_read(row, columns, configured, reward):
    rows = [{**row, **columns}]
    [each] = detect_format(rows, configured).parse(rows[0])
    assert each.reward == reward


def test_a_column_holds_the_rewards_only_if_every_row_has_a_number_there():
    assert detect_format([{**PAIR, "score": 1}, {**PAIR, "score": 0}]) == RowFormat("prompt/completion", "score")
    assert detect_format([{**PAIR, "score": 1}, PAIR]) == RowFormat("prompt/completion")
    assert detect_format([{**PAIR, "label": True, "score": 0.5}]) == RowFormat("prompt/completion/label")
    assert detect_format([{"prompt": "q", "chosen": "a", "rejected": "b", "score": 1}]).reward_key is None
    with pytest.raises(
        InvalidRowError, match='grade: expected the row\'s reward, a number of at most 1e.09, found "A"'
    ):
        detect_format([{**PAIR, "grade": "A"}], "grade").parse({**PAIR, "grade": "A"})


def test_rows_with_rewards_are_grouped_by_their_prompt():
    rows = {
        "1": {"prompt": "q", "completion": "a", "score": 1},
        "2": {"prompt": "r", "completion": "a", "score": 1},
        "3": {"prompt": "q", "completion": "b", "score": 0},
        "4": {"prompt": "q", "completion": "b", "score": 0, "tools": [{"type": "function"}]},
    }
    assert detect_format(list(rows.values())).group(rows) == [["1", "3"], ["2"], ["4"]]
    unscored = {id_: {"prompt": row["prompt"], "completion": row["completion"]} for id_, row in rows.items()}
    assert detect_format(list(unscored.values())).group(unscored) == [["1"], ["2"], ["3"], ["4"]]


def test_the_prompt_of_a_conversation_ends_before_the_first_message_to_train_on():
    other = {"role": "assistant", "content": "other"}
    rows = {
        "1": {"messages": [USER, BOT, USER, BOT], "reward": 1},
        "2": {"messages": [USER, other, USER, BOT], "reward": 0},
        "3": {"messages": [USER, BOT, USER, other], "reward": 0},
    }
    row_format = detect_format(list(rows.values()))
    assert row_format.group(rows) == [["1", "2", "3"]]
    assert row_format.group(rows, last_only=True) == [["1", "3"], ["2"]]


def liked(label, **columns):
    return {"messages": [USER, BOT], "label": label, **columns}


def test_thumbs_of_conversations_are_rewards_and_labels():
    rows = [liked(True), liked(False)]
    row_format = detect_format(rows)
    assert (row_format.shape, row_format.reward_key, row_format.marks_bad_replies) == ("messages", "label", True)
    found = [row_format.parse(row)[0] for row in rows]
    assert [(each.reward, each.label) for each in found] == [(1.0, True), (0.0, False)]


def test_a_reward_wins_over_a_thumb_which_stays_the_label():
    row_format = detect_format([liked(False, reward=0.75)])
    [found] = row_format.parse(liked(False, reward=0.75))
    assert (row_format.reward_key, found.reward, found.label) == ("reward", 0.75, False)
    assert not row_format.marks_bad_replies


def test_thumbs_of_some_rows_are_no_rewards_but_mark_bad_replies():
    row_format = detect_format([liked(False), {"messages": [USER, BOT]}])
    assert (row_format.reward_key, row_format.marks_bad_replies) == (None, True)
    assert not detect_format([liked(True), {"messages": [USER, BOT]}]).marks_bad_replies
    assert not detect_format([{"messages": [USER, BOT], "label": 0}]).marks_bad_replies, "a number is no thumb"


def test_thumbs_in_the_cells_of_a_csv_file_are_thumbs():
    rows = [{"prompt": "q", "completion": "a", "label": text} for text in ("true", " False")]
    found = detect_format(rows)
    assert (found.shape, found.marks_bad_replies) == ("prompt/completion/label", True)
    assert [(each.reward, each.label) for row in rows for each in found.parse(row)] == [(1.0, True), (0.0, False)]
    named = detect_format(rows, "label")
    assert [each.reward for row in rows for each in named.parse(row)] == [1.0, 0.0]
    with pytest.raises(InvalidRowError, match="label: expected true or false, found maybe"):
        found.parse({"prompt": "q", "completion": "a", "label": "maybe"})
