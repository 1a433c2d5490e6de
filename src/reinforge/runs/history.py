"""What happened to a run, as sentences, from its journal."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from reinforge.evaluation.statistics import format_interval
from reinforge.runs.rows import BASELINE, GUARD, Session, StageRow, ValidationRow
from reinforge.runs.run_folder import KILLED, RunRecord, describe_position
from reinforge.types.evaluation import count_examples

SENTENCES = {
    "COLLECT": "collected {trajectories} trajectories ({missing} missing)",
    "SELECT": "kept {kept} of {groups} groups",
    "SUBMIT": "submitted a job",
    "ADOPT": "published version {version}",
}


def build_timeline(record: RunRecord, *, is_running: bool) -> list[tuple[float | None, str]]:
    """Returns what happened, as pairs of time and sentence, in order: the sessions, and the stages of each epoch."""
    events: list[tuple[float | None, str]] = []
    for number, session in enumerate(record.sessions):
        start = session.started_s
        following = record.sessions[number + 1].started_s if number + 1 < len(record.sessions) else float("inf")
        events.append((start, f"process {session.pid} on {session.host} {_describe_start(number, session)}"))
        first = 0.0 if number == 0 else start
        events += _describe_epochs([row for row in record.stages if first <= row.at_s < following])
        if session.ended is not None:
            events.append((session.ended_s, session.ended))
        elif following != float("inf") or not is_running:
            events.append((None, KILLED))
    return events if record.sessions else _describe_epochs(record.stages)


def _describe_start(number: int, session: Session) -> str:
    if session.resumed_after is None:
        return "started" if number == 0 else "restarted from the beginning: no usable checkpoint was left"
    return f"resumed {describe_position(session.resumed_after)}"


def _describe_epochs(rows: list[StageRow]) -> list[tuple[float | None, str]]:
    by_epoch: dict[str, list[StageRow]] = {}
    stages = {row.epoch: f" ({row.data['stage']})" for row in rows if row.data.get("stage")}
    for row in rows:
        arm = row.stage.lower() if row.stage.startswith("CONFIRM") else None
        by_epoch.setdefault(arm or f"{_name_epoch(row)}{stages.get(row.epoch, '')}", []).append(row)
    return [
        (group[-1].at_s, f"{name}: {', '.join(_describe_stage(row.stage, row.data) for row in group)}")
        for name, group in by_epoch.items()
    ]


def _name_epoch(row: StageRow) -> str:
    if row.stage == GUARD and row.epoch == BASELINE:
        return "before training"
    if row.stage in ("BASELINE", "CONFIG"):
        return row.stage.lower()
    return "after the last epoch" if row.epoch == BASELINE else f"epoch {row.epoch}"


def _describe_stage(stage: str, data: dict[str, Any]) -> str:
    """Returns what a stage did; for a stage of a user's own trainer its name."""
    get = data.get
    if stage in SENTENCES:
        return SENTENCES[stage].format_map(defaultdict(lambda: "?", data))
    if stage == "AWAIT":
        return "trained" if get("num_updates") is None else f"trained {get('num_updates')} steps"
    if stage in ("BASELINE", "VALIDATE"):
        return _describe_validation(ValidationRow.from_dict({"epoch": BASELINE, **data}))
    if "outcomes" in data:
        return "evaluated " + (", ".join(f"{count} {name}" for name, count in data["outcomes"].items()) or "nothing")
    if "promoted" in data:
        return {True: "promoted", False: "not promoted", None: "no verdict"}.get(data["promoted"], "no verdict")
    if stage == GUARD:
        action = {"halt": "stopped the run", "note": "noted"}.get(str(get("action")), "warned")
        return f"guard {get('guard', '?')} {action}"
    if stage == "CONFIG":
        added = get("added_epochs")
        return f"{added} more epochs" if added else f"changed: {'; '.join(map(str, get('changed', [])))}"
    return stage


def _describe_validation(row: ValidationRow) -> str:
    interval = format_interval(row.avg_reward, row.ci_low, row.ci_high)
    examples = "? examples" if row.num_examples is None else count_examples(row.num_examples, row.num_clusters)
    return f"validated {interval} on {examples}" + (f": {row.error}" if row.error else "")
