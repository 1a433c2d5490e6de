"""docs/router.md: its programs print what stands below them."""

import contextlib
import io
import re

import pytest

from tests.generated import DOCS

BLOCKS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", (DOCS / "router.md").read_text(), re.DOTALL)


@pytest.mark.parametrize(("program", "printed"), BLOCKS)
def test_a_program_of_the_page_prints_what_stands_below_it(program, printed):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(program, {})
    assert out.getvalue() == printed


def test_there_are_two():
    assert len(BLOCKS) == 2
