"""Two runs side by side."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from reinforge.evaluation.statistics import format_interval
from reinforge.runs.comparison import RunComparison
from reinforge.runs.episodes import ComparedExample, choose_changed, count_changes
from reinforge.runs.page.elements import Content, Line, Point, build, build_section, build_table, draw_chart
from reinforge.runs.page.page import format_setting
from reinforge.runs.run_folder import RunOverview
from reinforge.view.documents import build_anchor, build_document, build_run_path
from reinforge.view.episode_pages import build_episode_link

MAX_EXAMPLES = 25
"""Examples of each direction that are listed."""


def build_comparison(found: RunComparison) -> Element:
    names = (found.first.folder.name, found.second.folder.name)
    notes = build("ul", (build("li", note) for note in found.notes)) if found.notes else None
    content: list[Content] = [
        build(
            "section",
            build("p", found.conclude(), class_="verdict"),
            build("p", found.pairing),
            notes,
            id="conclusion",
        ),
        _build_metrics(found, names),
        _build_curves(found, names),
        _build_examples(found, names),
        _build_settings(found, names),
    ]
    trail = [("Runs", "/"), *((name, build_run_path(name)) for name in names), ("Comparison", None)]
    return build_document(f"{names[0]} and {names[1]}", content, trail=trail)


def _build_metrics(found: RunComparison, names: tuple[str, str]) -> Element | None:
    if not found.metrics:
        return None
    rows = [
        (
            row.metric,
            *(format_interval(each.mean, each.ci_low, each.ci_high) for each in (row.first, row.second)),
            *row.describe_difference(),
        )
        for row in found.metrics
    ]
    table = build_table(("metric", *names, "difference, 95 % interval", "p-value"), rows, f"Scores on {found.split}")
    return build_section("Scores", table, id="scores")


def _build_curves(found: RunComparison, names: tuple[str, str]) -> Element:
    lines = [
        Line(f"{name}, validation reward", style, _list_points(run))
        for name, style, run in zip(names, ("training", "validation"), (found.first, found.second), strict=True)
    ]
    return build_section("Validation reward by epoch", draw_chart("Validation reward", lines), id="curves")


def _list_points(run: RunOverview) -> list[Point]:
    rows = run.record.validations if run.record is not None else []
    return [Point(row.epoch, row.avg_reward, row.ci_low, row.ci_high) for row in rows]


def _build_examples(found: RunComparison, names: tuple[str, str]) -> Element | None:
    if not found.examples:
        return None
    better, same, worse = count_changes(found.examples)
    text = f"{better:,} examples score higher in {names[1]}, {same:,} the same, {worse:,} lower."
    up, down = choose_changed(found.examples, MAX_EXAMPLES)
    tables = [
        build_table(("example", *names, "change"), (_build_example(example, names) for example in examples), title)
        for title, examples in ((f"Higher in {names[1]}", up), (f"Lower in {names[1]}", down))
        if examples
    ]
    return build_section("Examples", build("p", text), tables, id="examples")


def _build_example(example: ComparedExample, names: tuple[str, str]) -> tuple[Content, ...]:
    scores = (example.first, example.second)
    links = [
        build_anchor(f"{score:.3g}", build_episode_link(name, key))
        for name, key, score in zip(names, example.keys, scores, strict=True)
    ]
    return (example.example_id, *links, f"{example.change:+.3g}")


def _build_settings(found: RunComparison, names: tuple[str, str]) -> Element:
    rows = [(change.path, format_setting(change.old), format_setting(change.new)) for change in found.changes]
    title = "Settings that differ"
    found_any = build_table(("setting", *names), rows, title) if rows else build("p", "None.")
    return build_section(title, found_any, id="settings")
