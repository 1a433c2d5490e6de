"""Row shapes: which fields become the input and the expected output, and the errors for invalid rows."""

import logging

import pytest

from reinforge.errors import ConfigError
from reinforge.evaluation.datasets import FileDataset, JsonlDatasetConfig, RowDataset

USER = {"role": "user", "content": "2+3?"}
SYSTEM = {"role": "system", "content": "be brief"}
FIVE = {"role": "assistant", "content": "5"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "add"}}]}

SHAPES = [
    ({"question": "2+3?", "answer": "5"}, "question/answer", "2+3?", "5"),
    ({"messages": [SYSTEM, USER, FIVE]}, "messages", [SYSTEM, USER], "5"),
    ({"messages": [USER, CALL]}, "messages", [USER], [CALL]),
    ({"messages": [USER], "level": 3}, "messages (prompts only)", [USER], None),
    ({"messages": [USER], "answer": "5"}, "messages", [USER], "5"),
    ({"prompt": "2+3?", "completion": "5"}, "prompt/completion", "2+3?", "5"),
    ({"prompt": [USER], "completion": [FIVE]}, "prompt/completion", [USER], "5"),
    ({"prompt": "2+3?", "completion": "5", "label": True}, "prompt/completion/label", "2+3?", "5"),
    ({"prompt": "2+3?", "completion": "6", "label": False}, "prompt/completion/label", "2+3?", None),
    ({"prompt": "2+3?", "completion": "5", "label": "sums"}, "prompt/completion", "2+3?", "5"),
    ({"prompt": "2+3?", "chosen": "5", "rejected": "6"}, "prompt/chosen/rejected", "2+3?", "5"),
    ({"prompt": [USER], "chosen": [FIVE], "rejected": [FIVE]}, "prompt/chosen/rejected", [USER], "5"),
    (
        {"input": {"messages": [USER]}, "preferred_output": [FIVE], "non_preferred_output": [FIVE]},
        "openai preference",
        [USER],
        "5",
    ),
    ({"prompt": "2+3?"}, "prompt", "2+3?", None),
    ({"prompt": "2+3?", "answer": "5"}, "prompt", "2+3?", "5"),
]


@pytest.mark.parametrize(
    ("row", "shape", "prompt", "expected"), SHAPES, ids=[f"{r[1]}-{i}" for i, r in enumerate(SHAPES)]
)
def test_a_shape_is_detected(row, shape, prompt, expected):
    loader = RowDataset([row, row])
    first, second = loader.load()
    assert (first.input_obj, first.expected_output_obj, loader.shape) == (prompt, expected, shape)
    assert first.full_dataset_entry == row, "whatever the shape, the whole row is kept"
    assert (first.id, second.id) == ("1", "2")


def test_configured_columns_take_precedence_over_shapes():
    row = {"prompt": "no", "completion": "no", "ask": "2+3?", "sum": 5, "key": "a"}
    loader = RowDataset([row], question_key="ask", answer_key="sum", id_key="key")
    (item,) = loader.load()
    assert (item.id, item.input_obj, item.expected_output_obj, loader.shape) == ("a", "2+3?", 5, "question/answer")


def test_an_answer_column_can_be_configured_for_messages():
    (item,) = RowDataset([{"messages": [USER, FIVE], "reference": "five"}], answer_key="reference").load()
    assert (item.input_obj, item.expected_output_obj) == ([USER], "five")
    with pytest.raises(ConfigError, match='no final assistant message and no field "refrence"'):
        RowDataset([{"messages": [USER], "reference": "five"}], answer_key="refrence").load()


def test_null_fields_of_columnar_files_are_removed_from_messages():
    (item,) = RowDataset([{"messages": [{**USER, "tool_calls": None, "name": None}]}]).load()
    assert item.input_obj == [USER]


def problems(*rows):
    with pytest.raises(ConfigError) as caught:
        RowDataset(list(rows)).load()
    return [f"{p.location}: {p.message}" for p in caught.value.problems]


GOOD = {"messages": [USER, FIVE]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "2+3?"}, "no messages (the row has question)"),
        ({"messages": None}, "no messages (the row has messages)"),
        ({"messages": "hi"}, 'messages: expected a list of messages, found "hi"'),
        ({"messages": []}, "messages: expected a list of messages, found nothing"),
        ({"messages": ["hi"]}, 'messages[0]: expected a message, found "hi"'),
        (
            {"messages": [{"role": "usr", "content": "x"}]},
            "messages[0]: unknown role 'usr', did you mean \"user\"? "
            "allowed: system, developer, user, assistant, tool, function",
        ),
        ({"messages": [USER, {"role": "assistant"}]}, "messages[1]: no content and no tool_calls"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0]: content is 5, expected a string or a list of blocks",
        ),
        ({"messages": [FIVE]}, "messages: expected a message before the assistant's"),
        (
            {"messages": [USER]},
            'no final assistant message and no field "answer"; other rows have an answer, so every row needs one',
        ),
    ],
)
def test_a_row_of_another_shape_is_an_error(row, message):
    assert problems(GOOD, row, GOOD) == [f"row 2: {message}"]


def test_the_error_for_rows_of_no_known_shape_lists_their_fields():
    assert problems({"text": "x"}) == ['row 1: no field "question"; the row has text']
    pair = {"prompt": "x", "chosen": "y", "rejected": "z"}
    assert problems(pair, pair, {"prompt": "x", "chosen": "y"}, {}) == [
        "row 3: no rejected (the row has prompt, chosen)",
        "row 4: no prompt and no chosen and no rejected (the row has no fields)",
    ]


def test_the_detected_shape_is_logged(tmp_path, caplog):
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 2)
    caplog.set_level(logging.INFO, "reinforge")
    config = JsonlDatasetConfig(file_path=tmp_path / "d.jsonl")
    loader = FileDataset(config, tmp_path)
    loader.load()
    assert loader.shape == "prompt/completion"
    assert "d.jsonl: 2 rows of shape prompt/completion" in caplog.text


def test_a_reply_with_a_thumb_down_is_no_answer_to_expect():
    rows = [{"messages": [USER, FIVE], "label": label} for label in (True, False)]
    rows.append({"messages": [USER, FIVE], "label": False, "answer": "6"})
    items = RowDataset(rows).load()
    assert [item.expected_output_obj for item in items] == ["5", None, "6"]


def test_the_weight_of_earlier_replies_is_not_for_the_model():
    [item] = RowDataset([{"messages": [USER, {**FIVE, "weight": 0}, USER, FIVE]}]).load()
    assert item.input_obj == [USER, FIVE, USER]
    assert item.full_dataset_entry["messages"][1]["weight"] == 0
