"""Importing: what is counted, what is left out, and that large files need little memory."""

import json
import random
import tracemalloc

import pytest

from reinforge.errors import ConfigError
from reinforge.evaluation.row_limits import JsonSyntaxError, JsonText, JsonTooLongError
from reinforge.traces import records
from reinforge.traces.entries import Exchange
from reinforge.traces.importer import ImportOptions, import_traces, merge_calls, redact_value
from reinforge.traces.ratings import read_value


def chat(number, reply="A", **more):
    messages = [{"role": "user", "content": f"Q{number}"}, {"role": "assistant", "content": reply}]
    return {"id": f"c{number}", "messages": messages, **more}


@pytest.fixture
def run(tmp_path):
    """Imports text as a file; returns the rows and the report."""

    def import_text(text, name="chats.jsonl", **options):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        report = import_traces([path], tmp_path / "out.jsonl", ImportOptions(**options))
        return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()], report

    return import_text


def lines(*values):
    return "\n".join(json.dumps(value) for value in values)


def test_lines_that_cannot_be_read_are_counted_by_reason_and_named(run):
    text = f"{lines(chat(1))}\n{{broken\n[1]\n{lines({'a': 1, 'b': 2}, chat(2, reply=''), chat(3))}\n"
    rows, report = run(text)
    assert [row["id"] for row in rows] == ["c1", "c3"]
    counts = {reason.partition(";")[0]: count for reason, count in report.unread.counts.items()}
    assert counts == {
        "invalid JSON: expecting property name enclosed in double quotes": 1,
        "expected an object, found list": 1,
        "no known format (the record has a, b)": 1,
        "the reply is empty": 1,
    }
    places = [place.rpartition("/")[2] for found in report.unread.places.values() for place in found]
    assert places == ["chats.jsonl:2:2", "chats.jsonl:3", "chats.jsonl:4", "chats.jsonl:5"]
    text = "\n".join(report.format_lines())
    assert "2 rows of 2 conversations (records read: chat 3; files: 1)" in text
    assert "unread    4 records:" in text


def test_an_export_without_anything_to_use_is_an_error_with_the_reasons(run, tmp_path):
    with pytest.raises(ConfigError) as caught:
        run(lines({"a": 1}, {"a": 2}))
    [problem] = caught.value.problems
    assert problem.message.startswith("2 × no known format (the record has a)")
    assert problem.location == f"{tmp_path}/chats.jsonl:1"
    assert not (tmp_path / "out.jsonl").exists()
    assert not list(tmp_path.glob(".import-*")), "nothing of the work stays behind"
    with pytest.raises(ConfigError, match="the file is empty"):
        run("")


def test_an_import_that_fails_leaves_the_old_rows(run, tmp_path):
    (tmp_path / "out.jsonl").write_text("old\n")
    with pytest.raises(ConfigError):
        run(lines({"a": 1}))
    assert (tmp_path / "out.jsonl").read_text() == "old\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", json.dumps([chat(1), chat(2)])),
        ("a.json", json.dumps([chat(1), chat(2)], indent=2)),
        ("a.json", json.dumps({"meta": {"page": 1}, "data": [chat(1), chat(2)]})),
        ("a.json", json.dumps({"data": [chat(1), chat(2)], "meta": {"page": 1}}, indent=1)),
        ("a.json", json.dumps(chat(1), indent=2) + json.dumps(chat(2), indent=2)),
        ("a.log", f"\n{json.dumps(chat(1))}\n\n{json.dumps(chat(2))}"),
        ("a.ndjson", f"\ufeff{json.dumps(chat(1))}\r\n{json.dumps(chat(2))}\r\n"),
        ("a.tsv", "id\tprompt\tcompletion\nc1\tQ1\tA\nc2\tQ2\tA\n"),
        ("a.csv", "ID;Prompt;Completion\nc1;Q1;A\nc2;Q2;A\n"),
    ],
)
def test_files_of_every_kind_give_the_same_rows(run, name, text):
    rows, report = run(text, name)
    assert [(row["id"], row["messages"]) for row in rows] == [(f"c{n}", chat(n)["messages"]) for n in (1, 2)]
    assert not report.unread.counts


