"""docs/reliability.md and docs/security.md: rows name their tests and mutation checks."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.mutant_table import find_problems

ROOT = Path(__file__).parents[3]


def read_rows():
    """Returns the guarantees of the table: name -> (test files, mutation checks)."""
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    table = text[text.index("| guarantee |") : text.index("## ")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:] if line]
    return {cells[0]: (re.findall(r"`(tests/[\w/.]+)`", cells[2]), cells[3]) for cells in rows}


ROWS = read_rows()


@cache
def find_mutation_checks(path):
    """Returns the names of a file's tests that are mutation checks, by name or docstring."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, functions)
        and node.name.startswith("test_")
        and ("_without_" in node.name or "mutation" in (ast.get_docstring(node) or "").lower())
    ]


def test_the_table_is_read():
    assert len(ROWS) > 20


@pytest.mark.parametrize("guarantee", ROWS)
def test_a_guarantee_has_tests_and_mutation_checks(guarantee):
    files, mutations = ROWS[guarantee]
    assert files
    assert mutations
    for path in files:
        assert (ROOT / path).is_file()
    assert [name for path in files for name in find_mutation_checks(path)], f"no mutation check in {', '.join(files)}"


def test_every_guarantee_has_a_change_for_make_mutants():
    assert find_problems(ROWS) == []


def read_checks():
    """Returns the checks of docs/security.md: name -> test files."""
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in text[text.index("| check |") :].splitlines()[2:] if line]
    return {cells[0].strip(): re.findall(r"`(tests/[\w/.]+)`", cells[2]) for cells in rows}


@pytest.mark.parametrize(("check", "files"), read_checks().items())
def test_a_check_of_the_security_page_has_a_mutation_check(check, files):
    assert [name for path in files for name in find_mutation_checks(path)], f"{check}: none in {', '.join(files)}"
