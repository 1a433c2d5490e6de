"""One reader of what comes from outside, one table of limits: the code behind it trusts what it gets."""

import re
from pathlib import Path

import pytest

from reinforge.bounded import decode_json, load_json
from reinforge.errors import ConfigError
from reinforge.limits import DEEPEST, VARIABLES, Limits, get_limits, read_limits
from tests.generated import DOCS, assert_page_is

ROOT = Path(__file__).parents[3] / "src" / "reinforge"
READERS = {"bounded.py"}
"""Who meets values that are too deep for Python; everything else gets a `TooDeepError`, which is a `ValueError`."""
ENCODINGS = r"surrogatepass|surrogateescape|\\ud800"
TABLE = re.compile(r"(?<=<!-- limits -->\n).*(?=<!-- end of limits -->)", re.DOTALL)


def find_files(pattern):
    return {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if re.search(pattern, path.read_text())}


def test_only_the_reader_handles_values_that_are_too_deep():
    assert find_files("RecursionError") == READERS


def test_only_the_reader_takes_surrogates_apart():
    others = {"evaluation/row_limits.py", "runs/journal/packing.py"}  # rows may not have NUL either; bytes of texts
    assert find_files(ENCODINGS) == {*READERS, *others}


def test_the_page_has_each_limit_with_its_variable():
    rows = [f"| `{name}` | {limit.default:,} | {limit.metadata['meaning']} |\n" for name, limit in VARIABLES.items()]
    page = (DOCS / "security.md").read_text(encoding="utf-8")
    table = "".join(["\n| variable | default | limits |\n|---|---|---|\n", *rows, "\n"])
    assert_page_is("docs/security.md", TABLE.sub(lambda _: table, page))


def test_a_variable_raises_a_limit(set_limit):
    deep = "[" * 260 + "]" * 260
    for limit, read in (("json_depth", load_json), ("reply_depth", decode_json)):
        with pytest.raises(ValueError, match=f"nested deeper than {getattr(Limits(), limit)} levels"):
            read(deep)
        set_limit(limit, 260)
        assert str(read(deep)) == deep
    assert get_limits().value_depth == 210


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("REINFORGE_MAX_ROW_DEPHT", "5", 'there is no such limit, did you mean "REINFORGE_MAX_ROW_DEPTH"?'),
        ("REINFORGE_MAX_ROW_DEPTH", str(DEEPEST + 1), f"expected a whole number from 1 to {DEEPEST}, found '301'"),
        ("REINFORGE_MAX_FILE_BYTES", "1e9", "expected a whole number above 0, found '1e9'"),
        ("REINFORGE_MAX_FILE_BYTES", "0", "expected a whole number above 0, found '0'"),
        ("REINFORGE_MAX_FILE_BYTES", "9" * 5000, "expected a whole number above 0"),
    ],
)
def test_a_variable_that_sets_no_limit_is_named(name, value, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        read_limits({name: value, "REINFORGE_HOME": "/x"})
    assert caught.value.problems[0].path == name
