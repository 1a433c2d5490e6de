"""Each format of traces and chat logs becomes rows: messages, tools, thumbs and scores."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforge.errors import ConfigError
from reinforge.evaluation.row_statistics import load_rows
from reinforge.traces.importer import ImportOptions, import_traces

DATA = Path(__file__).parents[1] / "data" / "traces"
CALL = {"id": "call_1", "type": "function", "function": {"name": "find_order", "arguments": '{"number": "17"}'}}


@pytest.fixture
def read(tmp_path):
    """Imports files of `tests/data/traces`, or files with given contents; returns the rows and the report."""

    def read_files(*sources, **options):
        paths = []
        for source in sources:
            if isinstance(source, tuple):
                (tmp_path / source[0]).write_text(source[1])
                paths.append(tmp_path / source[0])
            else:
                paths.append(DATA / source)
        report = import_traces(paths, tmp_path / "out.jsonl", ImportOptions(**options))
        return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()], report

    return read_files


def user(text):
    return {"role": "user", "content": text}


def bot(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


def count_unread(report):
    return {reason.partition(";")[0]: count for reason, count in report.unread.counts.items()}


def test_the_calls_of_a_langfuse_trace_are_one_row_with_its_tools_and_scores(read):
    [row], report = read("langfuse_trace.json")
    assert row["messages"] == [
        system("Be brief."),
        user("Where is order 17?"),
        bot(None, tool_calls=[CALL]),
        {"role": "tool", "tool_call_id": "call_1", "content": "shipped"},
        bot("It left the warehouse."),
    ]
    assert (row["id"], row["conversation"], row["label"]) == ("obs-3", "session-1", True)
    assert row["scores"] == {"user-feedback": 1.0, "helpfulness": 0.75}
    assert [tool["function"]["name"] for tool in row["tools"]] == ["find_order"]
    assert "reward" not in row, "a score is the reward only if the user says so"
    assert report.ignored == {"Langfuse observations of the type SPAN": 1}


def test_a_named_score_of_langfuse_is_the_reward(read):
    [row], report = read("langfuse_trace.json", reward="helpfulness", label="user-feedback")
    assert (row["reward"], row["label"], report.num_rewarded) == (0.75, True, 1)
    with pytest.raises(ConfigError, match='no score is called "helpful"'):
        read("langfuse_trace.json", reward="helpful")


def test_langfuse_scores_in_a_file_of_their_own_are_joined_whatever_the_order(read):
    for files in (
        ("langfuse_observations.jsonl", "langfuse_scores.jsonl"),
        ("langfuse_scores.jsonl", "langfuse_observations.jsonl"),
    ):
        rows, report = read(*files)
        assert [(row["id"], row["conversation"], row["label"]) for row in rows] == [
            ("o-10", "s-10", True),
            ("o-11", "s-10", False),
        ]
        assert rows[1]["messages"][1] == bot("Yes, within a week.", weight=0), "it has a row of its own"
        assert report.num_unused_ratings == 1
        assert count_unread(report) == {"the generation has no input": 1}
        assert report.unread.places[next(iter(report.unread.places))] == [f"{DATA}/langfuse_observations.jsonl:4"]


def test_a_langfuse_trace_without_generations_is_its_input_and_output(read):
    trace = {"id": "t", "timestamp": "2026", "sessionId": "s", "input": {"question": "Q?"}, "output": {"answer": "A."}}
    [row], _ = read(("traces.json", json.dumps({"data": [trace], "meta": {"page": 1}})))
    assert (row["messages"], row["conversation"]) == ([user("Q?"), bot("A.")], "s")


def test_langsmith_runs_are_read_with_the_feedback_of_their_trace(read):
    [row], report = read("langsmith_runs.jsonl")
    assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert row["messages"][2]["tool_calls"][0]["function"] == {"name": "cancel", "arguments": '{"plan": "basic"}'}
    assert (row["conversation"], row["label"]) == ("thread-7", False)
    assert row["scores"] == {"brief": 0.5, "user_score": 0.0}
    assert [tool["function"]["name"] for tool in row["tools"]] == ["cancel"]
    assert report.ignored == {"LangSmith runs of the type tool": 1, "LangSmith runs that failed": 1}


def test_every_place_of_messages_in_genai_spans_is_read(read):
    rows, report = read("otlp_spans.json", "otlp_logs.json")
    weather, events, indexed, logs = rows
    assert [message["role"] for message in weather["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert weather["messages"][0]["content"] == "Answer in one word."
    assert weather["messages"][2]["tool_calls"][0]["function"] == {
        "name": "get_weather",
        "arguments": '{"city": "Paris"}',
    }
    assert weather["messages"][-2:] == [{"role": "tool", "tool_call_id": "c-1", "content": "rain"}, bot("Rainy.")]
    assert (weather["conversation"], weather["scores"]) == ("conv-3", {"Relevance": 0.9})
    assert weather["tools"][0]["function"]["name"] == "get_weather"
    assert events["messages"] == [user("Say hi."), bot("hi")]
    assert indexed["messages"] == [system("Be terse."), user("2+2?"), bot("4")]
    assert logs["messages"] == [system("One word."), user("Colour of the sky?"), bot("Blue.")]
    assert logs["id"] == "08", "the log events of a span without messages bring them"
    assert count_unread(report) == {"a span of a model call has no messages or no reply": 1}, "span 09 alone"
    assert report.ignored["spans of the operation execute_tool"] == 1


def test_spans_as_the_python_sdk_prints_them_are_read(read):
    span = {
        "name": "chat",
        "context": {"trace_id": "0x1", "span_id": "0x2", "trace_state": "[]"},
        "start_time": "2026-03-01T00:00:00Z",
        "attributes": {
            "gen_ai.operation.name": "chat",
            "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "a"}]}]),
            "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "b"}]}]),
        },
        "events": [],
    }
    [row], _ = read(("console.json", f"{json.dumps(span, indent=4)}\n{json.dumps(span, indent=4)}\n"))
    assert (row["messages"], row["id"]) == ([user("a"), bot("b")], "0x2")


def test_litellm_payloads_and_spend_logs_are_read(read):
    rows, report = read("litellm_payloads.jsonl", "litellm_spend_logs.csv")
    assert [row["messages"] for row in rows] == [
        [user("Name a prime."), bot("7")],
        [user("Greet me."), bot("Good morning.")],
    ]
    assert [(row["id"], row["conversation"]) for row in rows] == [("chatcmpl-1", "ls-1"), ("req-9", "sess-9")]
    assert rows[0]["tools"][0]["function"]["name"] == "find_order"
    assert report.ignored == {"LiteLLM calls that failed": 1, "LiteLLM calls of the type aembedding": 1}
    assert count_unread(report) == {"the log has no messages or no response": 1}


def test_sharegpt_ends_at_its_last_reply(read):
    [row], report = read("sharegpt.json")
    assert row["messages"] == [system("Be nice."), user("Hi"), bot("Hello!"), user("Bye"), bot("Goodbye!")]
    assert (row["id"], row["conversation"], report.num_trimmed) == ("g-1", "g-1", 1)
    assert count_unread(report) == {"no reply to a message of the user (roles: user)": 1, "unknown role 'alien'": 1}
    assert report.unread.places["unknown role 'alien'"] == [f"{DATA}/sharegpt.json:40"]


def test_thumbs_of_single_messages_make_a_row_for_each_reply(read):
    rows, report = read("openai_chats.jsonl")
    greeted, first, second = rows
    assert greeted["messages"][0] == bot("How can I help?", weight=0), "it answers nobody"
    assert greeted["label"] is True
    assert (first["messages"], first["label"]) == ([user("Refund?"), bot("No.")], False)
    assert second["messages"] == [user("Refund?"), bot("No.", weight=0), user("Please."), bot("Of course.")]
    assert second["label"] is True
    assert first["conversation"] == second["conversation"] == "c-2"
    assert count_unread(report) == {"a message has a part of the type image_url": 1}


def test_messages_in_lines_are_sorted_and_rated_by_another_file(read):
    rows, _ = read("messages.csv", "thumbs.csv")
    assert [row["messages"] for row in rows] == [
        [user("When are you open?"), bot("Open on Sunday.")],
        [user("Two\nlines"), bot("Fine.")],
    ]
    assert [(row["conversation"], row["label"]) for row in rows] == [("m-1", True), ("m-2", False)]


def test_columns_with_other_names_are_named(read):
    table = ("faq.csv", "Frage;Antwort;Note\nWann?;Morgen.;0.5\n")
    with pytest.raises(ConfigError, match="no known format \\(the record has Frage, Antwort, Note\\)"):
        read(table)
    with pytest.raises(ConfigError, match='no column "Fragen", did you mean "Frage"?'):
        read(table, columns={"prompt": "Fragen", "completion": "Antwort"})
    with pytest.raises(
        ConfigError, match="no completion, so there is no exchange for rating to rate.*train on this file"
    ):
        read(("rated.jsonl", '{"prompt": "Wann?", "rating": 1}\n'))
    [row], _ = read(table, columns={"prompt": "Frage", "completion": "Antwort"}, reward="Note")
    assert (row["messages"], row["reward"]) == ([user("Wann?"), bot("Morgen.")], 0.5)


def test_preferences_stay_pairs(read):
    record = {"conversations": [{"from": "human", "value": "Q"}], "chosen": {"from": "gpt", "value": "A"}}
    record["rejected"] = {"from": "gpt", "value": "B"}
    whole = {"chosen": [user("Q2"), bot("A2")], "rejected": [user("Q2"), bot("B2")], "score": 1}
    rows, report = read(("pairs.json", json.dumps([record, whole])))
    assert [(row["prompt"], row["chosen"], row["rejected"]) for row in rows] == [
        ([user("Q")], [bot("A")], [bot("B")]),
        ([user("Q2")], [bot("A2")], [bot("B2")]),
    ]
    assert report.shapes == {"prompt/chosen/rejected": 2}


def test_alpaca_rows_are_read(read):
    rows = [{"instruction": "Add.", "input": "1 2", "output": "3"}, {"instruction": "Hi", "input": "", "output": "Ho"}]
    found, _ = read(("alpaca.json", json.dumps(rows)))
    assert [row["messages"] for row in found] == [[user("Add.\n\n1 2"), bot("3")], [user("Hi"), bot("Ho")]]


def test_anthropic_blocks_are_read(read):
    messages = [
        user("Weather?"),
        bot([{"type": "thinking", "thinking": "hm"}, {"type": "tool_use", "id": "t", "name": "w", "input": {"c": 1}}]),
        user([{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "sun"}]}]),
        bot([{"type": "text", "text": "Sunny."}]),
    ]
    [row], _ = read(("claude.jsonl", json.dumps({"messages": messages})))
    call = {"id": "t", "type": "function", "function": {"name": "w", "arguments": '{"c": 1}'}}
    assert row["messages"][1:] == [
        bot(None, tool_calls=[call], reasoning_content="hm"),
        {"role": "tool", "tool_call_id": "t", "content": "sun"},
        bot("Sunny."),
    ]


FIXTURES = sorted(path.name for path in DATA.iterdir())
PIECES = (b"", b"{", b"}", b"[", b"]", b'"', b",", b":", b"null", b"-1", b"NaN", b"[]", b"{}", b'""', b"\x00", b"\xff")
PIECES += (b'"user"', b'"tool"', b'"messages"', b'"\\ud83d"', b"1e999", b'{"role": "user"}', b"\n", b"9" * 5000)
EDITS = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 40), st.sampled_from(PIECES)), max_size=6)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(FIXTURES), EDITS)
def test_a_damaged_export_gives_usable_rows_or_a_typed_error(name, edits):
    content = (DATA / name).read_bytes()
    for position, length, piece in edits:
        at = position % (len(content) + 1)
        content = content[:at] + piece + content[at + length :]
    with tempfile.TemporaryDirectory() as folder:
        source, rows = Path(folder) / name, Path(folder) / "out.jsonl"
        source.write_bytes(content)
        try:
            report = import_traces([source], rows, ImportOptions())
        except ConfigError as error:
            str(error).encode()  # it can be printed
            return
        json.dumps(report.as_dict(), allow_nan=False)
        "\n".join(report.format_lines()).encode()
        if len(report.shapes) == 1:
            assert len(load_rows(rows).items) == report.num_rows
