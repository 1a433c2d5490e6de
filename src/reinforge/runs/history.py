"""What happened to a run, in words, from its journal."""

from __future__ import annotations

from typing import Any

from reinforge.evaluation.statistics import format_interval
from reinforge.runs.run_folder import RunRecord, after_epoch
from reinforge.runs.validations import BASELINE

SILENT = "... and never said how it ended: it was killed, or the machine went down"


def story(record: RunRecord, *, is_running: bool) -> list[tuple[float | None, str]]:
    """Returns what happened, as pairs of time and sentence, in order: sessions, and the stages of each epoch.

    Args:
        record: The journal.
        is_running: A process works on it now, so that the last session has not ended.
    """
    told: list[tuple[float | None, str]] = []
    for number, session in enumerate(record.sessions):
        begins = session["started_s"]
        following = record.sessions[number + 1]["started_s"] if number + 1 < len(record.sessions) else float("inf")
        told.append((begins, f"process {session['pid']} on {session['host']} {_how_it_begins(number, session)}"))
        first = 0.0 if number == 0 else begins
        told += _epochs([row for row in record.stages if first <= row["at_s"] < following])
        if session["ended"] is not None:
            told.append((session["ended_s"], str(session["ended"])))
        elif following != float("inf") or not is_running:
            told.append((None, SILENT))
    return told if record.sessions else _epochs(record.stages)


def _how_it_begins(number: int, session: dict[str, Any]) -> str:
    after = session["resumed_after"]
    if after is None:
        return "begins" if number == 0 else "begins again: nothing durable was left"
    return f"goes on {after_epoch(after)}"


def _epochs(rows: list[dict[str, Any]]) -> list[tuple[float | None, str]]:
    """Returns one sentence for each epoch, in the order of its first stage."""
    by_epoch: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        arm = row["stage"].lower() if row["stage"].startswith("CONFIRM") else None
        by_epoch.setdefault(arm or _epoch_name(row), []).append(row)
    return [
        (group[-1]["at_s"], f"{name}: {', '.join(_stage(row['stage'], row['data']) for row in group)}")
        for name, group in by_epoch.items()
    ]


def _epoch_name(row: dict[str, Any]) -> str:
    if row["stage"] in ("BASELINE", "CONFIG"):
        return str(row["stage"]).lower()
    return "after the last epoch" if row["epoch"] == BASELINE else f"epoch {row['epoch']}"


def _stage(stage: str, data: dict[str, Any]) -> str:
    """Returns what a stage did; one that another trainer journals is told by its name."""
    get = data.get
    if stage == "COLLECT":
        return f"collected {get('trajectories', '?')} trajectories ({get('missing', '?')} missing)"
    if stage == "SELECT":
        return f"kept {get('kept', '?')} of {get('groups', '?')} groups"
    if stage == "SUBMIT":
        return "submitted a job"
    if stage == "AWAIT":
        return "trained" if get("num_updates") is None else f"trained {get('num_updates')} steps"
    if stage == "ADOPT":
        return f"serves version {get('version', '?')}"
    if stage in ("BASELINE", "VALIDATE"):
        return validation_text(data)
    if "outcomes" in data:
        return "evaluated " + (", ".join(f"{count} {name}" for name, count in data["outcomes"].items()) or "nothing")
    if "promoted" in data:
        return {True: "promoted", False: "not promoted", None: "no verdict"}.get(data["promoted"], "no verdict")
    if stage == "CONFIG":
        return f"changed: {'; '.join(map(str, get('changed', [])))}"
    return stage


def validation_text(row: dict[str, Any]) -> str:
    """Returns a validation's figure, as `validated 0.412 [0.380, 0.445] on 64 examples`."""
    figure = format_interval(row.get("avg_reward"), row.get("ci_low"), row.get("ci_high"))
    error = f": {row['error']}" if row.get("error") else ""
    return f"validated {figure} on {row.get('num_examples', '?')} examples{error}"
