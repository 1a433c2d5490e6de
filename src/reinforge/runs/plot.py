"""The picture of a run: reward before, during and after training, with what is unknown left open.

    left axis    training reward (all groups, and those kept for training) and validation reward, with 95 % intervals
    right edge   the verdict's two arms on `confirm`
    below        share of groups kept (bars) and of groups that the curriculum lets in (step line)

An unknown value is a gap in its line, never a 0.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reinforge.errors import StorageError, boundary

# Okabe and Ito (2008): told apart with any kind of colour vision, and by their lightness in grey
TRAINING, FILTERED, VALIDATION, CONFIRM, CURRICULUM, BARS = (
    "#0072B2",
    "#E69F00",
    "#D55E00",
    "#009E73",
    "#7A4A73",
    "#C8CDD2",
)
INK, GRID = "#333333", "#E6E8EB"
BASE_EPOCH = -1
WIDTH, HEIGHT, DPI = 10.0, 6.0, 100


def draw_reward_plot(
    path: Path,
    reward_history: Sequence[dict[str, Any]],
    validation_history: Sequence[dict[str, Any]],
    title: str,
    confirm: dict[str, Any] | None = None,
) -> None:
    """Writes the picture of a run as a PNG of 1000 x 600 pixels; `path` is replaced whole. Any thread may call it.

    Args:
        path: The file.
        reward_history: One row an epoch: `epoch, avg_reward, ci_low, ci_high, filtered_avg_reward, num_groups,
            num_groups_kept, curriculum_percentile`; any of them but `epoch` may be None or absent.
        validation_history: As `run_validation_evaluation` gives them; epoch -1 is the baseline.
        title: Stands above the picture.
        confirm: `base` and `tuned`, each with `mean, ci_low, ci_high` (a `MetricSummary` as a dict) or None.

    Raises:
        StorageError: The file cannot be written.
    """
    figure = reward_figure(reward_history, validation_history, title, confirm)
    unfinished = path.with_name(f".{path.name}.unfinished")
    with boundary(StorageError, f"writing {path}"):
        figure.canvas.print_png(str(unfinished))
        os.replace(unfinished, path)


def reward_figure(
    reward_history: Sequence[dict[str, Any]],
    validation_history: Sequence[dict[str, Any]],
    title: str,
    confirm: dict[str, Any] | None = None,
) -> Any:
    """Returns the picture as a matplotlib `Figure` on an Agg canvas; arguments as of `draw_reward_plot`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = _every_epoch(reward_history)
    validations = sorted(validation_history, key=lambda row: row["epoch"])
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    spacing = {"height_ratios": [4, 1], "hspace": 0.09, "left": 0.08, "right": 0.975, "top": 0.83, "bottom": 0.09}
    top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw=spacing)
    last_epoch = max((row["epoch"] for row in [*rows, *validations]), default=0)
    _draw_training(top, rows)
    _draw_validation(top, validations)
    places = _draw_confirm(top, confirm, last_epoch)
    _draw_groups(bottom, rows)
    _label(figure, top, bottom, title if len(title) <= 75 else f"{title[:74]}...")
    if not rows and not validations:
        top.text(0.5, 0.5, "nothing recorded yet", transform=top.transAxes, ha="center", color=INK)
    _set_epochs(bottom, last_epoch, has_base=any(row["epoch"] == BASE_EPOCH for row in validations), places=places)
    return figure


