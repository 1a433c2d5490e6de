"""Every relative link of the Markdown pages leads to a file, and every anchor to a heading."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(path for folder in ("docs", "notes", "examples") for path in (ROOT / folder).rglob("*.md"))]
)
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+)\)")


def make_anchor(heading):
    """Returns the anchor of a heading, on code hosts and the site: "What `--resume` does" => "what---resume-does"."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


@cache
def find_anchors(path):
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    return {make_anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def find_broken_links(path):
    text = re.sub(r"`[^`\n]*`", "code", FENCE.sub("", path.read_text(encoding="utf-8")))
    broken = []
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = path.parent / target if target else path
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in find_anchors(file)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_link_is_broken(path):
    assert find_broken_links(path) == []


def test_a_broken_link_is_found(tmp_path):
    """Mutation check."""
    (tmp_path / "other.md").write_text("# Other\n\n## What `--resume` does\n\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#what---resume-does) [c](https://example.org/x) [d\ne](nowhere.md)\n"
        "[`f`](other.md#no-heading) ![g](image.png) [h](#other) `[i](gone.md)`\n\n```\n[j](gone.md)\n```\n"
    )
    assert find_broken_links(page) == ["nowhere.md", "other.md#no-heading", "image.png", "#other"]