def test_parquet_files_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    run = {"id": "r", "trace_id": "r", "run_type": "llm", "error": None}
    run |= {"inputs": json.dumps({"messages": chat(1)["messages"][:1]}), "outputs": json.dumps({"output": "A"})}
    parquet.write_table(pyarrow.Table.from_pylist([run]), tmp_path / "runs.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"no")
    report = import_traces([tmp_path], tmp_path / "out.jsonl", ImportOptions())
    assert json.loads((tmp_path / "out.jsonl").read_text())["messages"] == chat(1)["messages"]
    assert report.num_files == 2
    assert [reason[:18] for reason in report.unread.counts] == ["not a Parquet file"]


@pytest.mark.slow
def test_a_large_list_needs_the_memory_of_one_record(run, tmp_path):
    text = json.dumps([chat(number, reply="x" * 200_000) for number in range(100)])  # 20 MB
    (tmp_path / "large.json").write_text(text)
    size = len(text)
    del text
    tracemalloc.start()
    report = import_traces([tmp_path / "large.json"], tmp_path / "out.jsonl", ImportOptions())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.num_rows == 100
    assert peak < size / 3


def test_records_that_appear_twice_count_once(run):
    rows, report = run(lines(chat(1), chat(1), chat(1, reply="B")))
    assert [(row["id"], row["messages"][-1]["content"]) for row in rows] == [("c1", "A"), ("c1-2", "B")]
    assert report.num_repeated == 1


def test_only_rated_rows(run):
    rows, report = run(lines(chat(1, thumbs="up"), chat(2), chat(3, reward=0.25)), rated_only=True)
    found = [(row["id"], row.get("label"), row.get("reward")) for row in rows]
    assert found == [("c1", True, None), ("c3", None, 0.25)]
    assert report.num_unrated == 1


def test_thumbs_up_and_down_of_one_row_are_no_label(run):
    rows, report = run(lines(chat(1, thumbs=1, rating=0), chat(2, thumbs=1)))
    assert ["label" in row for row in rows] == [False, True]
    assert report.num_contradictory == 1


def test_on_a_scale_from_minus_one_zero_is_no_thumb(run):
    rows, _ = run(lines(*(chat(n, thumbs=value) for n, value in enumerate((1, 0, -1)))))
    assert [row.get("label") for row in rows] == [True, None, False]


def test_a_rating_with_stars_is_a_score(run):
    rows, report = run(lines(chat(1, rating=5), chat(2, rating=1)))
    assert [row["scores"] for row in rows] == [{"rating": 5.0}, {"rating": 1.0}]
    assert report.label_names == []
    assert any("--reward rating makes it the reward" in line for line in report.format_lines())


def test_a_comment_in_the_place_of_a_thumb_is_told_and_the_row_kept(run):
    rows, report = run(lines(chat(1, feedback="well, it depends"), chat(2, feedback="good")))
    assert [row.get("label") for row in rows] == [None, True]
    assert list(report.unread.counts) == ["feedback is neither a number nor a thumb; the rest of the record is read"]


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        ("up", True),
        ("Thumbs Down", False),
        ("👍", True),
        ("-1", -1.0),
        (True, True),
        (0, 0.0),
        ("0.5", 0.5),
        ("meh", None),
        ("nan", None),
        (None, None),
        ([], None),
        (1e300, None),
    ],
)
def test_values_of_thumbs_and_scores(value, meaning):
    found = read_value(value)
    assert found == meaning
    assert isinstance(found, bool) == isinstance(meaning, bool)


def test_redaction_masks_addresses_and_keys(run):
    reply = "write to ann.lee+x@mail.example.co.uk, key sk-abcdefgh12345678, host https://me:pw@h/x"
    [row], report = run(lines(chat(1, reply=reply)), redact=True)
    assert row["messages"][1]["content"] == "write to [email], key sk-***, host https://***@h/x"
    assert report.num_masked == 1
    assert redact_value({"a@b.org": ["x@y.org", 1]}) == {"a@b.org": ["[email]", 1]}, "names of fields stay"
    [row], report = run(lines(chat(1, reply=reply)))
    assert "ann.lee" in row["messages"][1]["content"]


def test_text_that_no_tokenizer_can_read_is_left_out(run):
    rows, report = run(lines(chat(1, reply="a\x00b"), chat(2, reply="\ud83d"), chat(3)))
    assert [row["id"] for row in rows] == ["c3"]
    assert sum(report.unread.counts.values()) == 2


