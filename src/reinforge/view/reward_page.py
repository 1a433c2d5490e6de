"""The page of a run's rewards: how they are distributed, the parts of a weighted reward, and failures by reason."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from xml.etree.ElementTree import Element

from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.page.content import MAX_REASONS, PageContent, read_figures
from reinforge.runs.page.elements import Content, Line, Point, build, build_section, build_table, draw_chart
from reinforge.runs.page.page import build_outcomes
from reinforge.runs.rows import fill_gaps
from reinforge.runs.run_folder import RunOverview, read_config
from reinforge.view.documents import build_anchor, build_link, build_run_path
from reinforge.view.episode_table import COLLECT, EpisodeTable, name_epoch, name_split, write_number

NUM_BINS, MAX_ROWS = 10, 40
NUM_SHADES = 5
Place = tuple[str, int]  # phase and epoch


def build_reward_page(overview: RunOverview, table: EpisodeTable) -> list[Content]:
    content = read_figures(overview)
    content.outcomes = JournalReader(overview.folder).count_outcomes()[:MAX_REASONS]
    rewards: dict[Place, list[float]] = defaultdict(list)
    for episode in table:
        if episode.reward is not None:
            rewards[episode.phase, episode.epoch].append(episode.reward)
    return [
        _build_distribution(overview.folder.name, rewards),
        _build_parts(content, read_config(overview.folder)),
        build_outcomes(content),
    ]


def _build_distribution(name: str, rewards: dict[Place, list[float]]) -> Element:
    if not rewards:
        return build_section("Distribution", build("p", "No episode has a reward yet."), id="distribution")
    train = {epoch: values for (phase, epoch), values in rewards.items() if phase == COLLECT}
    points = [Point(epoch, *_find_middle(train[epoch])) for epoch in sorted(train)]
    lines = [Line("median reward", "training", points, is_band=True)]
    chart = draw_chart("Rewards of training episodes by epoch", lines) if len(points) > 1 else None
    bins = choose_bins([value for values in rewards.values() for value in values])
    every = -(-len(rewards) // MAX_ROWS)
    rows = [_build_bins(name, place, rewards[place], bins) for place in list(rewards)[::every]]
    header = ("split", "epoch", "episodes", *(_name_bin(*each) for each in bins))
    shown = build("p", "The line is the median of the training episodes, the band the middle 80 %.", class_="note")
    shares = build_table(header, rows, "Share of the episodes by reward, each with a link to them")
    chart_parts = (shown, chart) if chart is not None else ()
    return build_section("Distribution", chart_parts, shares, id="distribution")


def _find_middle(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median, and the 10th and 90th percentile."""
    if len(values) < 2:
        return (values[0],) * 3
    parts = statistics.quantiles(values, n=10, method="inclusive")
    return parts[4], parts[0], parts[8]


def choose_bins(values: Sequence[float]) -> list[tuple[float, float]]:
    """Returns ranges, ends included, that hold all values: each value if there are few, else ten of the same width.

    Example: 0, 1, 1 -> (0, 0), (1, 1).
    """
    known = sorted(set(values))
    if len(known) <= NUM_BINS:
        return [(value, value) for value in known]
    width = (known[-1] - known[0]) / NUM_BINS
    edges = [known[0] + number * width for number in range(NUM_BINS)]
    return list(zip(edges, [*(math.nextafter(edge, known[0]) for edge in edges[1:]), known[-1]], strict=True))


def _name_bin(low: float, high: float) -> str:
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _build_bins(
    name: str, place: Place, values: Sequence[float], bins: Sequence[tuple[float, float]]
) -> tuple[Content, ...]:
    phase, epoch = place
    shares: list[Content] = []
    for low, high in bins:
        share = sum(low <= value <= high for value in values) / len(values)
        given = {"phase": phase, "epoch": name_epoch(epoch), "low": write_number(low), "high": write_number(high)}
        link = build_anchor(f"{share:.0%}", build_link(build_run_path(name, "episodes"), **given))
        shares.append(build("span", link, class_=f"shade s{round(share * NUM_SHADES)}") if share else None)
    return (name_split(phase), name_epoch(epoch), f"{len(values):,}", *shares)


def _build_parts(content: PageContent, config: dict[str, object]) -> Element | None:
    """Returns the mean score of every evaluator by epoch, with its weight in the reward; None: there is only one."""
    weights = _read_weights(config)
    rows = fill_gaps(content.metrics)
    names = list(dict.fromkeys(name for row in rows for name in row.scores))
    if len(names) < 2:
        return None
    charts = []
    for name in names:
        points = [Point(row.epoch, row.scores.get(name)) for row in rows]
        title = f"{name}, weight {weights[name]:g}" if name in weights else name
        chart = draw_chart(f"{name} by epoch", [Line(name, "training", points)], width=340, height=170)
        charts.append(build("div", build("h3", title), chart))
    text = "The mean score of each evaluator over the training episodes of an epoch."
    return build_section("Parts of the reward", build("p", text), build("div", charts, class_="grid"), id="parts")


def _read_weights(config: dict[str, object]) -> dict[str, float]:
    """Returns evaluator -> its weight in a `weighted` reward; empty: the reward is another one."""
    try:
        evaluators = config["eval"]["evaluators"]  # type: ignore[index]
        found = evaluators[config["finetuning"]["reward_function"]["name"]]["weights"]  # type: ignore[index]
        return {str(name): float(weight) for name, weight in found.items()}
    except (LookupError, TypeError, ValueError, AttributeError):
        return {}
