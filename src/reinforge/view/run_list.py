"""The list of the runs in a folder, which a search shortens: the columns of its table are `HEADER` and `_build_row`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from reinforge.errors import describe_error
from reinforge.runs.page.elements import Content, build, build_table
from reinforge.runs.run_folder import RunOverview, format_local_time, format_size
from reinforge.view.documents import Live, build_anchor, build_document, build_run_path

WIDTH, HEIGHT = 120, 28
"""Size of the line of rewards."""
HEADER = ("compare", "run", "status", "method", "model", "epochs", "reward", "verdict", "started", "size")


def build_run_list(
    output_dir: Path, runs: Sequence[tuple[RunOverview, Mapping[str, Any]]], search: str, live: Live
) -> Element:
    """Returns the list of the runs of a folder with their configurations, of which a search shows some."""
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
    """Returns the text that a search looks at, and the cells; a run that cannot be shown is `damaged`."""
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
