"""JSON within limits: what a later reader of the value can rely on, told by name where a text breaks it."""

import json
import re
import sys

import pytest

from reinforge import bounded
from reinforge.bounded import TooDeepError, TooManyError, check_values, decode_json, decode_json_prefix, load_json
from reinforge.limits import Limits

CHARS, DEPTH, DIGITS = Limits().reply_chars, Limits().reply_depth, Limits().reply_digits


@pytest.mark.parametrize(
    "text", ['{"a": [1, -2.5e3, true, null, "é\\n\\ud83d\\ude00"]}', " [] ", "3", '"x"', '{"a": {"a": 1}}']
)
def test_json_is_decoded_as_pythons_decoder_does(text):
    assert decode_json(text) == json.loads(text)


def test_what_comes_after_a_value_is_left():
    assert decode_json_prefix('{"a": 1}; {}', 0) == ({"a": 1}, 8)
    assert decode_json_prefix('{"a": 1}; {}', 9) == ({}, 12)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ('{"a": 1} x', "text after the JSON value: 'x'"),
        ("[" * 2000 + "]" * 2000, f"nested deeper than {DEPTH} levels"),
        ('{"a":' * 100_000, f"nested deeper than {DEPTH} levels"),
        ("1" * 5000, "a number of 5000 digits"),
        ("0." + "1" * 5000, "a number of 5002 digits"),
        ("[1e400]", "the number 1e400 is too large"),
        ("[-1e400]", "too large for a 64-bit float"),
        ("[NaN]", "NaN is not a JSON number"),
        ("-Infinity", "-Infinity is not a JSON number"),
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' is there twice"),
        (r'{"a": "\ud800"}', "a lone surrogate (U+D800)"),
        (r'{"\udfff": 1}', "a lone surrogate (U+DFFF)"),
        ('"\udcff"', "a lone surrogate (U+DCFF)"),
        ('"' + "x" * CHARS + '"', f"{CHARS + 2} characters, the limit is {CHARS}"),
    ],
)
def test_a_text_that_breaks_a_limit_says_which(text, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        decode_json(text)


def test_the_limits_themselves_are_allowed():
    deepest = "[" * DEPTH + "]" * DEPTH
    assert json.dumps(decode_json(deepest)) == deepest
    assert decode_json("1" * DIGITS) == int("1" * DIGITS)
    assert decode_json(repr(sys.float_info.max)) == sys.float_info.max


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ([1] * 9, 10),
        ({str(key): [] for key in range(9)}, 19),
        (["[1, 2, {,"] * 9, 10),
        (['\\"[,' * 50] * 2, 3),
        ({"a": '"', "b": ["\\", {}, ",,,,,,,"]}, 7),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_values_are_counted_outside_of_strings(value, count, encoding):
    data = json.dumps(value).encode(encoding)
    with pytest.raises(TooManyError, match=f"more than {count - 1} values"):
        check_values(data, count - 1)
    if encoding == "utf-8":
        check_values(data, count)


def test_many_empty_strings_are_counted_without_reading_them_all():
    with pytest.raises(TooManyError):
        check_values(b'""' * 1000, 100)


def test_brackets_in_strings_do_not_count_as_nesting():
    text = json.dumps({"a": "[" * 500, 'b"': '\\"{' * 500})
    assert decode_json(text) == json.loads(text)


def test_depth_does_not_depend_on_pythons_recursion_limit():
    """With a raised limit Python's decoder would overflow the C stack on such a text."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        with pytest.raises(ValueError, match="nested deeper"):
            decode_json("[" * 900_000)
    finally:
        sys.setrecursionlimit(limit)


def test_without_the_check_of_its_depth_json_from_outside_ends_in_another_error(monkeypatch):
    """Mutation check: Python's own limit is an error that nothing behind the reader expects."""
    deep = "[" * 5000 + "]" * 5000
    with pytest.raises(TooDeepError, match="nested deeper than 250 levels"):
        load_json(deep)
    monkeypatch.setattr(bounded, "check_depth", lambda text, start, most: None)
    with pytest.raises(RecursionError):
        load_json(deep)
