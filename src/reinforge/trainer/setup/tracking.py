"""What watches a run from its first stage on: the guards, and the trackers that its metrics go to."""

from __future__ import annotations

import hashlib

import yaml

from reinforge.config.dump import dump_config
from reinforge.config.loaded_config import LoadedConfig
from reinforge.runs.rows import BASELINE, GUARD, list_guard_events
from reinforge.runs.summary import RunSummary
from reinforge.runs.tracking import TrackedProgress
from reinforge.trainer.context import RunContext
from reinforge.trainer.guards.events import GuardWatch
from reinforge.trainer.guards.precautions import find_warnings, list_held_out_metrics
from reinforge.trainer.setup.parts import Parts
from reinforge.types.tracking import TrackedRun

KEY = "tracking_key"
"""The fact of a run that names it at every tracker."""


def start_guards(parts: Parts, context: RunContext) -> None:
    """Warns of what is wrong with the measure of the run, once, and sets the guards that watch it."""
    config = parts.config
    held_out = list_held_out_metrics(config.gate, parts.reward_metric)
    known = {event.guard for event in list_guard_events(context.journal.stages()) if event.epoch == BASELINE}
    is_trained_on = parts.trajectory_builder.rewards_are_scores
    evaluators = list(parts.held_out_evaluators)
    for event in find_warnings(config, parts.splits, parts.reward_metric, evaluators, trains_on_reward=is_trained_on):
        if event.guard not in known:
            context.journal.record_stage(event.epoch, GUARD, event.as_dict())
            context.progress.note(f"warning: {event.text}")
    is_relative = context.is_relative
    context.guards = GuardWatch(
        config.guards, context.journal, lambda text: context.progress.note(text), held_out, is_relative=is_relative
    )


def start_trackers(loaded: LoadedConfig, parts: Parts, context: RunContext) -> None:
    """Sends the metrics of the run to its trackers from now on, and those that earlier processes measured."""
    if not parts.trackers:
        return
    context.journal.flush()
    facts = context.journal.facts()
    started_s = context.journal.sessions()[0].started_s
    key = facts.get(KEY) or hashlib.sha256(f"{context.run_id} {started_s!r}".encode()).hexdigest()[:16]
    context.journal.set_facts(**{KEY: key})
    settings = yaml.safe_load(dump_config(loaded))
    run = TrackedRun(context.run_id, context.folder, str(key), context.resumed is not None, settings)
    tracked = TrackedProgress(context.progress, parts.trackers, run, context.journal)
    if context.resumed is not None:
        tracked.send_history(context.journal.metrics(before=context.resumed.epoch), context.validations)
    context.progress = tracked


def finish_trackers(context: RunContext, summary: RunSummary) -> None:
    if isinstance(context.progress, TrackedProgress):
        context.progress.finish(summary)