def _draw_training(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    epochs, (mean, low, high, filtered) = _series(rows, "avg_reward", "ci_low", "ci_high", "filtered_avg_reward")
    axes.fill_between(epochs, low, high, color=TRAINING, alpha=0.16, linewidth=0)
    _draw_lone_bands(axes, epochs, low, high)
    axes.plot(epochs, mean, color=TRAINING, linewidth=2, **_dots(epochs), label="training reward, all groups")
    axes.plot(
        epochs,
        filtered,
        color=FILTERED,
        linewidth=1.6,
        linestyle=(0, (4, 2)),
        **_dots(epochs),
        label="training reward, groups kept",
    )


def _draw_validation(axes: Any, validations: Sequence[dict[str, Any]]) -> None:
    epochs, (mean, low, high) = _series(validations, "avg_reward", "ci_low", "ci_high")
    axes.plot(epochs, mean, color=VALIDATION, linewidth=1, alpha=0.45)
    axes.errorbar(
        epochs,
        mean,
        yerr=_whiskers(mean, low, high),
        fmt="s",
        markersize=6,
        color=VALIDATION,
        markeredgecolor="white",
        elinewidth=1.5,
        capsize=3,
        zorder=4,
        label="validation reward (select)",
    )
    if validations and validations[0]["epoch"] == BASE_EPOCH and mean[0] == mean[0]:
        axes.hlines(mean[0], BASE_EPOCH, epochs[-1] + 0.5, color=VALIDATION, lw=0.9, ls=":", alpha=0.7, zorder=1)


def _draw_confirm(axes: Any, confirm: dict[str, Any] | None, last_epoch: int) -> dict[float, str]:
    """Draws the arms that are known and returns their places on the epoch axis with names."""
    step = _place_width(last_epoch)
    places: dict[float, str] = {}
    for arm, marker, fill in (("base", "D", "white"), ("tuned", "D", CONFIRM)):
        figures = (confirm or {}).get(arm)
        if not figures or figures.get("mean") is None:
            continue
        place = last_epoch + step * (1.3 if arm == "base" else 2.3)
        mean, low, high = ([_number(figures.get(key))] for key in ("mean", "ci_low", "ci_high"))
        axes.errorbar(
            [place],
            mean,
            yerr=_whiskers(mean, low, high),
            fmt=marker,
            markersize=8,
            color=CONFIRM,
            markerfacecolor=fill,
            markeredgewidth=1.8,
            elinewidth=1.8,
            capsize=4,
            zorder=5,
            label=f"verdict (confirm), {arm}",
        )
        axes.annotate(f"{mean[0]:.2f}", (place, mean[0]), (9, 0), textcoords="offset points", va="center", color=INK)
        places[place] = arm
    if places:
        axes.axvspan(
            last_epoch + 0.75 * step, last_epoch + 3.3 * step, color=CONFIRM, alpha=0.07, linewidth=0, zorder=0
        )
    return places


def _draw_groups(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    epochs, (kept, total, percentile) = _series(rows, "num_groups_kept", "num_groups", "curriculum_percentile")
    shares = [100 * k / n if n else float("nan") for k, n in zip(kept, total, strict=True)]
    axes.bar(epochs, shares, width=0.7, color=BARS, label="share of groups kept")
    axes.stairs(
        [100 * share for share in percentile],
        [epoch - 0.5 for epoch in (*epochs, len(epochs) and epochs[-1] + 1)],
        baseline=None,
        color=CURRICULUM,
        linewidth=2,
        label="share let in by the curriculum",
    )


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
    figure.legend(
        [handle for handle, _ in handles],
        [label for _, label in handles],
        loc="upper left",
        bbox_to_anchor=(0.072, 0.94),
        ncols=4,
        frameon=False,
        fontsize=9,
        columnspacing=1.4,
        handlelength=1.8,
        labelcolor=INK,
    )


def _set_epochs(axes: Any, last_epoch: int, *, has_base: bool, places: dict[float, str]) -> None:
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**6) if (last_epoch + 1) / step <= 16)
    ticks: dict[float, str] = {float(epoch): str(epoch) for epoch in range(0, last_epoch + 1, every)}
    if has_base:
        if every > 1 and last_epoch > 24:
            ticks.pop(0.0)  # no room for both beside each other
        ticks[float(BASE_EPOCH)] = "base"
    ticks.update(places)
    axes.set_xticks(list(ticks), list(ticks.values()))
    right = last_epoch + 3.3 * _place_width(last_epoch) if places else last_epoch + 0.6
    axes.set_xlim((BASE_EPOCH if has_base else 0) - 0.6, right)


def _place_width(last_epoch: int) -> float:
    """Returns how many epochs wide the place of one confirm arm is, so that its name fits under it."""
    return max(1.0, (last_epoch + 2) / 14)


def _series(rows: Sequence[dict[str, Any]], *keys: str) -> tuple[list[int], list[list[float]]]:
    """Returns the epochs and, by key, their values; unknown ones are NaN, which matplotlib leaves open."""
    return [row["epoch"] for row in rows], [[_number(row.get(key)) for row in rows] for key in keys]


def _every_epoch(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one row for each epoch, empty where none was recorded: epochs 0 and 2 -> 0, 1 (empty), 2."""
    by_epoch = {row["epoch"]: row for row in rows}
    epochs = range(min(by_epoch), max(by_epoch) + 1) if by_epoch else ()
    return [by_epoch.get(epoch, {"epoch": epoch}) for epoch in epochs]


def _draw_lone_bands(axes: Any, epochs: Sequence[int], low: Sequence[float], high: Sequence[float]) -> None:
    """Draws the interval of each epoch whose neighbours are unknown: a band has no width there and would not show."""
    known = [a == a and b == b for a, b in zip(low, high, strict=True)]
    for n, epoch in enumerate(epochs):
        if known[n] and not any(known[max(0, n - 1) : n] + known[n + 1 : n + 2]):
            axes.vlines(epoch, low[n], high[n], color=TRAINING, alpha=0.4, linewidth=4)


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _whiskers(mean: Sequence[float], low: Sequence[float], high: Sequence[float]) -> list[list[float]]:
    """Returns lengths down and up; unknown ends stay NaN, and an interval beside its mean has no whisker there."""
    return [
        [0.0 if end > m else m - end for m, end in zip(mean, low, strict=True)],
        [0.0 if end < m else end - m for m, end in zip(mean, high, strict=True)],
    ]


def _dots(epochs: Sequence[int]) -> dict[str, Any]:
    return {"marker": "o", "markersize": 4.5 if len(epochs) <= 40 else 2, "markeredgecolor": "none"}
