"""The list of the runs in a folder, which a search shortens and a column sorts; both are part of the address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from reinforge.errors import describe_error
from reinforge.runs.comparison import get_block
from reinforge.runs.page.elements import Content, build, build_table, draw_interval, find_bounds
from reinforge.runs.run_folder import RunOverview, format_local_time
from reinforge.view.documents import Live, build_anchor, build_document, build_link, build_run_path

WIDTH, HEIGHT = 56, 18  # size of the line of rewards
WORDS = ("run", "status", "task", "model", "algorithm")
NUMBERS = ("before → after", "improvement", "epochs", "minutes", "started")
"""Columns that can be sorted by, beside the boxes that select runs; of numbers, the largest comes first."""


@dataclass(frozen=True, slots=True)
class RunQuery:
    """Which runs to list, and how; the same in the address of the page."""

    search: str = ""
    sort: str = "-started"  # a column; `-` before it: the largest first

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> RunQuery:
        """Returns the query of an address; a column that does not exist stands for the default."""
        sort = given.get("sort", "")
        is_known = sort.removeprefix("-") in (*WORDS, *NUMBERS)
        return cls(given.get("search", "").strip(), sort if is_known else cls().sort)


@dataclass(frozen=True, slots=True)
class _ListedRun:
    run: RunOverview
    texts: Mapping[str, str]  # what a search looks at, with the columns of words
    numbers: Mapping[str, float | None]  # None: unknown


def build_run_list(
    output_dir: Path, runs: Sequence[tuple[RunOverview, Mapping[str, Any]]], query: RunQuery, live: Live
) -> Element:
    """Returns the list of the runs of a folder with their configurations, of which a search shows some."""
    rows = [_read_row_of_any(run, config) for run, config in runs]
    found = [row for row in rows if query.search.lower() in " ".join(row.texts.values()).lower()]
    if not runs:
        exists = output_dir.is_dir()
        why = "There are no runs in this folder yet." if exists else "This folder does not exist."
        start = "`reinforge demo` trains an agent in minutes; `reinforge finetune FILE` trains yours."
        another = "`reinforge view --output_dir FOLDER` shows another folder."
        content: list[Content] = [build("p", f"{why} {start} {another}", id="runs")]
    else:
        nothing = None if found else build("p", f'No run contains "{query.search}".')
        button = build("button", "Compare the selected runs", type="submit", class_="main")
        bar = build("p", button, " Select two to six.", class_="note")
        table = _build_table(_sort(found, query), query, f"{len(found):,} of {len(rows):,} runs in {output_dir}")
        form = build("form", table, nothing, bar, action="/compare", method="get", id="runs", class_="card")
        content = [_build_search(query), form]
    return build_document("Runs", content, trail=[("Runs", None), ("Learning", "/learning")], live=live)


def _sort(rows: Sequence[_ListedRun], query: RunQuery) -> list[_ListedRun]:
    """Returns the rows in order; those whose number is unknown come last."""
    column, is_down = query.sort.removeprefix("-"), query.sort.startswith("-")
    if column in WORDS:
        return sorted(rows, key=lambda row: row.texts[column].lower(), reverse=is_down)
    unknown = [row for row in rows if row.numbers[column] is None]
    known = [row for row in rows if row.numbers[column] is not None]
    return sorted(known, key=lambda row: row.numbers[column] or 0.0, reverse=is_down) + unknown


def _build_search(query: RunQuery) -> Element:
    return build(
        "form",
        build("label", "Search ", build("input", type="search", name="search", value=query.search, id="search")),
        build("input", type="hidden", name="sort", value=query.sort),
        build("button", "Search", type="submit"),
        method="get",
        action="/",
        role="search",
        class_="filters",
    )


def _build_table(rows: Sequence[_ListedRun], query: RunQuery, caption: str) -> Element:
    column, is_down = query.sort.removeprefix("-"), query.sort.startswith("-")
    heads: list[Content] = [build("span", "compare", class_="hidden")]
    for name in (*WORDS, *NUMBERS):
        goes_down = not is_down if name == column else name in NUMBERS
        heads.append(build_anchor(name, build_link("/", search=query.search, sort="-" * goes_down + name)))
    bounds = find_bounds(row.run.summary.improvement for row in rows if row.run.summary is not None)
    table = build_table(heads, [_build_cells(row, bounds) for row in rows], caption)
    for head in table.iter("th"):
        if head[0].text == column:
            head.set("aria-sort", "descending" if is_down else "ascending")
    return table


def _read_row_of_any(run: RunOverview, config: Mapping[str, Any]) -> _ListedRun:
    """Returns a run's row; one that cannot be shown is `damaged`."""
    try:
        row = _read_row(run, config)
        _build_cells(row, (-1.0, 1.0))
        return row
    except Exception as error:  # noqa: BLE001  a folder from elsewhere may hold anything, and the others are listed
        return _read_row(RunOverview(run.folder, reason=f"it cannot be shown: {describe_error(error)}"), {})


