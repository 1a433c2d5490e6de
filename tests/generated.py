"""Files that are made from the code: compared, or written with REINFORGE_UPDATE_DOCS=1."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def assert_page_is(name, text):
    """Fails when a file, named from the repository's root, is stale and says how to write it anew."""
    page = ROOT / name
    if os.environ.get("REINFORGE_UPDATE_DOCS"):
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    written = page.read_text(encoding="utf-8") if page.exists() else ""
    assert written == text, f"{name} is stale: run the tests of this file with REINFORGE_UPDATE_DOCS=1"
