"""What the run of a job has recorded so far, as events and metrics of the fine-tuning API."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforge.files import find_json, read_lines
from reinforge.protocols.openai.server.plan import VALIDATION_ROWS
from reinforge.protocols.openai.server.records import MAX_MESSAGE, JobEvent
from reinforge.protocols.openai.server.store import make_event
from reinforge.runs.rows import BASELINE

METRICS, VALIDATIONS = "training_metrics.jsonl", "validation_history.json"
NAMES = {"loss": "train_loss", "avg_reward": "train_mean_reward", "reward_std": "train_reward_std"}
"""Metrics of an epoch -> their names in the API."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of one epoch of a job's run."""

    epoch: int  # from 0
    step: int
    values: dict[str, float]
    """By OpenAI's names where it has one: `train_loss`, `full_valid_loss`; and `train_mean_reward`,
    `full_valid_mean_reward`."""


def read_metrics(run: Path, method: str | None = None) -> list[StepMetrics]:
    """Returns the metrics of each epoch that has ended; the run folder may not exist yet."""
    validations = {row.get("epoch"): row for row in _read_validations(run)}
    return [
        StepMetrics(row["epoch"], step, values | _name_validation(validations.get(row["epoch"], {}), method))
        for row, step, values in _read_steps(run)
    ]


def read_events(job_id: str, run: Path) -> list[JobEvent]:
    """Returns the events of a job's run so far, in the order of the epochs; the same metrics have the same ids."""
    events = list[tuple[float, JobEvent]]()
    for row, step, values in _read_steps(run):
        shown = ", ".join(f"{_describe(name)}={value:.4g}" for name, value in values.items())
        message = f"Step {step}: {shown}" if row.get("num_updates") else f"Step {step}: nothing to train on"
        event = make_event(job_id, f"step-{row['epoch']}", message, data={"step": step, **values})
        events.append((row["epoch"], event))
    source = "validation_file" if (run.parent / VALIDATION_ROWS).exists() else "training_file"
    for row in _read_validations(run):
        mean, epoch = row.get("avg_reward"), int(row.get("epoch", BASELINE))
        when = "before training" if epoch == BASELINE else f"after epoch {epoch + 1}"
        if isinstance(mean, int | float):
            data = {"validation": mean, "num_examples": row.get("num_examples")}
            message = f"Validation {when} on {row.get('num_examples')} rows of the {source}: mean score {mean:.4g}"
            events.append((epoch + 0.5, make_event(job_id, f"validation-{epoch}", message, data=data)))
    return [event for _, event in sorted(events, key=lambda pair: pair[0])]


def read_note(job_id: str, file: Path) -> list[JobEvent]:
    """Returns the event which says that rows of the training file are left out; none: they all fit."""
    note = find_json(file)
    if not isinstance(note, dict) or "left_out" not in note:
        return []
    return [make_event(job_id, "left-out", str(note["left_out"])[:MAX_MESSAGE], "warn")]


def write_results(metrics: list[StepMetrics]) -> bytes:
    """Returns the metrics as a CSV file, as a job's `result_files` have them."""
    names = list(dict.fromkeys(name for each in metrics for name in each.values))
    text = io.StringIO()
    writer = csv.DictWriter(text, ["step", *names], lineterminator="\n")
    writer.writeheader()
    writer.writerows({"step": each.step, **each.values} for each in metrics)
    return text.getvalue().encode()


def _describe(name: str) -> str:
    return {"train_loss": "training loss", "train_mean_reward": "mean reward"}.get(name, name.replace("_", " "))


def _name_validation(row: Mapping[str, Any], method: str | None) -> dict[str, float]:
    """Returns a validation under OpenAI's name: of supervised jobs, the loss is minus the score."""
    mean = row.get("avg_reward")
    if not isinstance(mean, int | float):
        return {}
    if method == "supervised":
        return {"full_valid_loss": -mean}
    return {"full_valid_mean_reward": mean}


def _read_steps(run: Path) -> Iterator[tuple[dict[str, Any], int, dict[str, float]]]:
    """Yields the row of each epoch that has ended, the step that it ends at, and its metrics by their names."""
    try:
        rows, step = read_lines(run / METRICS), 0
    except OSError:  # not there yet, or just being rewritten by a run that resumes
        return
    for row in rows:
        if isinstance(row.get("epoch"), int):
            step += int(row.get("num_updates") or 0)
            yield row, step, {name: row[key] for key, name in NAMES.items() if isinstance(row.get(key), int | float)}


def _read_validations(run: Path) -> list[dict[str, Any]]:
    rows = find_json(run / VALIDATIONS)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
