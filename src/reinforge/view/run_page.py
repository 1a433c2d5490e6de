"""The list of the runs, the page of one run, and two runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from reinforge.errors import describe_error
from reinforge.evaluation.statistics import format_interval
from reinforge.runs.comparison import RunComparison
from reinforge.runs.episodes import ComparedExample, choose_changed, count_changes
from reinforge.runs.history import build_timeline
from reinforge.runs.page.content import read_figures
from reinforge.runs.page.elements import Content, Line, Point, build, build_section, build_table, draw_chart
from reinforge.runs.page.page import PAGE, build_measures, build_rewards, build_settings, build_verdict, format_setting
from reinforge.runs.rows import MISSING, list_guard_events
from reinforge.runs.run_folder import RunOverview, format_local_time, format_size
from reinforge.runs.summary import STAGE_NAMES, format_duration
from reinforge.view.documents import Live, build_anchor, build_document, build_link, build_run_path, build_trail
from reinforge.view.episode_pages import build_episode_link
from reinforge.view.episode_table import EpisodeTable


def build_run_page(overview: RunOverview, table: EpisodeTable, activity: str, live: Live) -> Element:
    content, name = read_figures(overview), overview.folder.name
    parts: list[Content] = [
        _build_activity(overview, activity),
        build_verdict(content),
        build_rewards(content),
        build_measures(content),
        _build_outcomes(name, table),
        _build_times(overview),
        _build_timeline(overview),
        build_settings(content),
    ]
    return build_document(f"Run {name}", parts, trail=build_trail(name, "overview"), live=live)


def _build_activity(overview: RunOverview, activity: str) -> Element:
    links: list[Content] = [build_anchor("All episodes", build_run_path(overview.folder.name, "episodes"))]
    if (overview.folder / PAGE).is_file():
        report = build_anchor("Report to share", build_run_path(overview.folder.name, PAGE))
        links += [" · ", report]
    if activity:
        text = f"Now: {activity}"
    elif overview.resume_command:
        text = f"{overview.status}{f': {overview.reason}' if overview.reason else ''}. Resume with: "
    else:
        text = ""
    command = build("code", overview.resume_command) if not activity and overview.resume_command else None
    events = list_guard_events(overview.record.stages) if activity and overview.record is not None else []
    warnings = build("ul", (build("li", str(event)) for event in events), class_="warnings") if events else None
    return build("section", build("p", text, command) if text else None, warnings, build("p", links), id="now")


def _build_outcomes(name: str, table: EpisodeTable) -> Element:
    path = build_run_path(name, "episodes")
    rows: list[tuple[Content, ...]] = [
        (
            build_anchor(outcome, build_link(path, outcome=outcome)),
            "" if outcome == "ok" else "dropped" if outcome in MISSING else "kept, with its penalty",
            f"{count:,}",
        )
        for outcome, count in table.outcomes.most_common()
    ]
    presets = {
        "best": build_link(path, order="best"),
        "worst": build_link(path, order="worst"),
        "most above their group": build_link(path, order="above"),
        "failed": build_link(path, outcome="failed"),
    }
    links: list[Content] = []
    for title, address in presets.items():
        links += [build_anchor(title, address), " · "]
    return build_section(
        "Episodes",
        build("p", f"{len(table):,} episodes: ", links[:-1]),
        build_table(("outcome", "in training", "episodes"), rows, "Episodes by outcome") if rows else None,
        id="outcomes",
    )


def _build_times(overview: RunOverview) -> Element | None:
    times = overview.summary.wall_time_s if overview.summary is not None else {}
    total = sum(times.values())
    if not total:
        return None
    rows = [
        (
            STAGE_NAMES.get(stage, stage.lower()),
            format_duration(seconds),
            build("meter", f"{seconds / total:.0%}", value=f"{seconds / total:.4f}", aria_label=stage.lower()),
        )
        for stage, seconds in sorted(times.items(), key=lambda item: -item[1])
    ]
    return build_section("Time", build_table(("stage", "time", "share"), rows, "Time by stage"), id="time")


def _build_timeline(overview: RunOverview) -> Element | None:
    if overview.record is None:
        return None
    events = build_timeline(overview.record, is_running=overview.owner is not None)
    rows = [(format_local_time(at_s), text) for at_s, text in reversed(events)]
    if not rows:
        return None
    table = build_table(("time", "what happened"), rows, "What happened, the newest first")
    return build_section("What happened", table, id="timeline")


WIDTH, HEIGHT = 120, 28
"""Size of the line of rewards."""
HEADER = ("compare", "run", "status", "method", "model", "epochs", "reward", "verdict", "started", "size")


def build_run_list(
    output_dir: Path, runs: Sequence[tuple[RunOverview, Mapping[str, Any]]], search: str, live: Live
) -> Element:
    rows = [_build_row_of_any(run, config) for run, config in runs]
    found = [row for text, row in rows if search.lower() in text.lower()]
    if not runs:
        exists = output_dir.is_dir()
        why = "There are no runs in this folder yet." if exists else "This folder does not exist."
        start = "`reinforge demo` trains an agent in minutes; `reinforge finetune FILE` trains yours."
        another = "`reinforge view --output_dir FOLDER` shows another folder."
        content: list[Content] = [build("p", f"{why} {start} {another}", id="runs")]
    else:
        table = build_table(HEADER, found, f"Runs in {output_dir}")
        nothing = None if found else build("p", f'No run contains "{search}".')
        buttons = build("p", build("button", "Compare the two selected runs", type="submit"))
        content = [
            _build_search(search),
            build("form", table, nothing, buttons, action="/compare", method="get", id="runs"),
        ]
    return build_document("Runs", content, trail=[("Runs", None)], live=live)


def _build_search(search: str) -> Element:
    return build(
        "form",
        build("label", "Search ", build("input", type="search", name="search", value=search, id="search")),
        build("button", "Search", type="submit"),
        method="get",
        action="/",
        role="search",
        class_="filters",
    )


def _list_texts(run: RunOverview, config: Mapping[str, Any]) -> tuple[str, ...]:
    method, model = describe_method(config)
    resumed = max(0, len(run.record.sessions) - 1) if run.record is not None else 0
    epochs = run.epochs if run.record is not None else ""
    return (
        run.status + (f", resumed {resumed}×" if resumed else ""),
        method,
        model,
        epochs,
        run.summary.headline() if run.summary is not None else run.reason,
    )


def describe_method(config: Mapping[str, Any]) -> tuple[str, str]:
    finetuning = config.get("finetuning") or {}
    algorithm, policy = finetuning.get("algorithm") or {}, finetuning.get("policy") or {}
    method = algorithm.get("_type", "") if isinstance(algorithm, dict) else ""
    model = policy.get("model") if isinstance(policy, dict) else None
    return str(method or ""), str(model or "").rstrip("/").rpartition("/")[2]


def _build_row_of_any(run: RunOverview, config: Mapping[str, Any]) -> tuple[str, tuple[Content, ...]]:
    try:
        return _build_row(run, config)
    except Exception as error:  # noqa: BLE001  a folder from elsewhere may hold anything, and the others are listed
        return _build_row(RunOverview(run.folder, reason=f"it cannot be shown: {describe_error(error)}"), {})


def _build_row(run: RunOverview, config: Mapping[str, Any]) -> tuple[str, tuple[Content, ...]]:
    name, texts = run.folder.name, _list_texts(run, config)
    status, method, model, epochs, verdict = texts
    box = build("input", type="checkbox", name="run", aria_label=f"Compare {name}")
    box.set("value", name)  # as it is: a name may look like a secret, which a page does not show
    link = build_anchor(name, build_run_path(name))
    started = build("span", format_local_time(run.started_s), class_="value")
    cells: tuple[Content, ...] = (
        box,
        link,
        build("span", status, class_=f"badge {run.status}"),
        method,
        model,
        epochs,
        draw_spark(run),
        verdict,
        started,
        build("span", format_size(run.num_bytes), class_="value"),
    )
    return " ".join([name, *texts]), cells


def draw_spark(run: RunOverview) -> Element | None:
    """Returns a run's validation rewards as a small line with the first and the last value; None: it has none."""
    rows = run.record.validations if run.record is not None else []
    values = [row.avg_reward for row in rows if row.avg_reward is not None]
    if not values:
        return None
    text = " to ".join(f"{value:.3f}" for value in (values[0], values[-1])[: len(values)])
    low, high = min(values), max(values)
    span = high - low or 1.0
    step = (WIDTH - 6) / max(1, len(values) - 1)
    places = [
        f"{3 + number * step:.1f},{HEIGHT - 4 - (value - low) / span * (HEIGHT - 8):.1f}"
        for number, value in enumerate(values)
    ]
    line = build("polyline", points=" ".join(places), class_="line")
    size = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "width": WIDTH, "height": HEIGHT}
    drawing = build("svg", line, **size, aria_hidden="true", class_="spark") if len(values) > 1 else None
    return build("span", drawing, build("span", text, class_="value"), class_="reward")


MAX_EXAMPLES = 25
"""Examples of each direction that are listed."""


def build_comparison(found: RunComparison) -> Element:
    names = (found.first.folder.name, found.second.folder.name)
    notes = build("ul", (build("li", note) for note in found.notes)) if found.notes else None
    content: list[Content] = [
        build(
            "section", build("p", found.conclude(), class_="verdict"), build("p", found.pairing), notes, id="conclusion"
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
