"""What a record means survives the import: each thumb stays with its reply, each role, system prompt and tool call."""

import json

import pytest

from reinforge.errors import ConfigError
from reinforge.traces import store
from reinforge.traces.importer import ImportOptions, import_traces
from tests.traces.test_trace_formats import bot, user


def chat(*texts, **more):
    return {"messages": [(user, bot)[n % 2](text) for n, text in enumerate(texts)], **more}


@pytest.fixture
def read(tmp_path):
    """Imports files, given as name -> text or records; returns the rows and the report."""

    def read_files(options=None, **files):
        paths = []
        for name, content in files.items():
            path = tmp_path / name.replace("_", ".")
            path.write_text(content if isinstance(content, str) else "\n".join(map(json.dumps, content)))
            paths.append(path)
        report = import_traces(paths, tmp_path / "out.rows", ImportOptions(**(options or {})))
        return [json.loads(line) for line in (tmp_path / "out.rows").read_text().splitlines()], report

    return read_files


def list_reasons(report):
    return list(report.unread.counts)


def test_a_thumb_stays_with_its_record_if_ids_repeat(read, monkeypatch):
    files = {"may_jsonl": [chat("q", "a", id=1, thumbs="up")], "june_jsonl": [chat("other", "b", id=1)]}
    rows, _ = read(**files)
    assert [(row["messages"][1]["content"], row.get("label")) for row in rows] == [("a", True), ("b", None)]
    monkeypatch.setattr(store, "_RATINGS", store._RATINGS.replace("level = 'record' AND", "level = 'record' OR"))
    rows, _ = read(**files)
    assert [row.get("label") for row in rows] == [True, True], "joined by other means, the thumb rates both"


def test_stars_are_no_thumbs_even_if_they_are_named(read):
    stars = [chat("q", "a", stars=1), chat("q2", "a", stars=5)]
    with pytest.raises(ConfigError, match='--label: the values of "stars" go from 1 to 5') as caught:
        read({"label": "stars"}, a_jsonl=stars)
    assert caught.value.problems[0].fix == "make it the reward: --reward stars"
    rows, _ = read({"reward": "stars"}, a_jsonl=stars)
    assert [row["reward"] for row in rows] == [1.0, 5.0]


def test_a_count_of_likes_is_no_thumb(read):
    rows, _ = read(a_csv="prompt,completion,likes\nq,a,0\nq2,a,1\n")
    assert ["label" in row for row in rows] == [False, False], "a reply that nobody liked is not a bad one"


def test_a_table_of_chats_with_thumbs_is_no_langfuse_trace(read):
    rows, report = read(a_csv="sessionId,timestamp,user_id,input,output,thumbs\ns,2026-01-01,u,q,a,down\n")
    assert (rows[0]["label"], report.records) == (False, {"chat": 1})


def test_all_values_of_a_langfuse_score_count(read):
    trace = {"id": "t", "timestamp": "2026", "sessionId": "s", "input": "q", "output": "a"}
    [row], report = read(a_jsonl=[{**trace, "scores": {"help": [0.5, 1.0], "comment": "ok"}}])
    assert row["scores"] == {"help": 0.75}
    assert list_reasons(report) == ["comment is neither a number nor a thumb; the rest of the record is read"]


def test_feedback_on_the_root_run_of_langsmith_rates_its_calls(read):
    root = {"run_type": "chain", "id": "r", "trace_id": "r", "inputs": {"input": "q"}, "outputs": {"output": "a"}}
    call = {"run_type": "llm", "id": "l", "parent_run_id": "r", "trace_id": "r", "outputs": {"output": "a"}}
    call["inputs"] = {"messages": [user("q")]}
    [row], report = read(a_jsonl=[root, call, {"run_id": "r", "key": "user_feedback", "score": 0}])
    assert (row["id"], row["label"], report.num_unused_ratings) == ("l", False, 0)


