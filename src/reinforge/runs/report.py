"""Writes `report.md`, the readable account of a run.

It shows the same `RunSummary` as `summary.json` and the last lines on the terminal. A value that is not known is
`unknown` or left out, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from reinforge.evaluation.statistics import format_interval
from reinforge.files import replace_file
from reinforge.runs.rows import EpochMetrics, ValidationRow
from reinforge.runs.summary import NEEDS_MATPLOTLIB, RunSummary, can_draw_plots
from reinforge.safe_text import escape_markdown

SAYS_NOTHING = ("", "unknown", "100%")  # cells of a column that is left out if it has no others
MAX_ROWS = 20  # longer tables show their first and last rows

LEGEND = {
    "groups kept": "*Groups kept*: groups trained on, of all that were collected.",
    "missing": "*Missing*: episodes that failed for reasons outside the policy.",
    "validation": "*Validation*: mean reward on the `select` examples.",
}


def write_report(
    path: Path, summary: RunSummary, reward_history: Sequence[EpochMetrics], validation_history: Sequence[ValidationRow]
) -> None:
    """Writes the summary, the plot, which is expected in the same folder, and a table of the epochs."""
    header, rows = _build_epoch_table(reward_history, validation_history)
    table, left_out = _shorten_table(_drop_empty_columns(header, rows))
    lines = [
        f"# {_format_cell(summary.run_id)} {summary.headline()}",
        "",
        *_format_table(("", ""), summary.facts()),
        "",
        "![Reward by epoch](reward_plot.png)" if can_draw_plots() else f"No reward plot: {NEEDS_MATPLOTLIB}.",
        "",
        "## Epochs",
        "",
        *(_format_table(*table) if rows else ["No epoch has ended."]),
        *(["", left_out] if left_out else []),
        "",
        " ".join(["Intervals are 95 %.", *(text for name, text in LEGEND.items() if name in table[0])]),
    ]
    replace_file(path, "\n".join(lines) + "\n")


def _build_epoch_table(
    reward_history: Sequence[EpochMetrics], validation_history: Sequence[ValidationRow]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    rewards = {row.epoch: row for row in reward_history}
    validations = {row.epoch: row for row in validation_history}
    rows: list[tuple[str, ...]] = []
    for epoch in sorted(rewards.keys() | validations.keys()):
        known, validation = rewards.get(epoch), validations.get(epoch)
        row = known if known is not None else EpochMetrics(epoch)
        kept, total, share = row.num_groups_kept, row.num_groups, row.curriculum_percentile
        rows.append(
            (
                "base" if epoch < 0 else str(epoch),
                row.stage or "",
                _format_reward(row.avg_reward, row.ci_low, row.ci_high) if known is not None else "",
                _format_reward(row.filtered_avg_reward) if known is not None and kept != 0 else "",
                f"{kept} of {total}" if kept is not None and total is not None else "",
                f"level {row.level}" if row.level is not None else f"{share:.0%}" if share is not None else "",
                _format_count(row.num_missing, row.missing_reason),
                _format_validation(validation) if validation is not None else "",
            )
        )
    return (
        "epoch",
        "stage",
        "training reward",
        "reward of kept groups",
        "groups kept",
        "curriculum",
        "missing",
        "validation",
    ), rows


def _drop_empty_columns(
    header: tuple[str, ...], rows: list[tuple[str, ...]]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns the table without the columns that say nothing, such as the rewards of a dataset's rows."""
    kept = [place for place in range(len(header)) if any(row[place] not in SAYS_NOTHING for row in rows)]
    return tuple(header[place] for place in kept), [tuple(row[place] for place in kept) for row in rows]


def _shorten_table(
    table: tuple[tuple[str, ...], list[tuple[str, ...]]],
) -> tuple[tuple[tuple[str, ...], list[tuple[str, ...]]], str]:
    """Returns the table with at most `MAX_ROWS` rows, the first and the last ones, and a sentence about the others."""
    header, rows = table
    if len(rows) <= MAX_ROWS:
        return table, ""
    half = MAX_ROWS // 2
    first, last, count = rows[half][0], rows[-half - 1][0], len(rows) - MAX_ROWS
    which = f"{count} more epochs, {first} to {last}" if count > 1 else f"1 more epoch, {first}"
    text = f"{which}: see `reward_history.json` and `validation_history.json`."
    return (header, [*rows[:half], *rows[-half:]]), text


def _format_reward(mean: float | None, low: float | None = None, high: float | None = None) -> str:
    return f"{mean:.3f}" if mean is not None and low is None else format_interval(mean, low, high)


def _format_count(count: int | None, reason: str | None) -> str:
    if count is None:
        return ""
    return f"{count}: {reason}" if count and reason else str(count)


def _format_validation(row: ValidationRow) -> str:
    text = _format_reward(row.avg_reward, row.ci_low, row.ci_high)
    if row.num_unscored:
        text += f", {row.num_unscored} unscored" + (f": {row.unscored_reason}" if row.unscored_reason else "")
    return f"{text}: {row.error}" if row.error else text


def _format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(map(_format_cell, header))} |",
        f"|{'---|' * len(header)}",
        *(f"| {' | '.join(map(_format_cell, row))} |" for row in rows),
    ]


def _format_cell(text: str) -> str:
    return escape_markdown(text)
