"""Datasets that are damaged, hostile or far too large are refused by their line; no bytes raise anything else."""

import csv
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforge.errors import ConfigError
from reinforge.evaluation import rows
from reinforge.evaluation.datasets import (
    CsvDatasetConfig,
    FileDataset,
    HuggingFaceDatasetConfig,
    JsonDatasetConfig,
    JsonlDatasetConfig,
    RowDataset,
)
from reinforge.evaluation.row_limits import RowLimits, find_unusable

FORMATS = {"jsonl": JsonlDatasetConfig, "json": JsonDatasetConfig, "csv": CsvDatasetConfig}
GOOD = '{"question": "a"}'


@pytest.fixture(autouse=True)
def _in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(kind, content, **settings):
    path = Path(f"d.{kind}")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return FileDataset(FORMATS[kind](file_path=path, **settings), Path.cwd()).load()


def refuse(kind, content, **settings):
    with pytest.raises(ConfigError) as caught:
        load(kind, content, **settings)
    assert caught.value.exit_code == 2
    return caught.value.problems[0]


def as_question(text):
    return f'{{"question": {text}}}'


HIGH, LOW = r'"a \ud83d"', r'["\ude00"]'
DIGITS = "1" * 5000
DEEP, VERY_DEEP = "[" * 150 + "]" * 150, "[" * 100_000 + "]" * 100_000
ROWS = [
    (as_question(HIGH), r"the field question has a lone surrogate (\ud83d), half of a character"),
    (as_question(LOW), r"the field question[0] has a lone surrogate (\ude00), half of a character"),
    (
        r'{"question": 1, "\ud83d": 2}',
        r"the field \ud83d (its name) has a lone surrogate (\ud83d), half of a character",
    ),
    (as_question(r'"a\u0000"'), r"the field question has the character NUL (\u0000), which is not text"),
    (as_question(DIGITS), "an integer has more than 4,300 digits"),
    (as_question("1e400"), "the field question has a number that is not finite (inf)"),
    (as_question("-" + "1" * 400 + ".0"), "the field question has a number that is not finite (-inf)"),
    (as_question("NaN"), "invalid JSON: NaN is not JSON"),
    (as_question(DEEP), "the row is nested more than 100 levels deep"),
    (as_question(VERY_DEEP), "the row is nested more than 100 levels deep"),
    (as_question('"' + "x" * 300 + '"'), "the row has more than 250 characters (max_row_chars)"),
]
IDS = [message[:50] for _, message in ROWS]


@pytest.mark.parametrize(("row", "message"), ROWS, ids=IDS)
def test_a_bad_row_is_told_by_its_line_with_a_fix(row, message):
    limit = 250 if "max_row_chars" in message else 10_000_000
    problem = refuse("jsonl", f"{GOOD}\n\n{row}\n{GOOD}\n", max_row_chars=limit)
    assert (problem.location, problem.message) == ("d.jsonl:3", message)
    assert problem.fix
    problem = refuse("json", f"[\n{GOOD},\n{row},\n{GOOD}]", max_row_chars=limit)
    assert (problem.location, problem.message) == ("d.json:3", message)
    assert problem.fix


def test_what_looks_like_that_and_is_not_is_read():
    row = {
        "question": "\U0001f600 \\ud83d \\\\u0000 1e999",
        "n": 10**300,
        "x": 1e300,
        "deep": json.loads("[" * 90 + "]" * 90),
    }
    (item,) = load("jsonl", json.dumps(row))
    assert item.full_dataset_entry == row


def test_without_the_check_half_a_character_becomes_an_example(monkeypatch):
    """The mutation: no row is looked at."""
    monkeypatch.setattr(rows, "is_suspect", lambda text: False)
    (item,) = load("jsonl", as_question(HIGH))
    assert item.input_obj == "a \ud83d"


@pytest.mark.parametrize(
    ("kind", "content"),
    [("jsonl", f"{GOOD}\n" * 4), ("json", f"[{GOOD},\n{GOOD},\n{GOOD},\n{GOOD}]"), ("csv", "question\n" + "a\n" * 4)],
)
def test_rows_are_counted(kind, content):
    assert len(load(kind, content, max_rows=4)) == 4
    problem = refuse(kind, content, max_rows=3)
    assert problem.message == "more than 3 rows (max_rows)"
    assert problem.location == ("d.csv:5" if kind == "csv" else f"d.{kind}:4")
    assert problem.fix == "raise max_rows, or use fewer rows"


def test_a_line_without_an_end_is_read_up_to_the_limit_only():
    problem = refuse("jsonl", b" " * 5000 + b"{}", max_row_chars=1000)
    assert (problem.location, problem.message) == (
        "d.jsonl:1",
        "the row has more than 1,000 characters (max_row_chars)",
    )


