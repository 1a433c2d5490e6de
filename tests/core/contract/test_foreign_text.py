"""Whatever reads text of a model, a service or a file takes time in proportion to its length."""

import re
import time

import pytest

from reinforge.config.document import PLACEHOLDER
from reinforge.config.imports import SPEC
from reinforge.dialects.tool_calls import ToolFormat, find_bad_call, read_tool_calls
from reinforge.evaluation.answers import parse_answer
from reinforge.evaluation.evaluators.numeric import find_last_number
from reinforge.multiagent.decisions import read_decision
from reinforge.rollout.models.openai_http import extract_error_message
from reinforge.safe_text import escape_markdown, to_printable

SIZE = 50_000
"""Linear work takes a third of `max_cpu_s` for that many characters; quadratic work more, most of it minutes."""

PARTS = [
    "<", "<tool_call>", "<tool_call> ", " ", "\n", "\t\n", '"', '\\"', '"\\', "{", "[", '{"a":', '{"name":"f"}', "}",
    "```\n", "1", "1,111", "1.", "1e1", "-", "a", "a ", "a.", "a:", "_", "${A:-", "${", "$", "my ", "decision ",
    "decision: i ", "accept", "accept ",
    "sk-", "eyJ.", "bearer ", "authorization: ", "a://", "a@", "://a", "www.", "|", "\\", "é", "\x1b",
]  # fmt: skip
FAMILY_PARTS = [
    "<function=f>", "<parameter=a>", "</parameter>", "<arg_key>a</arg_key><arg_value>", "</arg_value>", "[TOOL_CALLS]",
    "[TOOL_CALLS]f{}", "[TOOL_CALLS]f[ARGS]", "<|tool_call_start|>", "<|tool_call_start|>[f()]", "[f(", "f(a=",
    "<|tool_call|>", "<|tool_call|>[{}]", "<|tool_call>call:f{", "<|tool_call>call:f{}<tool_call|>", '<|"|>',
    "<escape>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "<|channel|>", "<|message|>",
    "<|message|><|end|>",
]  # fmt: skip
JSON_STARTS = ["<tool_call>", '{"name": "f", "arguments": ']
FAMILY_STARTS = [
    *JSON_STARTS,
    "<tool_call>f<arg_key>a</arg_key><arg_value>", "<function=f><parameter=a>", "[TOOL_CALLS]",
    "<|tool_call_start|>[f(a=",
    "<|tool_call>call:f{a:", "<｜tool▁calls▁begin｜>",
]  # fmt: skip


def read_json(text):
    try:
        return parse_answer(text, allow_fence=True)
    except ValueError:
        return None


READERS = {
    **{
        f"tool calls ({tool_format})": lambda text, tool_format=tool_format: read_tool_calls(text, tool_format)
        for tool_format in ToolFormat
    },
    "arguments": lambda text: find_bad_call({"tool_calls": [{"function": {"name": "f", "arguments": text}}]}),
    "an error of a service": extract_error_message,
    "an answer with a number": find_last_number,
    "an answer in JSON": read_json,
    "a decision": lambda text: read_decision(text, {"accept": "accept", "reject": "reject"}),
    "text for a terminal": to_printable,
    "text for a report": escape_markdown,
    "variables": lambda text: [*PLACEHOLDER.finditer(text)],
    "a name in the project": SPEC.fullmatch,
}
STARTS = {"arguments": JSON_STARTS, "an answer in JSON": JSON_STARTS, "a decision": ["decision"]}


def search_slowly(size):
    """Returns the CPU time of a quick quadratic search."""
    started = time.thread_time()
    re.sub(r"<[^>]*>", " ", "<" * size)
    return time.thread_time() - started


@pytest.fixture(scope="module")
def max_cpu_s():
    """A fifth of what that search takes on this machine for `SIZE` characters, however fast it is."""
    return 16 / 5 * search_slowly(SIZE // 4)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_no_text_takes_long_to_read(reader, max_cpu_s):
    slow, is_family = {}, reader.startswith("tool calls")
    starts = FAMILY_STARTS if is_family else STARTS.get(reader, [])
    for part in PARTS + FAMILY_PARTS * is_family:
        body = part * (SIZE // len(part))
        for text in (body, f"x{body}\x00", *(f"{start}{body}!" for start in starts)):
            started = time.thread_time()
            READERS[reader](text)
            used = time.thread_time() - started
            if used > max_cpu_s:
                slow[f"{text[:20]!r} ... {part!r}"] = round(used, 1)
    assert not slow


def test_a_quadratic_search_would_exceed_that_bound(max_cpu_s):
    assert 4 * search_slowly(SIZE // 2) > 2 * max_cpu_s
