"""The page of one run: verdict, curves, outcomes, times and events."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from reinforge.runs.history import build_timeline
from reinforge.runs.page.content import read_figures
from reinforge.runs.page.elements import Content, build, build_section, build_table
from reinforge.runs.page.page import (
    PAGE,
    build_facts,
    build_measures,
    build_pairs,
    build_rewards,
    build_scores,
    build_settings,
    build_verdict,
)
from reinforge.runs.rows import MISSING, list_guard_events
from reinforge.runs.run_folder import RunOverview, format_local_time
from reinforge.runs.summary import STAGE_NAMES, format_duration
from reinforge.view.documents import Live, build_anchor, build_document, build_link, build_run_path, build_trail
from reinforge.view.episode_table import EpisodeTable
from reinforge.view.run_list import build_labels


def build_run_page(overview: RunOverview, table: EpisodeTable, activity: str, live: Live) -> Element:
    """Returns the page of a run whose journal can be read, with what it is doing now."""
    content, name = read_figures(overview), overview.folder.name
    parts: list[Content] = [
        _build_activity(overview, activity),
        build_verdict(content),
        build_rewards(content),
        build_pairs(content),
        build_scores(content),
        build_measures(content),
        _build_outcomes(name, table),
        _build_times(overview),
        _build_timeline(overview),
        build_facts(content),
        build_settings(content),
    ]
    return build_document(f"Run {name}", parts, trail=build_trail(name, "overview"), live=live)


def _build_activity(overview: RunOverview, activity: str) -> Element:
    report = None
    if (overview.folder / PAGE).is_file():
        report = build("p", build_anchor("Report to share", build_run_path(overview.folder.name, PAGE)))
    if activity:
        text = f"Now: {activity}"
    elif overview.resume_command:
        text = f"{overview.status}{f': {overview.reason}' if overview.reason else ''}. Resume with: "
    else:
        text = ""
    command = build("code", overview.resume_command) if not activity and overview.resume_command else None
    events = list_guard_events(overview.record.stages) if activity and overview.record is not None else []
    warnings = build("ul", (build("li", str(event)) for event in events), class_="warnings") if events else None
    parts = [build("p", text, command) if text else None, warnings, build_labels(overview), report]
    return build("section", parts, id="now")


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
        "best": build_link(path, order="-reward"),
        "worst": build_link(path, order="reward"),
        "most above their group": build_link(path, order="-relative"),
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
        class_="half",
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
    table = build_table(("stage", "time", "share"), rows, "Time by stage")
    return build_section("Time", table, id="time", class_="half")


def _build_timeline(overview: RunOverview) -> Element | None:
    if overview.record is None:
        return None
    events = build_timeline(overview.record, is_running=overview.owner is not None)
    rows = [(build("span", format_local_time(at_s), class_="value"), text) for at_s, text in reversed(events)]
    if not rows:
        return None
    table = build_table(("time", "what happened"), rows, "What happened, the newest first")
    return build_section("What happened", table, id="timeline")