def test_records_with_anything_anywhere_never_stop_an_import(run):
    random_values = random.Random(0)
    keys = ("messages", "role", "content", "traceId", "type", "run_type", "inputs", "outputs", "call_type", "response")
    keys += ("resourceSpans", "attributes", "spanId", "scores", "observations", "name", "value", "events")
    keys += ("conversations",)
    words = ("", "user", "GENERATION", "llm", "acompletion", "[", '{"role": "user"}', "text", None, 0, -1.5, True)

    def make(depth):
        kind = random_values.random()
        if depth == 0 or kind < 0.4:
            return random_values.choice(words)
        if kind < 0.7:
            return [make(depth - 1) for _ in range(random_values.randint(0, 3))]
        return {key: make(depth - 1) for key in random_values.sample(keys, random_values.randint(0, 4))}

    records_ = [{key: make(4) for key in random_values.sample(keys, random_values.randint(1, 6))} for _ in range(3000)]
    rows, report = run(lines(*records_, chat(1)))
    assert rows[-1]["id"] == "c1"
    assert sum(report.unread.counts.values()) > 1000


def exchange(*texts, context=None, **more):
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return Exchange(texts[-1], messages, len(messages) - 1 if context is None else context, "t", **more)


def test_each_reply_of_a_trace_is_trained_once():
    first, second = exchange("q", "a"), exchange("q", "a", "more", "b")
    other, again = exchange("another", "c"), exchange("q", "a2")
    drafts = merge_calls([first, second, other, again])
    assert [draft.calls for draft in drafts] == [["a", "b"], ["c"], ["a2"]]
    assert drafts[0].build_messages() == second.messages
    summary = exchange("q", "b", is_summary=True)
    assert len(merge_calls([summary, first])) == 1
    assert merge_calls([summary])[0].calls == ["b"]


def test_calls_with_other_tools_are_rows_of_their_own():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    drafts = merge_calls([exchange("q", "a"), exchange("q", "a", "more", "b", tools=tools)])
    assert [draft.build_messages()[1].get("weight") for draft in drafts] == [None, 0]


def cut(text, size):
    return iter([text[at : at + size] for at in range(0, len(text), size)])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_json_text_does_not_depend_on_how_it_is_cut(size):
    text = JsonText(cut('[ {"a": "\\u00e9\\n"},\n -12.5e3 , true,\n\n"x"]', size), 100)
    assert text.take("[")
    found = []
    while text.peek() != "]":
        line = text.line
        found.append((text.decode()[0], line))
        text.take(",")
    assert found == [({"a": "é\n"}, 1), (-12500.0, 2), (True, 2), ("x", 4)]
    assert (text.take("]"), text.peek()) == (True, "")


@pytest.mark.parametrize("size", [1, 5, 100])
def test_json_text_names_line_and_column_of_an_error(size):
    text = JsonText(cut('[1,\n  {"a": nope}]', size), 100)
    text.take("[")
    text.decode()
    text.take(",")
    with pytest.raises(JsonSyntaxError) as caught:
        text.decode()
    assert (caught.value.line, caught.value.column) == (2, 9)


def test_json_text_refuses_a_value_that_is_too_long():
    text = JsonText(cut('["' + "x" * 1000, 10), 100)
    text.take("[")
    with pytest.raises(JsonTooLongError):
        text.decode()


def test_a_record_that_is_too_long_is_told(run, monkeypatch):
    limits = records.RowLimits(max_rows=10, max_row_chars=300, max_file_mb=1)
    monkeypatch.setattr(records, "LIMITS", limits)
    rows, report = run(lines(chat(1), chat(2, reply="x" * 400)))
    assert [row["id"] for row in rows] == ["c1"]
    assert "the row has more than 300 characters" in next(iter(report.unread.counts))


def test_files_of_the_same_name_share_no_ids(tmp_path):
    for month in ("may", "june"):
        (tmp_path / month).mkdir()
        (tmp_path / month / "chats.jsonl").write_text(lines({"prompt": f"Q {month}", "completion": "A"}))
    (tmp_path / "may" / "notes.md").write_text("no export")
    report = import_traces([tmp_path], tmp_path / "out.jsonl", ImportOptions())
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["conversation"] for row in rows] == ["chats.1-1", "chats.2-1"]
    assert (report.num_files, report.num_conversations) == (2, 2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no files in the folder end with"):
        import_traces([tmp_path / "empty"], tmp_path / "out.jsonl", ImportOptions())


def test_rows_without_a_thumb_are_told_with_the_way_to_leave_them_out(run):
    _, report = run(lines(chat(1, thumbs=1), chat(2)))
    assert "  label     1 true, 0 false, 1 without; --rated leaves these out (from thumbs)" in report.format_lines()
