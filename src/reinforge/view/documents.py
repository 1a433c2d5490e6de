"""What all pages share: the head, the way between pages, and what a live page needs to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlencode
from xml.etree.ElementTree import Element

from reinforge.runs.page.elements import Content, build
from reinforge.version import __version__

Trail = Sequence[tuple[str, str | None]]
"""Name and address of the pages in the navigation of a page; None: the page itself."""


@dataclass(frozen=True, slots=True)
class Live:
    """How a page learns that it is out of date: `path` returns the version, `/events` below it sends each change."""

    path: str
    version: str


def build_link(path: str, **values: str) -> str:
    """Returns an address with its values: `build_link("/compare", run="a b")` -> `/compare?run=a+b`."""
    return f"{path}?{urlencode(values)}" if values else path


def build_anchor(text: str, address: str, **attributes: str) -> Element:
    """Returns a link; its address is kept unchanged, whatever the id of an example looks like."""
    anchor = build("a", text, **attributes)
    anchor.set("href", address)
    return anchor


def build_run_path(name: str, page: str = "") -> str:
    """Returns the address of a run's page: `/runs/NAME/episodes`; a name that is not UTF-8 has none that works."""
    return f"/runs/{quote(name, safe='', errors='replace')}" + (f"/{page}" if page else "")


def build_learning_path(name: str, page: str = "") -> str:
    return f"/learning/{quote(name, safe='', errors='replace')}" + (f"/{page}" if page else "")


RUN_PAGES = {
    "episodes": "Episodes",
    "rewards": "Rewards",
    "stability": "Stability",
    "data": "Data",
    "checkpoints": "Checkpoints",
    "serving": "Serving",
}
"""The pages of a run beside its overview: address and name, in the order of the navigation."""


def build_trail(name: str, page: str) -> Trail:
    pages = [(title, build_run_path(name, path) if path != page else None) for path, title in RUN_PAGES.items()]
    return [("Runs", "/"), (name, build_run_path(name) if page != "overview" else None), *pages]


def build_document(title: str, content: Sequence[Content], *, trail: Trail, live: Live | None = None) -> Element:
    """Returns a page with a title and the pages in its navigation; `live`: how it learns of changes."""
    main = build("main", build("h1", title), *content, id="main", tabindex="-1")
    styles, scripts = ["page.css", "view.css"], ["view.js"]
    if main.find(".//figure") is not None:
        styles, scripts = ["vendor/uPlot.min.css", *styles], [*scripts, "vendor/uPlot.iife.min.js", "charts.js"]
    head = build(
        "head",
        build("meta", charset="utf-8"),
        build("meta", name="viewport", content="width=device-width, initial-scale=1"),
        build("title", f"{title} - reinforge"),
        build("link", rel="icon", href="data:,"),
        (build("link", rel="stylesheet", href=f"/static/{name}") for name in styles),
        (build("script", src=f"/static/{name}", defer="defer") for name in scripts),
    )
    links = [
        build("li", build_anchor(name, address) if address else build("span", name, aria_current="page"))
        for name, address in trail
    ]
    status = build("p", id="status", role="status", class_="note") if live else None
    if live is not None:
        main.set("data-live", live.path)
        main.set("data-version", live.version)
    body = build(
        "body",
        build("a", "Skip to the content", href="#main", class_="skip"),
        build("header", build("nav", build("ul", links), aria_label="Pages"), status),
        main,
        build("footer", build("p", f"reinforge {__version__}, on this machine only.", class_="note")),
    )
    return build("html", head, body, lang="en")


def build_problem(title: str, text: str) -> Element:
    return build_document(title, [build("p", text)], trail=[("Runs", "/")])
