"""A finished completion in chunks: joined they are the message, its log-probs and its tokens."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reinforge.dialects.chat_call import find_rest
from reinforge.dialects.chunks import split_completion
from reinforge.dialects.reply_deltas import DeltaReader
from reinforge.dialects.tool_calls import parse_reply
from reinforge.types.request import ModelReply, ModelRequest, ReplyPiece, TokenLogprobs

CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2, 3]}'}},
    {"id": "c2", "type": "function", "function": {"name": "now", "arguments": ""}},
]


def completion(*messages, finish_reason="stop", **choice):
    choices = [
        {"index": index, "finish_reason": finish_reason, "logprobs": None, **choice, "message": message}
        for index, message in enumerate(messages)
    ]
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    return {"id": "call-1", "created": 7, "model": "m", "object": "chat.completion", "usage": usage, "choices": choices}


def says(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def deltas(chunks, index=0):
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def join(chunks, index=0):
    """Returns the message that a client puts together from the deltas of a choice."""
    message, calls = {"role": None, "content": "", "reasoning_content": "", "refusal": ""}, {}
    for delta in deltas(chunks, index):
        message["role"] = delta.get("role", message["role"])
        for name in ("content", "reasoning_content", "refusal"):
            message[name] += delta.get(name) or ""
        for part in delta.get("tool_calls", ()):
            call = calls.setdefault(part["index"], {"id": "", "name": "", "arguments": ""})
            call["id"] += part.get("id", "")
            call["name"] += part["function"].get("name", "")
            call["arguments"] += part["function"]["arguments"]
    return message, [calls[index] for index in sorted(calls)]


def test_a_text_is_split_at_its_tokens():
    chunks = list(split_completion(completion(says("Hi you")), token_texts=["Hi", " you", "<|end|>"]))
    assert deltas(chunks) == [
        {"role": "assistant", "content": ""}, {"content": "Hi"}, {"content": " you"}, {},
    ]  # fmt: skip
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert {(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks} == {
        ("call-1", "chat.completion.chunk", 7, "m")
    }
    assert all("usage" not in chunk for chunk in chunks)


def test_without_token_texts_it_is_split_at_its_words():
    chunks = list(split_completion(completion(says("a reply\nof words"))))
    assert [delta["content"] for delta in deltas(chunks)[1:-1]] == ["a", " reply", "\nof", " words"]


def test_reasoning_comes_before_the_text_and_is_split_at_its_tokens_too():
    texts = ["<think>", "So", " 4", "</think>", "\n\n", "It is", " 4", "<|end|>"]
    chunks = list(split_completion(completion(says("It is 4", reasoning_content="So 4")), token_texts=texts))
    assert deltas(chunks)[1:-1] == [
        {"reasoning_content": "So"}, {"reasoning_content": " 4"}, {"content": "It is"}, {"content": " 4"},
    ]  # fmt: skip


def test_tool_calls_give_index_id_and_name_first_then_their_arguments_in_pieces():
    chunks = list(split_completion(completion(says(None, tool_calls=CALLS), finish_reason="tool_calls")))
    first, *pieces = deltas(chunks)[1:-1]
    named = {"name": "add", "arguments": ""}
    assert first == {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": named}]}
    assert pieces[0] == {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]}
    _, calls = join(chunks)
    assert calls == [
        {"id": "c1", "name": "add", "arguments": '{"a": 1, "b": [2, 3]}'}, {"id": "c2", "name": "now", "arguments": ""},
    ]  # fmt: skip
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_usage_is_the_last_chunk_and_null_in_the_others():
    *others, last = split_completion(completion(says("a")), include_usage=True)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 5)
    assert {chunk["usage"] for chunk in others} == {None}


def test_log_probs_and_token_ids_of_all_chunks_are_those_of_the_reply():
    tokens = TokenLogprobs((1, 2), (7, 8, 9), (-0.5, -0.25, -1.0), texts=("Hi", " you", "<|end|>"))
    whole = completion(says("Hi you"), logprobs=tokens, token_ids=[7, 8, 9]) | {"prompt_token_ids": [1, 2]}
    chunks = list(split_completion(whole))
    found = [(choice["logprobs"], choice["token_ids"]) for chunk in chunks[1:] for choice in chunk["choices"]]
    assert [[entry["token"] for entry in logprobs["content"]] for logprobs, _ in found] == [
        ["Hi"], [" you"], ["<|end|>"],
    ]  # fmt: skip
    assert [ids for _, ids in found] == [[7], [8], [9]]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[1, 2], None, None, None]


def test_a_character_that_spans_tokens_costs_neither_text_nor_log_probs():
    tokens = TokenLogprobs((1,), (7, 8), (-0.5, -0.25), texts=("\ufffd", "\ufffd"))
    chunks = list(split_completion(completion(says("é"), logprobs=tokens)))
    assert join(chunks)[0]["content"] == "é"
    assert [len(chunk["choices"][0]["logprobs"]["content"]) for chunk in chunks if chunk["choices"][0]["logprobs"]] == [
        2
    ]


texts = st.text(max_size=30)


@given(st.lists(st.text(max_size=6), max_size=12), st.integers(0, 20), st.integers(0, 20), texts)
def test_joined_chunks_are_the_message_whatever_the_tokens_are(pieces, start, length, arguments):
    joined = "".join(pieces)
    content = joined[start : start + length]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = says(content, reasoning_content=joined[:start], tool_calls=[call])
    ids = list(range(len(pieces)))
    chunks = list(split_completion(completion(message, token_ids=ids), token_texts=pieces, include_usage=True))
    found, (found_call,) = join(chunks)
    assert (found["role"], found["content"], found["reasoning_content"]) == ("assistant", content, joined[:start])
    assert found_call == {"id": "c", "name": "f", "arguments": arguments}
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [token for part in parts for token in part.get("token_ids", ())] == ids
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["stop"]
    json.dumps(chunks)


HERMES = "{% if tools %}<tool_call>{{ tools }}</tool_call>{% endif %}"
THINKING = HERMES + "{{ '<think>' }}{{ '</think>' }}{% if add_generation_prompt %}<|assistant|>{% endif %}"
OPEN = "{{ '</think>' }}{% if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
NOTHING = TokenLogprobs((), (), ())


def read(pieces, template=HERMES, tools=None, **request):
    reader = DeltaReader(ModelRequest([], tools=tools, **request), template)
    deltas = [reader.read(ReplyPiece(piece, NOTHING)) for piece in pieces]
    return [d.reasoning for d in deltas if d.reasoning], [d.content for d in deltas if d.content]


def test_plain_text_is_sent_as_it_comes():
    assert read(["Hel", "lo", " <b", "> "]) == ([], ["Hel", "lo", " <b", "> "])


def test_a_call_is_held_back_and_a_text_that_only_looks_like_one_is_not():
    assert read(["Let me ", "add.", "\n<tool", "_call>{", "}"], tools=TOOLS)[1] == ["Let me", " add."]
    assert read(["1 ", "<", "2 <tool", "box"], tools=TOOLS)[1] == ["1", " <2", " <toolbox"]
    assert read(["<tool_call>"], tools=TOOLS, tool_choice="none")[1] == ["<tool_call>"]


def test_reasoning_comes_before_the_text():
    pieces = ["<thi", "nk>\n2+", "3\n", "</thi", "nk>\n\n", "5 ", "apples"]
    assert read(pieces, THINKING) == (["2+", "3"], ["5 ", "apples"])
    assert read(["no tags ", "at all"], THINKING) == ([], ["no tags ", "at all"])


def test_where_the_prompt_opens_the_reasoning_the_tag_is_missing():
    assert read(["2+", "3</think>", "5"], OPEN) == (["2+", "3"], ["5"])


def test_a_raw_prompt_is_continued_without_a_format():
    assert read(["<think>", "a"], THINKING, prompt="x") == ([], ["<think>", "a"])


@pytest.mark.parametrize(
    ("whole", "sent", "rest"),
    [("Hello", "Hel", "lo"), ("Hello", "", "Hello"), ("Hello", " Hel", "lo"), ("Hello", "Hello", ""), (None, "", "")],
)
def test_the_rest_of_a_text(whole, sent, rest):
    assert find_rest(whole, sent) == rest


def test_a_text_that_turned_out_otherwise_has_no_rest():
    assert find_rest("Bye", "Hello") == ""


TEXTS = st.lists(
    st.sampled_from(["a", "<", "\n", " ", "<think>", "</think>", CALL, "<tool", "think>", "x\n\n"]), max_size=8
)


@given(parts=TEXTS, cuts=st.lists(st.integers(0, 80), max_size=6), template=st.sampled_from([HERMES, THINKING, OPEN]))
def test_what_was_sent_is_the_beginning_of_what_the_message_says(parts, cuts, template):
    text = "".join(parts)
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    request = ModelRequest([], tools=TOOLS)
    pieces = [text[a:b] for a, b in pairwise(places)]
    reasoning, content = ("".join(deltas) for deltas in read(pieces, template, tools=TOOLS))
    reply = parse_reply(ModelReply({"role": "assistant", "content": text}, "stop", None), request, template)
    whole = reply.message.get("content") or ""
    if reply.failure is None and not (template != HERMES and "</think>" in content):  # an end without a beginning
        assert whole.lstrip().startswith(content.lstrip()) or content.strip() == ""
        assert (reply.message.get("reasoning_content") or "").startswith(reasoning)
