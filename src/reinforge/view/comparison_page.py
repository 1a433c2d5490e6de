"""Two to six runs side by side: what makes them incomparable, what differs in their settings, and how they did."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from xml.etree.ElementTree import Element

from reinforge.errors import ReinforgeError
from reinforge.evaluation.statistics import format_interval
from reinforge.runs.comparison import RunComparison, find_obstacles, list_settings
from reinforge.runs.episodes import ComparedExample, choose_changed, count_changes, find_question, find_reply
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.page.differences import ChangedReply, build_change
from reinforge.runs.page.elements import (
    Content,
    Line,
    Point,
    build,
    build_details,
    build_section,
    build_table,
    draw_chart,
    draw_interval,
    find_bounds,
)
from reinforge.runs.page.page import MEASURES, format_setting, read_measure
from reinforge.runs.rows import fill_gaps
from reinforge.runs.run_folder import RunOverview
from reinforge.view.documents import build_anchor, build_document, build_run_path
from reinforge.view.episode_pages import build_episode_link

MAX_EXAMPLES = 25  # examples of each direction that are listed
MAX_SETTINGS = 12  # more settings that differ are folded
MAX_VALUE = 200  # characters of a value, which may be a whole dataset
MAX_RUNS = 6
VALIDATION, TRAINING = "validation reward", "training reward"
Curves = dict[str, dict[str, list[Point]]]  # metric -> name of a run -> its curve


def build_comparison(runs: Sequence[RunOverview], found: RunComparison | None, metric: str) -> Element:
    """Returns the page of some runs.

    Args:
        found: The comparison of two runs, example by example; None: there are more.
        metric: Of the overlaid curves; one that no run has stands for the first.
    """
    names = [run.folder.name for run in runs]
    content: list[Content] = [_build_obstacles(runs, names)]
    if found is not None:
        content.append(_build_conclusion(found))
    content += [_build_settings(runs, names), _build_improvements(runs), _build_curves(runs, metric)]
    if found is not None:
        content += [_build_metrics(found, names), _build_examples(found, names)]
    trail = [("Runs", "/"), *((name, build_run_path(name)) for name in names), ("Comparison", None)]
    return build_document(" and ".join(names) if found is not None else f"{len(names)} runs", content, trail=trail)


def _build_obstacles(runs: Sequence[RunOverview], names: Sequence[str]) -> Element | None:
    found = find_obstacles(runs)
    if not found:
        return None
    title = "These runs cannot simply be compared"
    text = f"They differ in {', '.join(found)}, which alone may explain a difference between their scores."
    table = build_table(("differs", *names), [(what, *values) for what, values in found.items()], "In each run")
    return build_section(title, build("p", text), table, id="obstacles", class_="callout bad")


def _build_conclusion(found: RunComparison) -> Element:
    notes = build("ul", (build("li", note) for note in found.notes), class_="warnings") if found.notes else None
    verdict, how = build("p", found.conclude(), class_="verdict"), build("p", found.pairing)
    return build("section", verdict, how, notes, id="conclusion")


def _build_settings(runs: Sequence[RunOverview], names: Sequence[str]) -> Element:
    title = "Settings that differ"
    try:
        found = list_settings(runs)
    except (OSError, ValueError, ReinforgeError) as error:
        return build_section(title, build("p", f"The configurations cannot be compared: {error}"), id="settings")
    rows = [(path, *map(_format_value, values)) for path, values in found.items()]
    table = build_table(("setting", *names), rows, title) if rows else build("p", "None.")
    if len(rows) > MAX_SETTINGS:
        table = build_details(f"{len(rows)} settings", table)
    return build_section(title, table, id="settings")


def _format_value(value: object) -> str:
    text = format_setting(value)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]} …"


def _build_improvements(runs: Sequence[RunOverview]) -> Element:
    bounds = find_bounds(run.summary.improvement for run in runs if run.summary is not None)
    rows = [_build_run(run, bounds, number) for number, run in enumerate(runs, 1)]
    header = ("run", "metric", "before", "after", "improvement, 95 % interval", "status")
    table = build_table(header, rows, "Each run's verdict, on one scale")
    return build_section("Before and after training", table, id="improvements")


def _build_run(run: RunOverview, bounds: tuple[float, float], number: int) -> tuple[Content, ...]:
    name, summary = run.folder.name, run.summary
    key = build("span", build("span", class_=f"key line-{number}"), build_anchor(name, build_run_path(name)))
    status = build("span", run.status, class_=f"badge {run.status}")
    if summary is None or summary.confirm_base is None or summary.confirm_tuned is None:
        return key, "", "", "", None, status
    arms = (summary.confirm_base, summary.confirm_tuned)
    means = [format_interval(each.mean, each.ci_low, each.ci_high) for each in arms]
    return key, summary.confirm_tuned.metric, *means, draw_interval(summary.improvement, bounds), status


def read_curves(runs: Sequence[RunOverview]) -> Curves:
    """Returns the curves of runs by metric: rewards first, then scores of evaluators and figures of the training."""
    found: Curves = {VALIDATION: {}, TRAINING: {}}
    for run in runs:
        name, rows = run.folder.name, run.record.validations if run.record is not None else []
        metrics = fill_gaps(JournalReader(run.folder).metrics(10**9)) if run.record is not None else []
        found[VALIDATION][name] = [Point(row.epoch, row.avg_reward, row.ci_low, row.ci_high) for row in rows]
        found[TRAINING][name] = [Point(row.epoch, row.avg_reward, row.ci_low, row.ci_high) for row in metrics]
        for row in rows:
            for metric, each in row.summaries.items():
                point = Point(row.epoch, each.mean, each.ci_low, each.ci_high)
                found.setdefault(f"{metric} on select", {}).setdefault(name, []).append(point)
        for key, title, _ in MEASURES:
            found.setdefault(title, {})[name] = [Point(row.epoch, read_measure(row, key)) for row in metrics]
    return {
        metric: curves
        for metric, curves in found.items()
        if metric == VALIDATION or any(point.is_known for points in curves.values() for point in points)
    }


def _build_curves(runs: Sequence[RunOverview], metric: str) -> Element:
    curves = read_curves(runs)
    shown = metric if metric in curves else VALIDATION
    lines = [
        Line(run.folder.name, f"line-{number}", curves[shown].get(run.folder.name, []))
        for number, run in enumerate(runs, 1)
    ]
    options = [build("option", name, value=name, selected="" if name == shown else None) for name in curves]
    hidden = [build("input", type="hidden", name="run") for _ in runs]
    for field, run in zip(hidden, runs, strict=True):
        field.set("value", run.folder.name)  # as it is: a name may look like a secret, which a page does not show
    form = build(
        "form",
        hidden,
        build("label", "Metric ", build("select", options, name="metric")),
        build("button", "Show", type="submit"),
        action="/compare",
        method="get",
        class_="filters",
    )
    return build_section("Curves", form, draw_chart(f"{shown} by epoch", lines), id="curves")


def _build_metrics(found: RunComparison, names: Sequence[str]) -> Element | None:
    if not found.metrics:
        return None
    bounds = find_bounds(row.difference for row in found.metrics if row.is_comparable)
    rows: list[tuple[Content, ...]] = []
    for row in found.metrics:
        means = (format_interval(each.mean, each.ci_low, each.ci_high) for each in (row.first, row.second))
        text, chance = row.describe_difference()
        rows.append((row.metric, *means, draw_interval(row.difference, bounds) if row.is_comparable else text, chance))
    table = build_table(("metric", *names, "difference, 95 % interval", "p-value"), rows, f"Scores on {found.split}")
    return build_section("Scores", table, id="scores")


def _build_examples(found: RunComparison, names: Sequence[str]) -> Element | None:
    if not found.examples:
        return None
    better, same, worse = count_changes(found.examples)
    text = f"{better:,} examples score higher in {names[1]}, {same:,} the same, {worse:,} lower."
    sides = []
    for title, examples in zip(("Higher", "Lower"), choose_changed(found.examples, MAX_EXAMPLES), strict=True):
        if examples:
            head = build("h3", f"{title} in {names[1]}")
            sides.append(build("div", head, (_build_example(found, example) for example in examples)))
    return build_section("Examples", build("p", text), sides, id="examples")


def _build_example(found: RunComparison, example: ComparedExample) -> Element:
    question, first = _read_reply(found.first, example.keys[0], example.first)
    _, second = _read_reply(found.second, example.keys[1], example.second)
    return build_change(f"{example.example_id}: {example.change:+.3g}", question, (first, second))


def _read_reply(run: RunOverview, key: str, score: float) -> tuple[str, ChangedReply]:
    """Returns the question of an episode, and the reply with a link to it."""
    question, reply = "", "This episode cannot be read."
    with contextlib.suppress(ReinforgeError):
        if (row := JournalReader(run.folder).find_episode(key)) is not None:
            question, reply = find_question(row.data), find_reply(row.data)
    name = run.folder.name
    return question, ChangedReply(build_anchor(f"{name}: {score:.3g}", build_episode_link(name, key)), reply)
