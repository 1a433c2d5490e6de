"""Writes `report.html`, the page of a run: one file that works offline, anywhere, and can be sent to a colleague.

It has no script and asks for nothing: its policy forbids both, and what a model or a user wrote is text in a tree of
elements. Charts are SVG, colours of tokens are radio buttons and a style sheet.
"""

from __future__ import annotations

import shlex
from importlib.resources import files
from pathlib import Path
from xml.etree.ElementTree import Element

from reinforge.files import replace_file
from reinforge.runs.page import sections
from reinforge.runs.page.content import PageContent, read_content
from reinforge.runs.page.elements import build, to_html
from reinforge.runs.summary import RunSummary, is_from_python
from reinforge.version import __version__

PAGE = "report.html"
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What the page may load or run: its own style sheet, and nothing else."""
NUM_CHARTS = 3
"""Sections before the first one with chats."""
COLOURS = {
    "logprob": "log-prob: the redder, the less likely",
    "relative": "relative reward: green is above the mean of the group, red below",
    "mask": "tokens that training uses: underlined",
    "nothing": "no colours",
}


def write_page(folder: Path, summary: RunSummary | None = None, path: Path | None = None) -> Path:
    """Writes the page of a run, `report.html` in its folder or `path`, and returns its path.

    Args:
        summary: How the run ended; None: read it from the folder.
    """
    target = path or folder / PAGE
    replace_file(target, to_html(build_page(read_content(folder, summary))))
    return target


def build_page(content: PageContent) -> Element:
    parts = {
        "Verdict": sections.build_verdict(content),
        "Reward": sections.build_rewards(content),
        "Training": sections.build_measures(content),
        "What changed": sections.build_examples(content),
        "Groups": sections.build_groups(content),
        "Episodes": sections.build_episodes(content),
        "Failures": sections.build_outcomes(content),
        "Settings": sections.build_settings(content, describe_rerun(content)),
    }
    links = [(name, part.get("id")) for name, part in parts.items() if part is not None]
    title = f"Run {content.summary.run_id}"
    body = build(
        "body",
        build("header", build("h1", title), build("p", _describe_origin(content), class_="note")),
        build(
            "nav",
            build("ul", (build("li", build("a", name, href=f"#{id_}")) for name, id_ in links)),
            aria_label="Sections",
        ),
        build("main", _place_colours(content, list(parts.values()))),
    )
    head = build(
        "head",
        build("meta", charset="utf-8"),
        build("meta", http_equiv="Content-Security-Policy", content=POLICY),
        build("meta", name="viewport", content="width=device-width, initial-scale=1"),
        build("meta", name="referrer", content="no-referrer"),
        build("title", f"{title} - reinforge"),
    )
    style = Element("style")
    style.text = files("reinforge.runs.page").joinpath("page.css").read_text(encoding="utf-8")
    head.append(style)
    return build("html", head, body, lang="en")


def describe_rerun(content: PageContent) -> str:
    folder = content.overview.folder
    if is_from_python(folder):
        return "reinforge.finetune(...) with the same agent, dataset and reward"
    return f"reinforge finetune {shlex.quote(str(folder / 'config.yml'))}"


def _describe_origin(content: PageContent) -> str:
    record = content.overview.record
    versions = (record.facts.get("provenance") or {}).get("versions", {}) if record is not None else {}
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if name in ("torch", "transformers"))
    return f"Written by reinforge {__version__}{f' with {named}' if named else ''}. Intervals are 95 %."


def _place_colours(content: PageContent, parts: list[Element | None]) -> list[Element | None]:
    """Puts the choice of colours before the first section with chats; it stays in view below that."""
    return [*parts[:NUM_CHARTS], build_colours(), *parts[NUM_CHARTS:]] if content.rows else parts


def build_colours() -> Element:
    buttons = []
    for number, (name, text) in enumerate(COLOURS.items()):
        button = build("input", type="radio", name="colour", id=f"by-{name}", checked="" if number == 0 else None)
        buttons.append(build("label", button, f" {text}"))
    return build("fieldset", build("legend", "Colour the tokens of replies by"), buttons)
