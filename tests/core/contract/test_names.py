"""One name for one thing: no class name twice, and functions are verbs instead of participles."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[3] / "src" / "reinforge"

TWICE = {"Algorithm", "DPO", "Evaluator", "GRPO", "IPO", "PPO", "Trainer"}
"""Names that two of the projects whose API reinforge offers both have."""

PARTICIPLE = re.compile(r"_?(told|shown|said|joined|found|kept|given|made)$")


def definitions(kinds):
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kinds):
                yield path.relative_to(ROOT), node


def test_no_class_name_twice():
    files = defaultdict(list)
    for path, node in definitions(ast.ClassDef):
        files[node.name].append(str(path))
    twice = {name: paths for name, paths in files.items() if len(paths) > 1 and name not in TWICE}
    assert twice == {}


def test_every_exception_is_needed():
    counts = defaultdict(int)
    for _, node in definitions(ast.ClassDef):
        counts[node.name] += 1
    assert {name for name in TWICE if counts[name] < 2} == set()


def test_functions_are_not_named_by_participles():
    functions = definitions((ast.FunctionDef, ast.AsyncFunctionDef))
    assert [f"{path}: {node.name}" for path, node in functions if PARTICIPLE.fullmatch(node.name)] == []
