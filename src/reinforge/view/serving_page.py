"""The page of a run that was served with a fallback: what stayed local, at which quality, and what that saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise
from xml.etree.ElementTree import Element

from reinforge.evaluation.statistics import compute_wilson_interval
from reinforge.runs.journal.served import ServedCounts, read_served
from reinforge.runs.page.elements import Content, Line, Point, build, build_section, build_table, draw_chart
from reinforge.runs.run_folder import RunOverview, format_local_time
from reinforge.view.episode_table import EpisodeTable

MAX_POINTS = 40
HOUR_S = 3600.0


def build_serving_page(overview: RunOverview, table: EpisodeTable) -> list[Content]:
    lines = read_served(overview.folder)
    total = _sum(lines, "routes").total()
    if not total:
        how = "`reinforge serve RUN --fallback URL --router FILE` has answered no request of this run."
        return [build_section("Requests", build("p", how), id="requests")]
    return [_build_requests(lines), _build_check(lines), _build_savings(lines), _build_thresholds(lines)]


def _sum(lines: Sequence[ServedCounts], name: str) -> Counter[str]:
    return sum((Counter(getattr(line, name)) for line in lines), Counter())


def _count_local(lines: Sequence[ServedCounts]) -> tuple[float, float]:
    """Returns how many requests the student answered, and how many there were."""
    routes = _sum(lines, "routes")
    return sum(count for route, count in routes.items() if route.startswith("local ")), routes.total()


def _count_agreed(lines: Sequence[ServedCounts]) -> tuple[float, float]:
    """Returns on how many checked requests the fallback agreed or answered, and how many were checked."""
    checks = _sum(lines, "checks")
    good = checks["agreed"] + checks["not_kept"]
    return good, good + checks["disagreed"]


def _measure(count: float, total: float) -> tuple[float, float, float] | None:
    """Returns a share with its 95 % interval; None: it is unknown."""
    return (count / total, *compute_wilson_interval(count / total, total, 0.95)) if total else None


def _format(count: float, total: float) -> str:
    share, low, high = _measure(count, total) or (0.0, 0.0, 1.0)
    return f"{share:.1%} [{low:.1%}, {high:.1%}]"


def _build_requests(lines: Sequence[ServedCounts]) -> Element:
    (local, total), first = _count_local(lines), lines[0].at_s
    width = (lines[-1].at_s - first + 1.0) / MAX_POINTS
    parts = [list(part) for _, part in groupby(lines, lambda line: int((line.at_s - first) / width))]
    found = {"stays local": _count_local, "agrees, or is the fallback's": _count_agreed}
    drawn = []
    for (name, count), style in zip(found.items(), ("training", "validation"), strict=True):
        shares = [((part[-1].at_s - first) / HOUR_S, _measure(*count(part))) for part in parts]
        drawn.append(Line(name, style, [Point(hours, *share) for hours, share in shares if share], is_band=True))
    chart = draw_chart("Shares of the requests", drawn, axis="hours") if len(parts) > 2 else None
    text = f"{_format(local, total)} of {total:,.0f} requests stayed local since {format_local_time(first)}."
    rows = [(*route.split(" ", 1), f"{count:,.0f}", f"{count / total:.1%}") for route, count in _sort(lines, "routes")]
    shown = build_table(("answered by", "because", "requests", "share"), rows, "Requests by who answered, and why")
    return build_section("Requests", build("p", text), chart, shown, id="requests")


def _sort(lines: Sequence[ServedCounts], name: str) -> list[tuple[str, int]]:
    return _sum(lines, name).most_common()


def _build_check(lines: Sequence[ServedCounts]) -> Element:
    good, total = _count_agreed(lines)
    text = "No request was checked: `--check_share` is 0, or there were too few."
    if total:
        text = (
            f"{_format(good, total)} of {total:,.0f} checked requests got the fallback's answer or one that agrees; "
            f"the router promises a loss of at most {lines[-1].margin:g}."
        )
    rows = [(outcome, f"{count:,.0f}") for outcome, count in _sort(lines, "checks")]
    table = build_table(("outcome", "checks"), rows, "Checks by what came of them") if rows else None
    return build_section("Running check", build("p", text), table, id="check")


def _build_savings(lines: Sequence[ServedCounts]) -> Element:
    measured, checks = _sum(lines, "measured"), _sum(lines, "checks")
    saved = max(0.0, _count_local(lines)[0] - checks["agreed"] - checks["disagreed"])
    text = "Unknown: `--record FOLDER` measures what a request to the fallback takes."
    if measured["priced"]:
        each = measured["dollars"] / measured["priced"]
        text = f"About ${saved * each:,.2f}, at ${each:.4g} a request, the mean of {measured['priced']:,.0f}."
    elif measured["calls"]:
        each = measured["tokens"] / measured["calls"]
        text = f"About {saved * each:,.0f} tokens; `prices` in the `record:` block gives dollars."
    what = (
        f"{saved:,.0f} requests did not go to the fallback: those that stayed local, without those that were checked."
    )
    return build_section("Saved", build("p", text), build("p", what, class_="note"), id="saved")


def _build_thresholds(lines: Sequence[ServedCounts]) -> Element:
    def name(threshold: float | None) -> str:
        return "none: nothing stays local" if threshold is None else f"{threshold:.4g}"

    changed = [(old, new) for old, new in pairwise(lines) if old.threshold != new.threshold]
    rows = [(format_local_time(new.at_s), name(old.threshold), name(new.threshold)) for old, new in changed]
    text = f"The threshold is {name(lines[-1].threshold)}. It rises when the running check finds a drift."
    table = build_table(("until", "before", "after"), rows, "Changes of the threshold") if rows else None
    return build_section("Threshold and drift", build("p", text), table, id="drift")
