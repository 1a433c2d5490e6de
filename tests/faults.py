"""Every fault of seed-faults.md has a test named after it, here or where `COVERED` says."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


@cache
def functions_of(path):
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def assert_every_fault_has_a_test(numbers, prefix, here, covered, not_there_yet):
    """Checks that each number is a test here (`test_<prefix>_<number>_...`), covered elsewhere, or not there yet."""
    names = functions_of(Path(here).relative_to(ROOT))
    for number in numbers:
        found = [name for name in names if name.startswith(f"test_{prefix}_{number}_")]
        for place in covered.get(number, []):
            path, _, name = place.partition("::")
            assert name in functions_of(path), f"{place} covers fault {number} and is not there"
            found.append(place)
        assert found or number in not_there_yet, f"fault {number} has no test"
        assert not (found and number in not_there_yet), f"fault {number} has a test: take it off the list"
