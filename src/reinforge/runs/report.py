"""Writes `report.md`, the readable account of a run.

It shows the same `RunSummary` as `summary.json` and the last lines on the terminal. A value that is not known is
`unknown` or left out, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from reinforge.evaluation.statistics import format_interval
from reinforge.files import replace_file
from reinforge.runs.plot import NEEDS_MATPLOTLIB, can_draw_plots
from reinforge.runs.rows import EpochMetrics, ValidationRow
from reinforge.runs.summary import RunSummary


def write_report(
    path: Path,
    summary: RunSummary,
    reward_history: Sequence[EpochMetrics],
    validation_history: Sequence[ValidationRow],
) -> None:
    """Writes the summary, the plot and a table of the epochs.

    Args:
        path: The file; the plot is expected in the same folder.
        summary: How the run ended.
        reward_history: One row per epoch.
        validation_history: One row per validation; epoch -1 is the baseline.

    Raises:
        StorageError: The file cannot be written.
    """
    lines = [
        f"# {_format_cell(summary.run_id)} {summary.headline()}",
        "",
        *_format_table(("", ""), summary.facts()),
        "",
        "![Reward by epoch](reward_plot.png)" if can_draw_plots() else f"No reward plot: {NEEDS_MATPLOTLIB}.",
        "",
        "## Epochs",
        "",
        *_format_table(*_build_epoch_table(reward_history, validation_history)),
        "",
        "Intervals are 95 %. *Groups kept*: groups trained on, of all that were collected. *Missing*: episodes that "
        "failed for reasons outside the policy. *Validation*: mean reward on the `select` examples.",
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
                format_interval(row.avg_reward, row.ci_low, row.ci_high) if known is not None else "",
                _format_mean(row.filtered_avg_reward) if known is not None else "",
                f"{kept} of {total}" if kept is not None and total is not None else "",
                f"{share:.0%}" if share is not None else "",
                "" if row.num_missing is None else str(row.num_missing),
                _format_validation(validation) if validation is not None else "",
            )
        )
    return (
        "epoch",
        "training reward",
        "reward of kept groups",
        "groups kept",
        "curriculum",
        "missing",
        "validation",
    ), rows


def _format_mean(mean: float | None) -> str:
    return "unknown" if mean is None else f"{mean:.3f}"


def _format_validation(row: ValidationRow) -> str:
    text = format_interval(row.avg_reward, row.ci_low, row.ci_high)
    return f"{text}: {row.error}" if row.error else text


def _format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(map(_format_cell, header))} |",
        f"|{'---|' * len(header)}",
        *(f"| {' | '.join(map(_format_cell, row))} |" for row in rows),
    ]


def _format_cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
