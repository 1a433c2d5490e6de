"""What a run says when it ends: `summary.json` for programs, `report.md` to read, ten lines for the terminal.

All three are made from one `RunSummary`. What is not known is null, `unknown` or left out; it is never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from reinforge.evaluation.statistics import format_interval
from reinforge.files import replace_file
from reinforge.runs.summary import RunSummary


def write_report(
    path: Path,
    summary: RunSummary,
    reward_history: Sequence[dict[str, Any]],
    validation_history: Sequence[dict[str, Any]],
) -> None:
    """Writes `report.md`: the summary, the plot and a table of the epochs.

    Args:
        path: The file; the plot is expected beside it.
        summary: The run.
        reward_history: One row an epoch, as `plot.draw_reward_plot` takes them.
        validation_history: One row a validation; epoch -1 is the baseline.

    Raises:
        StorageError: The file cannot be written.
    """
    lines = [
        f"# {_cell(summary.run_id)} {summary.headline()}",
        "",
        *_table(("", ""), summary.facts()),
        "",
        "![Reward by epoch](reward_plot.png)",
        "",
        "## Epochs",
        "",
        *_table(*_epoch_table(reward_history, validation_history)),
        "",
        "Intervals are 95 %. *Kept*: groups trained on, of all. *Validation*: mean reward on the `select` examples.",
    ]
    replace_file(path, "\n".join(lines) + "\n")


def _epoch_table(
    reward_history: Sequence[dict[str, Any]], validation_history: Sequence[dict[str, Any]]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    rewards = {row["epoch"]: row for row in reward_history}
    validations = {row["epoch"]: row for row in validation_history}
    rows: list[tuple[str, ...]] = []
    for epoch in sorted(rewards.keys() | validations.keys()):
        row, validation = rewards.get(epoch, {}), validations.get(epoch)
        kept, total, share = row.get("num_groups_kept"), row.get("num_groups"), row.get("curriculum_percentile")
        rows.append(
            (
                "base" if epoch < 0 else str(epoch),
                _row_figure(row, "avg_reward") if row else "",
                format_interval(row.get("filtered_avg_reward")) if row else "",
                f"{kept} of {total}" if kept is not None and total is not None else "",
                f"{share:.0%}" if share is not None else "",
                "" if row.get("num_missing") is None else str(row["num_missing"]),
                _row_figure(validation, "avg_reward") if validation is not None else "",
            )
        )
    return ("epoch", "training reward", "kept groups' reward", "kept", "curriculum", "missing", "validation"), rows


def _row_figure(row: dict[str, Any], key: str) -> str:
    text = format_interval(row.get(key), row.get("ci_low"), row.get("ci_high"))
    return f"{text}: {row['error']}" if row.get("error") else text


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(map(_cell, header))} |",
        f"|{'---|' * len(header)}",
        *(f"| {' | '.join(map(_cell, row))} |" for row in rows),
    ]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