def test_cells_of_a_csv_file_have_limits_too():
    assert len(load("csv", f"question\n{'x' * 200_000}\n")) == 1, "more than the csv module's own limit"
    before = csv.field_size_limit()
    problem = refuse("csv", 'question\na\n"' + "b\n" * 1000, max_row_chars=500)
    message = "a cell has more than 500 characters (max_row_chars); the rows after it are not read"
    assert (problem.location, problem.message) == ("d.csv:3", message)
    assert csv.field_size_limit() == before
    problem = refuse("csv", "question\na\nb\x00\n")
    assert (problem.location, problem.message) == (
        "d.csv:3",
        r"the field [0] has the character NUL (\u0000), which is not text",
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_that_is_not_utf8_names_the_line(kind):
    good = '{"question": "é"}\r\n'.encode() * 60_000  # more than one block of the search
    good = b"[" + good.replace(b"}", b"},") if kind == "json" else good
    problem = refuse(kind, good + b"ok\nfa\xfflse\n", max_row_chars=100)
    assert (problem.location, problem.message) == (f"d.{kind}:60002", "the file is not UTF-8")


def test_only_files_are_read(tmp_path):
    os.mkfifo("pipe")
    Path("folder").mkdir()
    for path, message in [
        ("pipe", "the dataset is a pipe, not a file"),
        ("/dev/zero", "the dataset is a device, not a file"),
        ("folder", "folder is a folder, expected a file"),
        ("x" * 5000, "file not found"),
        ("a\x00b", "file not found"),
    ]:
        for config in (JsonlDatasetConfig(file_path=Path(path)), CsvDatasetConfig(file_path=Path(path))):
            with pytest.raises(ConfigError) as caught:
                FileDataset(config, tmp_path).load()
            assert message in caught.value.problems[0].message
            assert caught.value.problems[0].fix
    with pytest.raises(ConfigError, match="/pipe is a file, expected a folder"):
        FileDataset(HuggingFaceDatasetConfig(file_path=tmp_path / "pipe"), tmp_path).load()


def test_a_file_that_is_too_large_is_not_opened():
    with Path("d.jsonl").open("wb") as file:
        file.truncate(3 * 2**20)
    with pytest.raises(ConfigError, match=r"the file has 3 MiB, more than max_file_mb \(2\)"):
        FileDataset(JsonlDatasetConfig(file_path=Path("d.jsonl"), max_file_mb=2), Path.cwd()).load()


def test_rows_from_python_have_the_same_limits(set_limit):
    cyclic = []
    cyclic.append(cyclic)
    shared = []
    for _ in range(60):
        shared = [shared, shared]
    set_limit("row_values", 1000)
    with pytest.raises(ConfigError) as caught:
        RowDataset([{"question": "a\ud800"}, {"question": cyclic}, {"question": shared}, {"question": "b"}]).load()
    assert [(each.location, each.message[:45]) for each in caught.value.problems] == [
        ("row 1", "the field question has a lone surrogate (\\ud8"),
        ("row 2", "the row is nested more than 100 levels deep"),
        ("row 3", "the row has more than 1,000 values"),
    ]
    (item,) = RowDataset([{"question": float("nan")}]).load()
    assert item.input_obj != item.input_obj, "a missing number of a table is no error"


def test_an_integer_is_measured_without_being_written():
    assert find_unusable({"a": 10**4000}) is None
    found = find_unusable({"a": [10**6000]})
    assert found == ("the field a[0] has an integer of more than 4,300 digits", "write it as a string")
    assert RowLimits().max_rows == 1_000_000


TOKENS = [
    b"{", b"}", b"[", b"]", b'"', b":", b",", b"\n", b"\r", b" ", b"\\u", b"\\", b"d83d", b"0000", b"1e999", b"-",
    b"9" * 400, b"\xff", b"\xef\xbb\xbf", b"\x00", "é".encode(), b"null", b"true", b"NaN", b'"question"',
    b'"messages"', b'"id"', b'{"question": "a"}', b'{"prompt": "a", "completion": "b"}',
    b'{"messages": [{"role": "user", "content": "x"}]}',
]  # fmt: skip
PIECES = st.lists(st.sampled_from(TOKENS) | st.binary(max_size=5), max_size=25).map(b"".join)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), PIECES)
def test_any_bytes_are_rows_or_a_typed_error(kind, content):
    try:
        items = load(kind, content, max_rows=5, max_row_chars=200)
    except ConfigError as error:
        str(error).encode()  # it can be printed
    else:
        json.dumps([item.full_dataset_entry for item in items], ensure_ascii=False, allow_nan=False).encode()
