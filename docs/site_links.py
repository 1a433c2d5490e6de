"""MkDocs hook: adds the pages of the repository's root to the site, and adapts links that leave docs/.

In the repository links are relative paths. On the site SECURITY.md is project/SECURITY.md, and a link to a file that is
no page leads to the code host, or is plain text where `repo_url` is not set.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
ROOT_PAGES = ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s:#]+)(#[^()\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of the root."""
    for name in ROOT_PAGES:
        files.append(File.generated(config, f"project/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Adapts the links of a page."""
    name = page.file.src_uri.removeprefix("project/")
    place = name if name in ROOT_PAGES else f"docs/{page.file.src_uri}"

    def adapt(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        if path == "docs/extend":
            path = "docs/extend/evaluator.md"
        if path in ROOT_PAGES:
            uri = f"project/{path}"
        elif path == "README.md":
            uri = path
        elif path.startswith("docs/"):
            uri = path.removeprefix("docs/")
        elif not (ROOT / path).exists():
            return match[0]
        elif config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor})"
        else:
            return text
        return f"[{text}]({posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or '.')}{anchor})"

    return LINK.sub(adapt, markdown)