def test_a_thumb_of_a_message_survives_results_of_tools(read):
    call, result = ({"type": "tool_use", "id": "t", "name": "f", "input": {}}, {"type": "tool_result", "content": "r"})
    messages = [user("q"), bot([call], thumbs="down"), user([result, {"type": "text", "text": "go"}])]
    rows, _ = read(a_jsonl=[{"id": "c", "messages": [*messages, bot("fine", thumbs="up")]}])
    assert [(row["messages"][-1]["content"], row["label"]) for row in rows] == [(None, False), ("fine", True)]


def test_rated_conversations_without_ids_or_with_the_same_one_stay_apart(read):
    for id_ in ({}, {"id": "c"}):
        rated = [{"messages": [user(f"q{n}"), bot(f"a{n}", thumbs=n)], **id_} for n in (0, 1)]
        rows, _ = read(a_jsonl=rated)
        assert [[message["content"] for message in row["messages"]] for row in rows] == [["q0", "a0"], ["q1", "a1"]]
        assert [row["label"] for row in rows] == [False, True]


def test_a_thumb_that_cannot_be_used_is_told(read):
    _, report = read(a_jsonl=[{"messages": [user("q"), bot("a", thumbs="up")], "rating": 0}])
    assert list_reasons(report) == ["rating of the whole record is left out, since single messages are rated"]
    _, report = read(a_jsonl=[{"messages": [{**user("q"), "thumbs": 1}, bot("a", thumbs=1)]}])
    assert report.num_unused_ratings == 1, "that of the user's message"
    message = {"conversation_id": 1, "role": "assistant", "content": "a", "feedback": "too long"}
    _, report = read(a_jsonl=[{"conversation_id": 1, **user("q")}, message])
    assert list_reasons(report) == ["feedback is neither a number nor a thumb; the rest of the record is read"]


def test_a_reply_in_a_column_of_its_own_follows_the_messages(read):
    [row], report = read(a_jsonl=[chat("q", "a", "q2", response="a2", thumbs="down")])
    assert row["messages"] == [user("q"), bot("a", weight=0), user("q2"), bot("a2")]
    assert (row["label"], report.num_trimmed) == (False, 0)
    [row], _ = read(a_jsonl=[chat("q", "a", answer="42")])
    assert row["messages"] == [user("q"), bot("a")]


def test_pairs_of_role_and_text_are_messages(read):
    [row], _ = read(a_jsonl=[{"messages": [["system", "Be kind."], ["human", "hi"], ["ai", "ho"]]}])
    assert row["messages"] == [{"role": "system", "content": "Be kind."}, user("hi"), bot("ho")]


@pytest.mark.parametrize("call_type", ["anthropic_messages", "acompletion", "aresponses"])
def test_a_system_prompt_of_blocks_is_kept(read, call_type):
    field = "instructions" if call_type == "aresponses" else "system"
    body = {field: [{"type": "text", "text": "Be kind."}]}
    log = {"call_type": call_type, "messages": [user("q")], "response": "a", "proxy_server_request": {"body": body}}
    [row], _ = read(a_jsonl=[log])
    assert row["messages"][0] == {"role": "system", "content": "Be kind."}


def test_an_instruction_joins_its_input_only_if_there_is_one(read):
    rows, _ = read(a_csv="Instruction,Input,Output\nTranslate.,hi,ho\n,hi,ho\n")
    assert [row["messages"][0]["content"] for row in rows] == ["Translate.\n\nhi", "hi"]


def test_a_column_with_the_name_of_the_user_is_no_prompt(read):
    [row], _ = read(a_csv="user,message,response\nann,Where?,There.\n")
    assert row["messages"] == [user("Where?"), bot("There.")]
    [row], _ = read(a_csv="user,assistant\nWhere?,There.\n")
    assert row["messages"] == [user("Where?"), bot("There.")]


def test_an_answer_in_json_stays_as_it_is(read):
    answer = '{"answer": "42", "content": "because"}'
    [row], _ = read(a_jsonl=[{"prompt": "q", "completion": answer}])
    assert row["messages"][1]["content"] == answer