def _read_row(run: RunOverview, config: Mapping[str, Any]) -> _ListedRun:
    dataset, policy = get_block(config, "eval", "general", "dataset"), get_block(config, "finetuning", "policy")
    file, resumed = dataset.get("file_path"), len(run.record.sessions) - 1 if run.record is not None else 0
    texts = {
        "run": run.folder.name,
        "status": run.status + (f", resumed {resumed}×" if resumed > 0 else ""),
        "task": Path(str(file)).stem if file else str(dataset.get("_type") or ""),
        "model": str(policy.get("model") or "").rstrip("/").rpartition("/")[2].rpartition(":")[2],
        "algorithm": str(get_block(config, "finetuning", "algorithm").get("_type") or ""),
        "verdict": run.summary.headline() if run.summary is not None else run.reason,
        "labels": " ".join([*run.tags, run.note]),
    }
    change = run.summary.improvement if run.summary is not None else None
    numbers = {
        "before → after": _read_means(run)[1],
        "improvement": change.mean_difference if change is not None else None,
        "epochs": run.epochs_done,
        "minutes": _measure_minutes(run),
        "started": run.started_s,
    }
    return _ListedRun(run, texts, numbers)


def _read_means(run: RunOverview) -> tuple[float | None, float | None]:
    """Returns the mean score before and after training: of the verdict, else of the first and the last validation."""
    summary = run.summary
    if summary is not None and summary.confirm_base is not None and summary.confirm_tuned is not None:
        return summary.confirm_base.mean, summary.confirm_tuned.mean
    return run.rewards


def _measure_minutes(run: RunOverview) -> float | None:
    """Returns how long a run has worked; of one without a summary, from its start to the last stage that ended."""
    if run.summary is not None and run.summary.wall_time_s:
        return sum(run.summary.wall_time_s.values()) / 60
    stages = run.record.stages if run.record is not None else []
    return (stages[-1].at_s - run.started_s) / 60 if stages and run.started_s is not None else None


def _build_cells(row: _ListedRun, bounds: tuple[float, float]) -> list[Content]:
    run, name, texts, minutes = row.run, row.run.folder.name, row.texts, row.numbers["minutes"]
    box = build("input", type="checkbox", name="run", aria_label=f"Compare {name}")
    box.set("value", name)  # as it is: a name may look like a secret, which a page does not show
    started = format_local_time(run.started_s)
    return [
        box,
        build(
            "div",
            build_anchor(name, build_run_path(name), class_="name"),
            build("div", texts["verdict"], class_="note clip", title=texts["verdict"]),
            build_labels(run),
        ),
        build("span", texts["status"], class_=f"badge {run.status}"),
        texts["task"],
        texts["model"],
        texts["algorithm"],
        _build_means(run),
        draw_interval(run.summary.improvement, bounds, width=110) if run.summary is not None else None,
        run.epochs if run.record is not None else "",
        "" if minutes is None else f"{minutes:.1f}" if minutes < 10 else f"{minutes:,.0f}",
        build("span", started[5:16], class_="value", title=started),
    ]


def build_labels(run: RunOverview) -> Element | None:
    tags: list[Content] = [part for tag in run.tags for part in (build("span", tag, class_="tag"), " ")]
    return build("div", tags, run.note) if run.tags or run.note else None


def _build_means(run: RunOverview) -> Element | None:
    """Returns the score before and after training beside a small line of the validation rewards; None: unknown."""
    means = " → ".join("?" if mean is None else f"{mean:.3f}" for mean in _read_means(run))
    rows = run.record.validations if run.record is not None else []
    values = [row.avg_reward for row in rows if row.avg_reward is not None]
    low, high = min(values, default=0.0), max(values, default=0.0)
    step = (WIDTH - 6) / max(1, len(values) - 1)
    places = [
        f"{3 + number * step:.1f},{HEIGHT - 3 - (value - low) / (high - low or 1.0) * (HEIGHT - 6):.1f}"
        for number, value in enumerate(values)
    ]
    line = build("polyline", points=" ".join(places), class_="line")
    size = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "width": WIDTH, "height": HEIGHT}
    drawing = build("svg", line, **size, aria_hidden="true", class_="spark") if len(values) > 1 else None
    return build("span", drawing, build("span", means), class_="reward") if means != "? → ?" else None
