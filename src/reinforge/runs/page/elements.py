"""HTML as a tree of elements, so that whatever a model or a user wrote is text and never markup.

build("p", "reward ", build("strong", "0.8"), class_="fact")   ->   <p class="fact">reward <strong>0.8</strong></p>
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element, tostring

from reinforge.evaluation.statistics import Improvement
from reinforge.runs.rows import BASELINE
from reinforge.safe_text import to_printable

Content = Element | str | None  # what an element holds: another element, text, or nothing
NUMBER = re.compile(
    r"(p [=<] )?[-+<]?[\d?][\d,.]*(e[-+]?\d+)?( → [\d?.]+)?"
    r"( [\[(].*[\])])?( ?(%|[A-Za-z]+)( [\d?]+( [a-z]+)?)?)?|unknown|missing|"
)
"""A cell in a column of numbers: `0.48 [0.40, 0.56]`, `12 %`, `3 of 20`, and what stands for a missing one."""


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


def build_section(title: str, *content: Content | Iterable[Content], id: str, class_: str | None = None) -> Element:
    return build("section", build("h2", title), *content, id=id, class_=class_)


def build_table(header: Sequence[Content], rows: Iterable[Sequence[Content]], caption: str) -> Element:
    """Returns a table whose columns of numbers are right-aligned; the caption is for screen readers too."""
    known = [list(row) for row in rows]
    kinds = ["num" if _is_numeric([row[place] for row in known]) else None for place in range(len(header))]
    head = (build("th", name, scope="col", class_=kind) for name, kind in zip(header, kinds, strict=True))
    body = (
        build("tr", (build("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True))) for row in known
    )
    table = build("table", build("caption", caption), build("thead", build("tr", head)), build("tbody", body))
    return build("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _is_numeric(cells: Sequence[Content]) -> bool:
    texts = ["".join(cell.itertext()) if isinstance(cell, Element) else cell or "" for cell in cells]
    return any(re.search(r"\d", text) for text in texts) and all(map(NUMBER.fullmatch, texts))


def build_details(summary: Content, *content: Content, **attributes: Any) -> Element:
    return build("details", build("summary", summary), *content, **attributes)


def to_html(root: Element) -> str:
    return "<!DOCTYPE html>\n" + tostring(root, encoding="unicode", method="html") + "\n"


def find_bounds(changes: Iterable[Improvement | None]) -> tuple[float, float]:
    """Returns the ends of the scale on which several differences are drawn; 0 lies within."""
    known = [(each.mean_difference, each.ci_low, each.ci_high) for each in changes if each is not None]
    values = [0.0, *(value for each in known for value in each if value is not None and math.isfinite(value))]
    return (min(values), max(values)) if any(values) else (-1.0, 1.0)


def draw_interval(
    change: Improvement | None, bounds: tuple[float, float], text: str | None = None, width: int = 130
) -> Element | None:
    """Returns a difference as text beside its 95 % interval, drawn on a scale with a mark at 0; None: unknown.

    Args:
        bounds: The ends of the scale, which all intervals of a table share (`find_bounds`).
        text: What stands beside the drawing; None: the difference and its interval.
    """
    if change is None:
        return None
    low, high = change.ci_low, change.ci_high

    def place(value: float) -> float:
        return round(6 + (value - bounds[0]) / (bounds[1] - bounds[0]) * (width - 12), 1)

    drawn = [
        build("line", x1=1, x2=width - 1, y1=10, y2=10),
        build("line", x1=place(0.0), x2=place(0.0), y1=1, y2=19, class_="zero"),
    ]
    if low is not None and high is not None:
        drawn.append(build("line", x1=place(low), x2=place(high), y1=10, y2=10, class_="bar"))
    drawn.append(build("circle", cx=place(change.mean_difference), cy=10, r=4))
    tone = "good" if low is not None and low > 0 else "bad" if high is not None and high < 0 else "mild"
    size = {"viewBox": f"0 0 {width} 20", "width": width, "height": 20}
    svg = build("svg", build("g", drawn, class_=tone), **size, aria_hidden="true")
    return build("span", svg, build("span", str(change) if text is None else text, class_="value"), class_="interval")


NUM_TICKS = 5


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a line; epoch -1 is the base model, None is unknown, `low` and `high` are the 95 % interval."""

    epoch: float
    value: float | None
    low: float | None = None
    high: float | None = None
    name: str = ""  # written beside it

    @property
    def is_known(self) -> bool:
        return self.value is not None and math.isfinite(self.value)

    @property
    def has_interval(self) -> bool:
        return all(bound is not None and math.isfinite(bound) for bound in (self.low, self.high))


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    style: str  # class of the style sheet
    points: Sequence[Point]
    is_band: bool = False  # draw the intervals as a band, not as whiskers
    is_joined: bool = True


