"""The list of the runs in a folder, which a search shortens and a column sorts; both are part of the address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from reinforge.errors import describe_error
from reinforge.runs.page.elements import Content, build, build_table, draw_interval, find_bounds
from reinforge.runs.run_folder import RunOverview, format_local_time, format_size
from reinforge.view.documents import Live, build_anchor, build_document, build_link, build_run_path

WIDTH, HEIGHT = 72, 20
"""Size of the line of rewards."""
COLUMNS = {
    **dict.fromkeys(("run", "status", "task", "model", "algorithm"), False),
    **dict.fromkeys(("before → after", "improvement", "epochs", "minutes", "started", "size"), True),
}
"""Columns that can be sorted by, beside the boxes that select runs; True: the largest comes first."""


@dataclass(frozen=True, slots=True)
class RunQuery:
    """Which runs to list, and how; the same in the address of the page."""

    search: str = ""
    sort: str = "-started"  # a column of `COLUMNS`; `-` before it: the largest first

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> RunQuery:
        """Returns the query of an address; a column that does not exist stands for the default."""
        sort = given.get("sort", "")
        return cls(given.get("search", "").strip(), sort if sort.removeprefix("-") in COLUMNS else cls().sort)


@dataclass(frozen=True, slots=True)
class _Row:
    run: RunOverview
    texts: Mapping[str, str]  # column -> what a search looks at
    sizes: Mapping[str, float | None]  # column -> number to sort by; None: unknown

    def rank(self, sort: str) -> tuple[bool, Any]:
        """Returns the key to sort by; what is unknown comes last."""
        column = sort.removeprefix("-")
        if column not in self.sizes:
            return False, self.texts[column].lower()
        size = self.sizes[column]
        return size is None, (-1 if sort.startswith("-") else 1) * (size or 0.0)


def build_run_list(
    output_dir: Path, runs: Sequence[tuple[RunOverview, Mapping[str, Any]]], query: RunQuery, live: Live
) -> Element:
    """Returns the list of the runs of a folder with their configurations, of which a search shows some."""
    rows = [_read_row_of_any(run, config) for run, config in runs]
    found = [row for row in rows if query.search.lower() in " ".join(row.texts.values()).lower()]
    is_reversed = query.sort.startswith("-") and not COLUMNS[query.sort.removeprefix("-")]
    found.sort(key=lambda row: row.rank(query.sort), reverse=is_reversed)
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
        table = _build_table(found, query, f"{len(found):,} of {len(rows):,} runs in {output_dir}")
        form = build("form", table, nothing, bar, action="/compare", method="get", id="runs", class_="card")
        content = [_build_search(query), form]
    return build_document("Runs", content, trail=[("Runs", None)], live=live)


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


def _build_table(rows: Sequence[_Row], query: RunQuery, caption: str) -> Element:
    column, is_down = query.sort.removeprefix("-"), query.sort.startswith("-")
    heads: list[Content] = [build("span", "compare", class_="hidden")]
    for name, largest_first in COLUMNS.items():
        other = not is_down if name == column else largest_first
        heads.append(build_anchor(name, build_link("/", search=query.search, sort=("-" if other else "") + name)))
    bounds = find_bounds(row.run.summary.improvement for row in rows if row.run.summary is not None)
    table = build_table(heads, [_build_cells(row, bounds) for row in rows], caption)
    for head in table.iter("th"):
        if head[0].text == column:
            head.set("aria-sort", "descending" if is_down else "ascending")
    return table


def _describe_config(config: Mapping[str, Any]) -> tuple[str, str, str]:
    """Returns task, model and algorithm of a configuration that may come from anywhere; empty: not known."""
    finetuning = config.get("finetuning") or {}
    dataset = ((config.get("eval") or {}).get("general") or {}).get("dataset")
    blocks = [each if isinstance(each, dict) else {} for each in (dataset, finetuning.get("policy"))]
    algorithm = finetuning.get("algorithm")
    file, model = blocks[0].get("file_path"), str(blocks[1].get("model") or "")
    task = Path(str(file)).stem if file else str(blocks[0].get("_type") or "")
    name = algorithm.get("_type") if isinstance(algorithm, dict) else None
    return task, model.rstrip("/").rpartition("/")[2], str(name or "")


def _read_row_of_any(run: RunOverview, config: Mapping[str, Any]) -> _Row:
    """Returns a run's row; one that cannot be shown is `damaged`."""
    try:
        row = _read_row(run, config)
        _build_cells(row, (-1.0, 1.0))
        return row
    except Exception as error:  # noqa: BLE001  a folder from elsewhere may hold anything, and the others are listed
        return _read_row(RunOverview(run.folder, reason=f"it cannot be shown: {describe_error(error)}"), {})


def _read_row(run: RunOverview, config: Mapping[str, Any]) -> _Row:
    task, model, algorithm = _describe_config(config)
    resumed = max(0, len(run.record.sessions) - 1) if run.record is not None else 0
    texts = {
        "run": run.folder.name,
        "status": run.status + (f", resumed {resumed}×" if resumed else ""),
        "task": task,
        "model": model,
        "algorithm": algorithm,
        "verdict": run.summary.headline() if run.summary is not None else run.reason,
    }
    change = run.summary.improvement if run.summary is not None else None
    sizes: dict[str, float | None] = {
        "before → after": _read_means(run)[1],
        "improvement": change.mean_difference if change is not None else None,
        "epochs": run.epochs_done,
        "minutes": _measure_minutes(run),
        "started": run.started_s,
        "size": run.num_bytes,
    }
    return _Row(run, texts, sizes)


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


def _build_cells(row: _Row, bounds: tuple[float, float]) -> list[Content]:
    run, texts, minutes = row.run, row.texts, row.sizes["minutes"]
    box = build("input", type="checkbox", name="run", aria_label=f"Compare {run.folder.name}")
    box.set("value", run.folder.name)  # as it is: a name may look like a secret, which a page does not show
    status = build("span", texts["status"], class_=f"badge {run.status}")
    means = " → ".join("?" if mean is None else f"{mean:.3f}" for mean in _read_means(run))
    return [
        box,
        build_anchor(run.folder.name, build_run_path(run.folder.name), class_="name"),
        build("div", status, build("span", texts["verdict"], class_="note")),
        texts["task"],
        texts["model"],
        texts["algorithm"],
        build("span", draw_spark(run), build("span", means), class_="reward") if means != "? → ?" else None,
        draw_interval(run.summary.improvement, bounds) if run.summary is not None else None,
        run.epochs if run.record is not None else "",
        "" if minutes is None else f"{minutes:.1f}" if minutes < 10 else f"{minutes:,.0f}",
        build("span", format_local_time(run.started_s)[:16], class_="value"),
        format_size(run.num_bytes),
    ]


def draw_spark(run: RunOverview) -> Element | None:
    """Returns a run's validation rewards as a small line; None: it has fewer than two."""
    rows = run.record.validations if run.record is not None else []
    values = [row.avg_reward for row in rows if row.avg_reward is not None]
    if len(values) < 2:
        return None
    low, high = min(values), max(values)
    span = high - low or 1.0
    step = (WIDTH - 6) / max(1, len(values) - 1)
    places = [
        f"{3 + number * step:.1f},{HEIGHT - 3 - (value - low) / span * (HEIGHT - 6):.1f}"
        for number, value in enumerate(values)
    ]
    line = build("polyline", points=" ".join(places), class_="line")
    size = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "width": WIDTH, "height": HEIGHT}
    return build("svg", line, **size, aria_hidden="true", class_="spark")