def test_an_empty_reply_is_not_trained(read):
    [row], report = read(a_jsonl=[chat("q", None, "q2", "a"), chat("q", "")])
    assert row["messages"][1] == bot("", weight=0)
    assert list_reasons(report) == ["the reply is empty"]


def say(role, content, minute, **more):
    return {"conversation_id": 1, "role": role, "content": content, "time": minute, **more}


@pytest.mark.parametrize(
    "times",
    [
        ("1/2/2026 9:59", "1/2/2026 10:00", "1/2/2026 10:01", "1/2/2026 10:02"),
        ("2026-01-01T09:00:00Z", "2026-01-01T09:00:00.5Z", "2026-01-01T11:00:01+02:00", "2026-01-01T09:00:02Z"),
    ],
)
def test_messages_stay_in_the_order_of_their_times(read, times):
    messages = [say(("user", "assistant")[n % 2], f"{n}", time) for n, time in enumerate(times)]
    [row], _ = read(a_jsonl=messages)
    assert [message["content"] for message in row["messages"]] == ["0", "1", "2", "3"]


def test_tool_calls_in_lines_of_their_own_are_kept(read):
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [say("user", "q", 1), say("assistant", None, 2, tool_calls=[call])]
    [row], report = read(a_jsonl=[*messages, say("tool", "r", 3, tool_call_id="t"), say("assistant", "a", 4)])
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert row["messages"][1]["tool_calls"] == [call]
    assert not list_reasons(report)


def test_a_conversation_ends_before_a_message_that_cannot_be_read(read):
    image = [{"type": "image_url", "image_url": "x"}]
    messages = [say("user", "q", 1), say("assistant", "a", 2), say("user", image, 3), say("assistant", "A cat.", 4)]
    [row], report = read(a_jsonl=messages)
    assert row["messages"] == [user("q"), bot("a")], "no answer to a picture that is not there"
    assert [reason.rpartition("; ")[2] for reason in list_reasons(report)] == [
        "its conversation ends before this message"
    ]


def test_log_events_without_the_reply_train_no_earlier_one(read):
    names = ("user", "assistant", "user")
    events = [
        {"event_name": f"gen_ai.{name}.message", "span_id": "s", "trace_id": "t", "body": {"content": name}}
        for name in names
    ]
    with pytest.raises(ConfigError, match="the log events of a model call have no gen_ai.choice"):
        read(a_jsonl=events)


def test_a_call_is_read_although_its_evaluation_has_no_score(read):
    event = {"name": "gen_ai.evaluation.result", "attributes": {"gen_ai.evaluation.name": "Relevance"}}
    span = {"span_id": "s", "trace_id": "t", "events": [event], "attributes": {"gen_ai.operation.name": "chat"}}
    span["attributes"] |= {"gen_ai.prompt": "q", "gen_ai.completion": "a"}
    [row], report = read(a_jsonl=[span])
    assert row["messages"] == [user("q"), bot("a")]
    assert list_reasons(report) == ["Relevance is neither a number nor a thumb; the rest of the record is read"]


def test_the_unread_rest_of_a_file_is_told(read):
    good = json.dumps(chat("q", "a"))
    for name, text in {"a_json": f"[{good}, nope, {good}]", "b_json": f'{{\n"data": [{good}],\nnope}}'}.items():
        rows, report = read(**{name: text})
        assert len(rows) == 1
        assert list_reasons(report)[-1].startswith("the rest of the file is not read")
    _, report = read(a_csv='prompt,completion\nq,a\n"q"x,a\nq,a\n')
    assert "the rows after it are not read" in list_reasons(report)[0]


def test_a_record_with_other_lists_is_still_one_record(read):
    record = chat("q", "a", results=[{"x": 1}])
    for text in (json.dumps(record), json.dumps(record, indent=1), json.dumps([record])):
        rows, _ = read(a_json=text)
        assert [row["messages"] for row in rows] == [[user("q"), bot("a")]]