class _Scale:
    """Places of epochs, or what `axis` names, and values in a chart of `width` x `height` units."""

    def __init__(self, lines: Sequence[Line], width: int, height: int, left: int, axis: str | None):
        points = [point for line in lines for point in line.points if point.is_known]
        values = [
            each
            for point in points
            for each in (point.value, *((point.low, point.high) if point.has_interval else ()))
            if each is not None
        ]
        self.ticks = choose_ticks(min(values, default=0.0), max(values, default=1.0))
        epochs = [point.epoch for point in points]
        self.first, self.last, self.axis = min(epochs, default=0.0), max(epochs, default=1.0), axis
        if axis is not None:
            are_whole, found = all(float(each).is_integer() for each in epochs), choose_ticks(self.first, self.last)
            self.columns = [each for each in found if float(each).is_integer()] if are_whole else found
            self.first, self.last = found[0], found[-1]
        self.left, self.right, self.top, self.bottom = left, width - 12, 10, height - 26

    def x(self, epoch: float) -> float:
        share = (epoch - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return round(self.left + 8 + share * (self.right - self.left - 16), 1)

    def y(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        return round(self.bottom - (value - low) / (high - low) * (self.bottom - self.top), 1)


def choose_ticks(low: float, high: float) -> list[float]:
    """Returns about five round numbers whose first and last enclose an interval.

    Example: 0.17 to 0.86 -> 0, 0.2, 0.4, 0.6, 0.8, 1.
    """
    if not high - low > 1e-12 * max(1.0, abs(high)):
        half = max(abs(high) * 0.1, 1e-6)
        low, high = low - half, high + half
    raw = (high - low) / (NUM_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def draw_chart(
    title: str, lines: Sequence[Line], *, width: int = 720, height: int = 260, axis: str | None = None
) -> Element:
    """Returns a chart of lines over the epochs, with its legend; the first line is drawn below the others.

    Args:
        axis: What the points have in place of their epoch, such as `minutes`.
    """
    scale = _Scale(lines, width, height, 52, axis)
    svg = build("svg", viewBox=f"0 0 {width} {height}", role="img", aria_label=title, class_="chart")
    svg.extend(_draw_axes(scale))
    for line in lines:
        svg.append(_draw_line(line, scale))
    shown = [line for line in lines if any(point.is_known for point in line.points)]
    legend = build("ul", (build("li", build("span", class_=f"key {line.style}"), line.name) for line in shown))
    legend.set("class", "legend")
    data = None if axis is not None else json.dumps([_list_values(line) for line in shown], separators=(",", ":"))
    return build("figure", svg, legend if len(shown) > 1 else None, data_chart=data)


def _list_values(line: Line) -> dict[str, Any]:
    """Returns a line as `charts.js` reads it: epoch, value and interval of each point; a null value is a gap."""
    points = [
        [each.epoch, each.value if each.is_known else None, *([each.low, each.high] if each.has_interval else [])]
        for each in line.points
    ]
    return {"name": line.name, "style": line.style, "isBand": line.is_band, "points": points}


def _draw_axes(scale: _Scale) -> list[Element]:
    parts = []
    for tick in scale.ticks:
        y = scale.y(tick)
        parts.append(build("line", x1=scale.left, x2=scale.right, y1=y, y2=y, class_="grid"))
        parts.append(build("text", f"{tick:.4g}", x=scale.left - 6, y=y + 4, text_anchor="end"))
    if scale.axis is not None:
        for tick in scale.columns:
            name, anchor = f"{tick:,.6g}", "middle"
            if tick == scale.last:
                name, anchor = f"{name} {scale.axis}", "end"
            parts.append(build("text", name, x=scale.x(tick), y=scale.bottom + 18, text_anchor=anchor))
        return parts
    every = max(1, math.ceil((scale.last - scale.first + 1) / 14))
    for epoch in range(math.ceil(scale.first), math.floor(scale.last) + 1):
        if epoch == BASELINE or (epoch % every == 0 and not (epoch == 0 and scale.first == BASELINE and every > 1)):
            name = "base" if epoch == BASELINE else str(epoch)
            parts.append(build("text", name, x=scale.x(epoch), y=scale.bottom + 18, text_anchor="middle"))
    return parts


def _draw_line(line: Line, scale: _Scale) -> Element:
    group = build("g", class_=line.style)
    for run in _split_at_gaps(line.points):
        places = [(scale.x(point.epoch), scale.y(point.value or 0.0)) for point in run]
        if line.is_band and len(run) > 1 and all(point.has_interval for point in run):
            above = [f"{scale.x(point.epoch)},{scale.y(point.high or 0.0)}" for point in run]
            below = [f"{scale.x(point.epoch)},{scale.y(point.low or 0.0)}" for point in reversed(run)]
            group.append(build("polygon", points=" ".join([*above, *below]), class_="band"))
        if line.is_joined and len(run) > 1:
            group.append(build("polyline", points=" ".join(f"{x},{y}" for x, y in places), class_="line"))
        for point, (x, y) in zip(run, places, strict=True):
            if not line.is_band and point.has_interval:
                ends = {"y1": scale.y(point.low or 0.0), "y2": scale.y(point.high or 0.0)}
                group.append(build("line", x1=x, x2=x, **ends, class_="whisker"))
            group.append(build("circle", build("title", _describe(line, point, scale.axis)), cx=x, cy=y, r=3))
            if point.name:
                group.append(build("text", point.name, x=x + 6, y=y - 5))
    return group


def _describe(line: Line, point: Point, axis: str | None) -> str:
    where = "base model" if point.epoch == BASELINE else f"epoch {point.epoch:g}"
    if axis is not None:
        where = ", ".join(filter(None, (point.name, f"{point.epoch:,.6g} {axis}")))
    bounds = f" [{point.low:.4g}, {point.high:.4g}]" if point.has_interval else ""
    return f"{line.name}, {where}: {point.value:.4g}{bounds}"


def _split_at_gaps(points: Sequence[Point]) -> list[list[Point]]:
    runs: list[list[Point]] = [[]]
    for point in points:
        if point.is_known:
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]
