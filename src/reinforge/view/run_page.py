"""The page of one run: how it stands, its curves, where its time goes, what happened, its settings."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from reinforge.runs.guard_events import list_guard_events
from reinforge.runs.history import build_timeline
from reinforge.runs.page import sections
from reinforge.runs.page.content import read_figures
from reinforge.runs.page.elements import Content, build, build_table
from reinforge.runs.page.page import PAGE, describe_rerun
from reinforge.runs.run_folder import RunOverview, format_local_time
from reinforge.runs.summary import STAGE_NAMES, format_duration
from reinforge.types.trajectory import Outcome
from reinforge.view.documents import Live, Trail, build_anchor, build_document, build_link, build_run_path
from reinforge.view.episode_table import EpisodeTable

_MISSING = {outcome.value for outcome in Outcome if outcome.is_missing}


def build_trail(name: str, page: str) -> Trail:
    """Returns the navigation of a run's pages.

    Args:
        page: The page itself: `overview`, `episodes`, or empty for one below them.
    """
    return [
        ("Runs", "/"),
        (name, build_run_path(name) if page != "overview" else None),
        ("Episodes", build_run_path(name, "episodes") if page != "episodes" else None),
    ]


def build_run_page(overview: RunOverview, table: EpisodeTable, activity: str, live: Live) -> Element:
    """Returns the page of a run.

    Args:
        overview: The run at a glance; its journal can be read.
        activity: What it is doing; empty: it does not run.
        live: How the page learns of changes.

    Raises:
        StorageError: The journal cannot be read.
    """
    content, name = read_figures(overview), overview.folder.name
    parts: list[Content] = [
        _build_activity(overview, activity),
        sections.build_verdict(content),
        sections.build_rewards(content),
        sections.build_measures(content),
        _build_outcomes(name, table),
        _build_times(overview),
        _build_timeline(overview),
        sections.build_settings(content, describe_rerun(content)),
    ]
    return build_document(f"Run {name}", parts, trail=build_trail(name, "overview"), live=live)


def _build_activity(overview: RunOverview, activity: str) -> Element:
    """Returns what the run is doing now, or how to resume it."""
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
    """Returns how many episodes ended in which way, each a link to them."""
    path = build_run_path(name, "episodes")
    rows: list[tuple[Content, ...]] = [
        (
            build_anchor(outcome, build_link(path, outcome=outcome)),
            "" if outcome == "ok" else "dropped" if outcome in _MISSING else "kept, with its penalty",
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
    return build(
        "section",
        build("h2", "Episodes"),
        build("p", f"{len(table):,} episodes: ", links[:-1]),
        build_table(("outcome", "in training", "episodes"), rows, "Episodes by outcome") if rows else None,
        id="outcomes",
    )


def _build_times(overview: RunOverview) -> Element | None:
    """Returns where the time went; None: the run has not ended."""
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
    return build(
        "section", build("h2", "Time"), build_table(("stage", "time", "share"), rows, "Time by stage"), id="time"
    )


def _build_timeline(overview: RunOverview) -> Element | None:
    """Returns what happened, the newest first."""
    if overview.record is None:
        return None
    events = build_timeline(overview.record, is_running=overview.owner is not None)
    rows = [(format_local_time(at_s), text) for at_s, text in reversed(events)]
    if not rows:
        return None
    table = build_table(("time", "what happened"), rows, "What happened, the newest first")
    return build("section", build("h2", "What happened"), table, id="timeline")
