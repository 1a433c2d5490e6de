"""Draws the reward of a run before, during and after training.

    left axis    training reward (all groups, and those kept for training) and validation reward, with 95 % intervals
    right edge   base model and best checkpoint on `confirm`
    below        share of groups kept (bars) and of groups that the curriculum admits (step line)

An unknown value is a gap in its line, never a 0.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reinforge.errors import StorageError, boundary
from reinforge.files import make_private
from reinforge.runs.rows import BASELINE, EpochMetrics, ValidationRow, fill_gaps
from reinforge.types.evaluation import MetricSummary

# Okabe and Ito (2008): distinguishable with any kind of color vision, and by their lightness in grayscale
TRAINING, FILTERED, VALIDATION, CONFIRM = "#0072B2", "#E69F00", "#D55E00", "#009E73"
CURRICULUM, BARS = "#7A4A73", "#C8CDD2"
INK, GRID = "#333333", "#E6E8EB"
WIDTH, HEIGHT, DPI = 10.0, 6.0, 100


def draw_reward_plot(
    path: Path,
    reward_history: Sequence[EpochMetrics],
    validation_history: Sequence[ValidationRow],
    title: str,
    confirm: Mapping[str, MetricSummary | None] | None = None,
) -> None:
    """Writes the plot of a run as a PNG of 1000 x 600 pixels, whole or not at all. Can be called from any thread.

    Args:
        validation_history: One row per validation; epoch -1 is the baseline.
        confirm: The arms of the verdict, `base` and `tuned`.
    """
    figure = build_reward_figure(reward_history, validation_history, title, confirm)
    unfinished = path.with_name(f".{path.name}.unfinished")
    with boundary(StorageError, f"cannot write {path}"):
        figure.canvas.print_png(str(unfinished))
        make_private(unfinished)
        os.replace(unfinished, path)


def build_reward_figure(
    reward_history: Sequence[EpochMetrics],
    validation_history: Sequence[ValidationRow],
    title: str,
    confirm: Mapping[str, MetricSummary | None] | None = None,
) -> Any:
    """Returns the plot as a matplotlib `Figure` on an Agg canvas; takes the arguments of `draw_reward_plot`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = fill_gaps(reward_history)
    validations = sorted(validation_history, key=lambda row: row.epoch)
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    spacing = {"height_ratios": [4, 1], "hspace": 0.09, "left": 0.08, "right": 0.975, "top": 0.83, "bottom": 0.09}
    top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw=spacing)
    last_epoch = max([row.epoch for row in rows] + [row.epoch for row in validations], default=0)
    _draw_training(top, rows)
    _draw_validation(top, validations)
    _draw_stages(top, rows)
    places = _draw_confirm(top, confirm, last_epoch)
    _draw_groups(bottom, rows)
    _label(figure, top, bottom, title if len(title) <= 75 else f"{title[:74]}...")
    if not rows and not validations:
        top.text(0.5, 0.5, "nothing recorded yet", transform=top.transAxes, ha="center", color=INK)
    _set_epochs(bottom, last_epoch, has_base=any(row.epoch == BASELINE for row in validations), places=places)
    return figure


def _draw_training(axes: Any, rows: Sequence[EpochMetrics]) -> None:
    names = ("avg_reward", "ci_low", "ci_high", "filtered_avg_reward")
    epochs, (mean, low, high, filtered) = _extract_series(rows, *names)
    marker = {"marker": "o", "markersize": 4.5 if len(epochs) <= 40 else 2, "markeredgecolor": "none"}
    axes.fill_between(epochs, low, high, color=TRAINING, alpha=0.16, linewidth=0)
    _draw_isolated_intervals(axes, epochs, low, high)
    axes.plot(epochs, mean, color=TRAINING, lw=2, **marker, label="training reward, all groups")
    axes.plot(epochs, filtered, color=FILTERED, lw=1.6, ls=(0, (4, 2)), **marker, label="training reward, groups kept")


def _draw_validation(axes: Any, validations: Sequence[ValidationRow]) -> None:
    epochs, (mean, low, high) = _extract_series(validations, "avg_reward", "ci_low", "ci_high")
    axes.plot(epochs, mean, color=VALIDATION, linewidth=1, alpha=0.45)
    style = {"fmt": "s", "markersize": 6, "color": VALIDATION, "markeredgecolor": "white", "elinewidth": 1.5}
    label, whiskers = "validation reward (select)", _measure_whiskers(mean, low, high)
    axes.errorbar(epochs, mean, whiskers, **style, capsize=3, zorder=4, label=label)
    if validations and validations[0].epoch == BASELINE and mean[0] == mean[0]:
        axes.hlines(mean[0], BASELINE, epochs[-1] + 0.5, color=VALIDATION, lw=0.9, ls=":", alpha=0.7, zorder=1)


