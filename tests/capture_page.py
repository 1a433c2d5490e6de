"""The snippets of `docs/capture.md`: fenced blocks below a comment `<!-- snippet: NAME -->`."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "capture.md"
SNIPPET = re.compile(r"^<!-- snippet: (\S+) -->\n+```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def read_snippets(language: str = "python") -> dict[str, str]:
    found = SNIPPET.findall(PAGE.read_text(encoding="utf-8"))
    return {name: text for name, kind, text in found if kind == language}


def load_snippet(name: str, folder: Path) -> Any:
    """Writes a Python snippet to a file, since some frameworks read the source of tools, and returns its module."""
    path = folder / f"snippet_{name}.py"
    path.write_text(read_snippets()[name], encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
