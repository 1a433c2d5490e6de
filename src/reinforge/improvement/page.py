"""Writes `report.html` of a search: the verdict, the tree of trials, what each cost and reached, and the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from reinforge.evaluation.changes import MetricChange
from reinforge.evaluation.statistics import format_interval
from reinforge.files import replace_file
from reinforge.improvement.record import RECIPE, SearchRecord, Trial, describe_recipe, read_validations
from reinforge.runs.page.elements import Content, Line, Point, build, build_section, build_table, draw_chart, to_html
from reinforge.runs.page.page import PAGE, build_changes, build_document
from reinforge.runs.rows import BASELINE
from reinforge.types.evaluation import MetricSummary
from reinforge.version import __version__

Facts = Sequence[tuple[str, str]]


def write_page(record: SearchRecord, facts: Facts, metric: str) -> Path:
    """Writes the page into the search's folder, and returns its path.

    Args:
        facts: Name and text of what the search found.
        metric: The evaluator that trials are compared by.
    """
    target = record.folder / PAGE
    replace_file(target, to_html(build_page(record, facts, metric)))
    return target


def build_page(record: SearchRecord, facts: Facts, metric: str) -> Element:
    decisions = (build("li", text) for text in record.decisions)
    scores = {each.name: _read_scores(record, each, metric) for each in (*record.trials, *record.repeats)}
    parts = {
        "Verdict": _build_verdict(record.result or {}, facts),
        "Trials": _build_trials(record, scores),
        "Cost and score": _build_costs(record, scores),
        "Seeds": _build_seeds(record, scores),
        "Recipe": _build_recipe(record),
        "Decisions": build_section("Decisions", build("ol", decisions), id="decisions"),
    }
    note = f"Written by reinforge {__version__}. Scores are means of {metric} with their 95 % intervals."
    return build_document(f"Search {record.folder.name}", note, parts)


Scores = dict[int, MetricSummary]  # epoch -> what was measured on `select` after it


def _read_scores(record: SearchRecord, trial: Trial, metric: str) -> Scores:
    return {row.epoch: row.summaries[metric] for row in read_validations(record, trial) if metric in row.summaries}


def _format(scores: Scores, epoch: int | None) -> str:
    known = scores.get(epoch) if epoch is not None else None
    return "unknown" if known is None else format_interval(known.mean, known.ci_low, known.ci_high)


def _build_verdict(result: dict[str, Any], facts: Facts) -> Element:
    shown = [each for each in facts if each[0] not in ("trial", "recipe", "pass@k", "promoted")]
    promoted = bool(result["promoted"])
    changes = [MetricChange.from_dict(row) for row in (*result.get("metrics", ()), *result.get("pass_at", ()))]
    how = f"{result['winner']} is promoted" if promoted else "Nothing is promoted"
    return build(
        "section",
        build("p", f"{how}: {result['reason']}.", class_=f"verdict {'good' if promoted else 'mild'}"),
        build("dl", (part for name, text in shown for part in (build("dt", name), build("dd", text)))),
        build_changes(changes, "untouched agent", "winner") if changes else None,
        id="verdict",
    )


def _build_row(record: SearchRecord, trial: Trial, scores: list[str], ended: str) -> tuple[Content, ...]:
    page = record.locate(trial) / PAGE
    link = build("a", trial.name, href=page.relative_to(record.folder).as_posix()) if page.is_file() else trial.name
    costs = f"{trial.epochs:,}", record.budget.format(trial.used)
    return link, trial.recipe.why, *scores, *costs, (trial.stopped or ended).splitlines()[0]


def _build_trials(record: SearchRecord, scores: dict[str, Scores]) -> Element:
    """Returns the tree of trials: each column is a rung, which only the better half of the one before reaches."""
    rows, left_out = [], [trial.name for trial in record.trials if trial.rung < 0]
    for trial in sorted(record.trials, key=lambda trial: (-len(trial.rung_best), -(trial.score or 0.0), trial.number)):
        if trial.rung >= 0:
            known = [_format(scores[trial.name], epoch) for epoch in trial.rung_best]
            known += [""] * (len(record.sizes) - len(known))
            rows.append(_build_row(record, trial, known, "trained to the end of the budget"))
    rungs = (f"rung {number}" for number in range(1, 1 + len(record.sizes)))
    return build_section(
        "Trials",
        build("p", "The best score on select that each had reached at the end of a rung.", class_="note"),
        build_table(("trial", "why", *rungs, "epochs", "used", "ended"), rows, "Trials by how far they came"),
        build("p", f"Not tried, the budget does not allow it: {', '.join(left_out)}.") if left_out else None,
        id="trials",
    )


def _build_costs(record: SearchRecord, scores: dict[str, Scores]) -> Element:
    in_tokens, points = record.budget.unit == "tokens", list[Point]()
    for trial in record.trials:
        found = scores[trial.name]
        if not points and BASELINE in found:
            base = found[BASELINE]
            points.append(Point(0.0, base.mean, base.ci_low, base.ci_high, "untouched"))
        if trial.best_epoch in found:
            cost, best = trial.used if in_tokens else trial.used / 60, found[trial.best_epoch]
            points.append(Point(cost, best.mean, best.ci_low, best.ci_high, f"{trial.number:02}"))
    front = find_front(points)
    lines = [
        Line("trials", "training", [point for point in points if point not in front], is_joined=False),
        Line("Pareto front", "validation", front),
    ]
    text = "Each point is a trial. The line is the Pareto front: whatever is cheaper than a point on it scores lower."
    unit = "tokens" if in_tokens else "minutes"
    chart = draw_chart(f"Best score on select by what the trial used, {unit}", lines, axis=unit)
    return build_section("Cost and score", build("p", text, class_="note"), chart, id="costs")


def find_front(points: Sequence[Point]) -> list[Point]:
    """Returns the points that score higher than every cheaper one, the cheapest first."""
    front, best = list[Point](), float("-inf")
    for point in sorted(points, key=lambda point: (point.epoch, -(point.value or 0.0))):
        if point.value is not None and point.value > best:
            front.append(point)
            best = point.value
    return front


def _build_seeds(record: SearchRecord, scores: dict[str, Scores]) -> Element | None:
    rows = [
        _build_row(record, trial, [_format(scores[trial.name], trial.best_epoch)], "its epochs are done")
        for trial in record.repeats
    ]
    header = ("training", "why", "select, best", "epochs", "used", "ended")
    table = build_table(header, rows, "The winner's recipe, trained with other seeds")
    return build_section("Seeds", table, id="seeds") if rows else None


def _build_recipe(record: SearchRecord) -> Element | None:
    path = record.folder / RECIPE
    if not path.is_file():
        return None
    return build_section(
        "Recipe",
        build("p", f"The winner's configuration: {describe_recipe(path)}"),
        build("pre", path.read_text(encoding="utf-8")),
        id="recipe",
    )
