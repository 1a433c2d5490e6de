"""What the command line writes goes through `reinforge.cli.output`, which removes control characters and secrets."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3] / "src" / "reinforge"
OUTPUT = ROOT / "cli" / "output.py"
WRITES = {"echo", "secho", "echo_via_pager", "print_exception", "print_exc", "print_tb"}
MODULES = sorted(set(ROOT.rglob("*.py")) - {OUTPUT})


def find_writes(source):
    if not any(name in source for name in WRITES):
        return []  # parsing takes long
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    names = (getattr(function, "attr", None) or getattr(function, "id", None) for function in calls)
    return sorted(name for name in names if name in WRITES)


def test_no_other_module_writes_to_the_terminal():
    assert {str(path): found for path in MODULES if (found := find_writes(path.read_text()))} == {}


def test_a_call_is_found():
    assert find_writes("import click\nclick.echo('x')\nfrom click import secho\nsecho('y')") == ["echo", "secho"]
    assert find_writes(OUTPUT.read_text())
