"""Only the journal's own modules speak SQL: everything else reads typed rows from `JournalReader`."""

import ast
import re
from pathlib import Path

import reinforge

SOURCE = Path(reinforge.__file__).parent
JOURNAL = {"journal.py", "journal_reader.py", "journal_schema.py", "journal_writer.py"}
JOURNAL |= {"journal_checksums.py", "journal_repair.py", "trial_folder.py"}
OTHERS = {Path("evaluation/traces/store.py")}
OTHERS |= {Path("protocols/openai/server") / name for name in ("file_store.py", "store.py")}
"""Modules with a database of their own: the temporary one that joins the records of a trace, and the server's."""

SQL = re.compile(
    r"\b(SELECT .+ FROM|INSERT (OR|INTO)|UPDATE \w+ SET|DELETE FROM|PRAGMA \w+|CREATE TABLE|ALTER TABLE)\b"
)


def find_sql(text):
    """Returns the lines of the string literals that hold SQL."""
    literals = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return sorted(node.lineno for node in literals if isinstance(node.value, str) and SQL.search(node.value))


def test_sql_stands_in_the_journals_own_modules_only():
    modules = [path for path in SOURCE.rglob("*.py") if not (path.parent.name == "runs" and path.name in JOURNAL)]
    modules = [path for path in modules if path.relative_to(SOURCE) not in OTHERS]
    assert len(modules) > 100
    found = [f"{path.relative_to(SOURCE)}:{line}" for path in modules for line in find_sql(path.read_text())]
    assert found == []


def test_the_journals_own_modules_would_be_found():
    assert all(find_sql((SOURCE / "runs" / name).read_text()) for name in JOURNAL - {"journal_writer.py"})
