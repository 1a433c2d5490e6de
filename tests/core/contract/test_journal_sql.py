"""Only the journal's own modules speak SQL: everything else reads typed rows from `JournalReader`."""

import ast
import re
from pathlib import Path

import reinforge

SOURCE = Path(reinforge.__file__).parent
JOURNAL = SOURCE / "runs" / "journal"
OTHERS = {Path("traces/store.py"), Path("runs/removal.py")}
OTHERS |= {Path("protocols/openai/server") / name for name in ("file_store.py", "store.py")}
"""Modules with a database of their own: of the records of a trace, of the trial of a folder, of the server."""

SQL = re.compile(
    r"\b(SELECT .+ FROM|INSERT (OR|INTO)|UPDATE \w+ SET|DELETE FROM|PRAGMA \w+|CREATE TABLE|ALTER TABLE)\b"
)


def find_sql(text):
    """Returns the lines of the string literals that hold SQL."""
    literals = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return sorted(node.lineno for node in literals if isinstance(node.value, str) and SQL.search(node.value))


def test_only_the_journals_own_modules_hold_sql():
    modules = [path for path in SOURCE.rglob("*.py") if path.parent != JOURNAL]
    modules = [path for path in modules if path.relative_to(SOURCE) not in OTHERS]
    assert len(modules) > 100
    found = [f"{path.relative_to(SOURCE)}:{line}" for path in modules for line in find_sql(path.read_text())]
    assert found == []


def test_the_journals_own_modules_would_be_found():
    assert all(find_sql((JOURNAL / f"{name}.py").read_text()) for name in ("journal", "reader", "schema", "repair"))
