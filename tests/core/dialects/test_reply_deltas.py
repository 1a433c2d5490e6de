"""A reply in pieces: what is sent of it while it is sampled, and what has to wait."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reinforge.dialects.chat_call import find_rest
from reinforge.dialects.reply_deltas import DeltaReader
from reinforge.dialects.tool_calls import parse_reply
from reinforge.types.request import ModelReply, ModelRequest, ReplyPiece, TokenLogprobs

HERMES = "{% if tools %}<tool_call>{{ tools }}</tool_call>{% endif %}"
THINKING = HERMES + "{{ '<think>' }}{{ '</think>' }}{% if add_generation_prompt %}<|assistant|>{% endif %}"
OPEN = "{{ '</think>' }}{% if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
NOTHING = TokenLogprobs((), (), ())


def read(pieces, template=HERMES, tools=None, **request):
    """Returns the deltas of reasoning and of content, without the empty ones."""
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