def _draw_confirm(axes: Any, confirm: Mapping[str, MetricSummary | None] | None, last_epoch: int) -> dict[float, str]:
    """Draws the arms that are known; returns place on the epoch axis -> name."""
    step = _measure_place(last_epoch)
    places: dict[float, str] = {}
    style = {"fmt": "D", "markersize": 8, "color": CONFIRM, "markeredgewidth": 1.8, "elinewidth": 1.8, "capsize": 4}
    for arm, fill in (("base", "white"), ("tuned", CONFIRM)):
        summary = (confirm or {}).get(arm)
        if summary is None or summary.mean is None:
            continue
        place = last_epoch + step * (1.3 if arm == "base" else 2.3)
        mean, low, high = ([_to_float(value)] for value in (summary.mean, summary.ci_low, summary.ci_high))
        label, whiskers = f"verdict (confirm), {arm}", _measure_whiskers(mean, low, high)
        axes.errorbar([place], mean, whiskers, **style, markerfacecolor=fill, zorder=5, label=label)
        axes.annotate(f"{mean[0]:.2f}", (place, mean[0]), (9, 0), textcoords="offset points", va="center", color=INK)
        places[place] = arm
    if places:
        left, right = last_epoch + 0.75 * step, last_epoch + 3.3 * step
        axes.axvspan(left, right, color=CONFIRM, alpha=0.07, linewidth=0, zorder=0)
    return places


def _draw_stages(axes: Any, rows: Sequence[EpochMetrics]) -> None:
    firsts: dict[str, int] = {}
    for row in rows:
        if row.stage is not None:
            firsts.setdefault(row.stage, row.epoch)
    for name, epoch in firsts.items():
        axes.axvline(epoch - 0.5, color=INK, linewidth=0.8, linestyle=(0, (1, 3)), zorder=1)
        shown = (name if len(name) <= 20 else f"{name[:19]}...").replace("$", r"\$")
        axes.text(epoch - 0.45, 0.98, shown, transform=axes.get_xaxis_transform(), fontsize=8, color=INK, va="top")


def _draw_groups(axes: Any, rows: Sequence[EpochMetrics]) -> None:
    epochs, (kept, total, percentile) = _extract_series(rows, "num_groups_kept", "num_groups", "curriculum_percentile")
    shares = [100 * k / n if n else float("nan") for k, n in zip(kept, total, strict=True)]
    axes.bar(epochs, shares, width=0.7, color=BARS, label="share of groups kept")
    edges = [epoch - 0.5 for epoch in (*epochs, len(epochs) and epochs[-1] + 1)]
    style = {"color": CURRICULUM, "linewidth": 2, "label": "share admitted by the curriculum"}
    axes.stairs([100 * share for share in percentile], edges, baseline=None, **style)


def _label(figure: Any, top: Any, bottom: Any, title: str) -> None:
    figure.text(0.08, 0.945, title.replace("$", r"\$"), fontsize=14, fontweight="bold", color=INK)
    top.set_ylabel("reward (mean, 95 % interval)", color=INK)
    bottom.set_ylabel("groups, %", color=INK)
    bottom.set_ylim(0, 108)
    bottom.set_yticks([0, 50, 100])
    bottom.set_xlabel("epoch", color=INK)
    for axes in (top, bottom):
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, length=3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    handles = [pair for axes in (top, bottom) for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    place = {"loc": "upper left", "bbox_to_anchor": (0.072, 0.94), "ncols": 4, "columnspacing": 1.4}
    figure.legend(*zip(*handles, strict=True), **place, handlelength=1.8, frameon=False, fontsize=9, labelcolor=INK)


def _set_epochs(axes: Any, last_epoch: int, *, has_base: bool, places: dict[float, str]) -> None:
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**6) if (last_epoch + 1) / step <= 16)
    ticks: dict[float, str] = {float(epoch): str(epoch) for epoch in range(0, last_epoch + 1, every)}
    if has_base:
        if every > 1 and last_epoch > 24:
            ticks.pop(0.0)  # no room for both labels
        ticks[float(BASELINE)] = "base"
    ticks.update(places)
    axes.set_xticks(list(ticks), list(ticks.values()))
    right = last_epoch + 3.3 * _measure_place(last_epoch) if places else last_epoch + 0.6
    axes.set_xlim((BASELINE if has_base else 0) - 0.6, right)


def _measure_place(last_epoch: int) -> float:
    return max(1.0, (last_epoch + 2) / 14)


def _extract_series(
    rows: Sequence[EpochMetrics] | Sequence[ValidationRow], *names: str
) -> tuple[list[int], list[list[float]]]:
    """Returns the epochs and the values of each field; unknown values are NaN, which matplotlib leaves open."""
    return [row.epoch for row in rows], [[_to_float(getattr(row, name)) for row in rows] for name in names]


def _draw_isolated_intervals(axes: Any, epochs: Sequence[int], low: Sequence[float], high: Sequence[float]) -> None:
    """Draws the interval of each epoch whose neighbors are unknown, where a band would have no width."""
    known = [a == a and b == b for a, b in zip(low, high, strict=True)]
    for n, epoch in enumerate(epochs):
        if known[n] and not any(known[max(0, n - 1) : n] + known[n + 1 : n + 2]):
            axes.vlines(epoch, low[n], high[n], color=TRAINING, alpha=0.4, linewidth=4)


def _to_float(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _measure_whiskers(mean: Sequence[float], low: Sequence[float], high: Sequence[float]) -> list[list[float]]:
    """Returns the lengths down and up; unknown ends stay NaN, and an end on the wrong side of the mean has length 0."""
    return [
        [0.0 if end > m else m - end for m, end in zip(mean, low, strict=True)],
        [0.0 if end < m else end - m for m, end in zip(mean, high, strict=True)],
    ]
