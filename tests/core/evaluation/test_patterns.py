"""Patterns: Python's syntax, a time limit, and no construct that `regex` would read as its own."""

import re
import time
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforge.evaluation import patterns
from reinforge.evaluation.patterns import PatternTimeout, compile_pattern, search_pattern

SLOW, TEXT = "(a|aa)+$", "a" * 60 + "b"
"""A pattern that takes ages on this text: it fails at every way of cutting 60 letters into ones and twos."""


def test_a_pattern_stops_after_its_time_limit():
    started = time.monotonic()
    with pytest.raises(PatternTimeout, match=r"'\(a\|aa\)\+\$' was still matching 61 characters after its time limit"):
        search_pattern(SLOW, TEXT, 0.05)
    assert time.monotonic() - started < 5


def test_without_the_time_limit_the_pattern_goes_on(monkeypatch):
    """The mutation: Python's own engine, on a text that is short enough for it to end."""
    monkeypatch.setattr(patterns, "compile_pattern", lambda pattern: Untimed(re.compile(pattern)))
    assert search_pattern(SLOW, "a" * 20 + "b", 0.001) is None, "no match instead of PatternTimeout"


class Untimed:
    def __init__(self, pattern):
        self.pattern = pattern

    def search(self, text, timeout):
        return self.pattern.search(text)

    fullmatch = search


@pytest.mark.parametrize(
    ("pattern", "text", "matched"),
    [
        ("a{e}", "xa{e}", "a{e}"),  # `regex` alone: an `a` with any number of errors
        ("[[:alpha:]]", "xa]", "a]"),  # `regex` alone: a letter
        ('{"a": [[]1]}', '{"a": 1}', None),
        (r"[\]{]x{2}", "]xx", "]xx"),
        (r"\N{DIGIT ONE}{2}", "11", "11"),
        ("x{,2}y", "xxy", "xxy"),
    ],
)
def test_what_regex_would_read_as_its_own_syntax_is_plain_text(pattern, text, matched):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        found, python = search_pattern(pattern, text, 1), re.search(pattern, text)
    assert (found and found[0]) == (python and python[0]) == matched


@pytest.mark.parametrize("pattern", ["(a", "[z-a]", r"\p{L}", "a**", r"(?P>x)", "(?|a)", "(" * 2000])
def test_only_pythons_syntax_is_accepted(pattern):
    with pytest.raises(ValueError, match="invalid regular expression"):
        compile_pattern(pattern)


ATOMS = ["a", "b", "{", "}", "[ab]", "[^a]", "[[]", "[[:alpha:]]", "[]a]", "[^]a]", "[{]", r"[\]{]", ".", r"\d", r"\w"]
ATOMS += [r"\s", r"\b", "^", "$", "(a|b)", "(?:ab)", "(?=a)", "(?<=a)", r"\{", "{e}", "{i<=1}", "{}", '{"a"}', "(?i:A)"]
REPEATS = ["", "*", "+", "?", "{2}", "{1,}", "*?", "+?", "{0,1}?", "*+"]
TEXTS = ["", "a", "b", "ab", "aab", "a{e}", "{", "}", '{"a"}', "a]", ":]", "[a", " a1", "A", "abab", "{i<=1}", "a\nb"]


@settings(max_examples=70, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ATOMS), st.sampled_from(REPEATS)), min_size=1, max_size=4))
def test_ascii_matches_are_those_of_re(parts):
    pattern = "".join(atom + repeat for atom, repeat in parts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            python = re.compile(pattern)
        except re.error:
            return
        spans = [search_pattern(pattern, text, 1) for text in TEXTS]
    assert [found and found.span() for found in spans] == [
        (found := python.search(text)) and found.span() for text in TEXTS
    ]
