"""HTML as a tree of elements, so that whatever a model or a user wrote is text and never markup.

build("p", "reward ", build("strong", "0.8"), class_="fact")   ->   <p class="fact">reward <strong>0.8</strong></p>
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from xml.etree.ElementTree import Element, tostring

from reinforge.safe_text import to_printable

Content = Element | str | None
"""What an element holds: another element, text, or nothing."""


def build(tag: str, *content: Content | Iterable[Content], **attributes: Any) -> Element:
    """Returns an element.

    Args:
        content: Its parts in order; None is left out. Strings have their control characters made visible and secrets
            hidden.
        attributes: `class_` stands for `class`, `_` in a name for `-`, None leaves one out.
    """
    element = Element(tag)
    for name, value in attributes.items():
        if value is not None:
            element.set(name.rstrip("_").replace("_", "-"), to_printable(str(value)))
    for part in content:
        for each in [part] if part is None or isinstance(part, str | Element) else part:
            _append(element, each)
    return element


def _append(element: Element, part: Content) -> None:
    if part is None:
        return
    if isinstance(part, Element):
        element.append(part)
        return
    text = to_printable(part)
    if len(element):
        element[-1].tail = (element[-1].tail or "") + text
    else:
        element.text = (element.text or "") + text


def build_table(header: Sequence[str], rows: Iterable[Sequence[Content]], caption: str) -> Element:
    """Returns a table; the caption is for readers of screens. The style sheet aligns cells that are numbers."""
    return build(
        "div",
        build(
            "table",
            build("caption", caption),
            build("thead", build("tr", (build("th", name, scope="col") for name in header))),
            build("tbody", (build("tr", (build("td", cell) for cell in row)) for row in rows)),
        ),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def build_details(summary: Content, *content: Content, **attributes: Any) -> Element:
    return build("details", build("summary", summary), *content, **attributes)


def to_html(root: Element) -> str:
    return "<!DOCTYPE html>\n" + tostring(root, encoding="unicode", method="html") + "\n"
