"""Benchmarks and examples take names of the package that are there: nobody runs all of them after every change."""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").rglob("*.py")])


OF_EXTRAS = {"ray"}
"""Packages of extras that the tests do not install."""


def is_there(module, name):
    return hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_that_a_script_imports_from_the_package_is_there(path):
    imported = [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "reinforge"
        for alias in node.names
    ]
    try:
        missing = [f"{module}.{name}" for module, name in imported if not is_there(module, name)]
    except ModuleNotFoundError as error:
        if error.name not in OF_EXTRAS:
            raise
        pytest.skip(f"needs the extra {error.name}")
    assert missing == []


def test_a_name_that_is_gone_is_found():
    assert is_there("reinforge.engine.training.scheduled_optimizer", "learning_rate_factor")
    assert not is_there("reinforge.engine", "learning_rate_factor")
