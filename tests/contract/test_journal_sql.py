"""Only the journal's own modules speak SQL: everything else reads typed rows from `JournalReader`."""

import ast
import re
from pathlib import Path

import reinforge

SOURCE = Path(reinforge.__file__).parent
JOURNAL = {
    *(Path("runs/journal") / f"{name}.py" for name in ("journal", "reader", "schema", "checksums", "repair", "writer")),
    Path("runs/removal.py"),
}
OTHERS = {Path("traces/store.py")}
OTHERS |= {Path("protocols/openai/server") / name for name in ("database.py", "file_store.py", "store.py")}
"""Modules with a database of their own: the temporary one that joins the records of a trace, and the server's."""

SQL = re.compile(
    r"\b(SELECT .+ FROM|INSERT (OR|INTO)|UPDATE \w+ SET|DELETE FROM|PRAGMA \w+|CREATE TABLE|ALTER TABLE)\b"
)


def find_sql(text):
    """Returns the lines of the string literals that hold SQL."""
    literals = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return sorted(node.lineno for node in literals if isinstance(node.value, str) and SQL.search(node.value))


def test_sql_stands_in_the_journals_own_modules_only():
    modules = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE) not in JOURNAL]
    modules = [path for path in modules if path.relative_to(SOURCE) not in OTHERS]
    assert len(modules) > 100
    found = [f"{path.relative_to(SOURCE)}:{line}" for path in modules for line in find_sql(path.read_text())]
    assert found == []


def test_the_journals_own_modules_would_be_found():
    assert all(find_sql((SOURCE / name).read_text()) for name in JOURNAL)