def test_rows_of_an_earlier_import_and_hidden_files_are_not_imported(tmp_path):
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat("q", "a")))
    (tmp_path / "._chats.jsonl").write_bytes(b"\xff")
    (tmp_path / ".import-x").mkdir()
    (tmp_path / ".import-x" / "rows.jsonl").write_text(json.dumps(chat("half", "done")))
    for _ in range(2):
        report = import_traces([tmp_path, tmp_path / "chats.jsonl"], tmp_path / "rows.jsonl", ImportOptions())
        assert (report.num_files, report.num_rows) == (1, 1)
    with pytest.raises(ConfigError, match="the file to read is also the file to write"):
        import_traces([tmp_path / "rows.jsonl"], tmp_path / "rows.jsonl", ImportOptions())


def test_ids_with_addresses_are_masked_and_stay_different(read):
    records = [
        chat(f"q{n}", "a", conversation_id=f"{name}@example.com") for n, name in enumerate(("ann", "bob", "ann"))
    ]
    rows, _ = read({"redact": True}, a_jsonl=records)
    assert [row["conversation"] for row in rows] == ["[email]-1", "[email]-1", "[email]-2"]


def test_ids_are_different_whatever_they_look_like(read):
    rows, _ = read(a_jsonl=[chat("1", "a", id="x"), chat("2", "a", id="x"), chat("3", "a", id="x-2")])
    assert len({row["id"] for row in rows}) == 3


def test_the_tool_calls_of_a_whole_run_are_kept(read):
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    steps = [bot(None, tool_calls=[call]), {"role": "tool", "tool_call_id": "t", "content": "r"}, bot("a")]
    graph = {"run_type": "chain", "id": "r", "inputs": {"messages": [user("q")]}}
    trace = {"id": "t", "timestamp": "2026", "sessionId": "s", "input": {"messages": [user("q")]}}
    for messages in ([user("q"), *steps], steps):
        rows, _ = read(
            a_jsonl=[graph | {"outputs": {"messages": messages}}, trace | {"output": {"messages": messages}}]
        )
        assert [row["messages"] for row in rows] == [[user("q"), *steps]] * 2
    [row], _ = read(a_jsonl=[graph | {"outputs": {"messages": [user("q"), bot("a")]}}])
    assert row["messages"] == [user("q"), bot("a")]


def test_the_history_beside_a_question_is_kept(read):
    inputs = {"input": "q2", "chat_history": [{"type": "human", "content": "q"}, {"type": "ai", "content": "a"}]}
    run = {"run_type": "llm", "id": "r", "inputs": inputs, "outputs": {"output": "a2"}}
    [row], _ = read(a_jsonl=[run])
    assert row["messages"] == [user("q"), bot("a", weight=0), user("q2"), bot("a2")]
    with pytest.raises(ConfigError, match="the input has its history as text"):
        read(a_jsonl=[run | {"inputs": {"input": "q2", "chat_history": "Human: q"}}])


def test_a_list_that_the_user_wrote_stays_as_it_is(read):
    [row], _ = read(a_jsonl=[{"prompt": '["a", "b"]', "completion": "ok"}])
    assert row["messages"][0] == user('["a", "b"]')


def test_names_of_kinds_do_not_fill_the_screen(read):
    runs = [{"run_type": f"{n:03}" * 1000, "id": f"{n}", "parent_run_id": "p"} for n in range(100)]
    _, report = read(a_jsonl=[*runs, chat("q", "a")])
    assert (len(report.ignored), report.ignored["records of other kinds"], report.ignored.total()) == (41, 60, 100)
    assert max(map(len, report.format_lines())) < 500


def test_tools_by_name_are_kept(read):
    [row], _ = read(a_jsonl=[chat("q", "a", tools={"f": {"description": "finds"}})])
    assert [tool["function"]["name"] for tool in row["tools"]] == ["f"]
