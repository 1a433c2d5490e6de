"""The components of one run, bound to each other, and what watches it: the guards and the trackers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from reinforge.algorithms.curriculum import Levels, find_levels
from reinforge.config.document import parse_yaml
from reinforge.config.dump import dump_config
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.evaluation.evaluators.weighted import Weighted
from reinforge.evaluation.run import HELD_OUT, REGRESSION, DatasetEvaluation
from reinforge.evaluation.splits import find_clusters
from reinforge.interfaces import (
    Algorithm,
    ChatModel,
    Evaluator,
    GroupEvaluator,
    Tracker,
    Trainer,
    TrainerAdapter,
    TrajectoryBuilder,
)
from reinforge.port_bases import find_plan
from reinforge.rollout.runner import EpisodeRunner
from reinforge.runs.forecast import RunSize
from reinforge.runs.rows import BASELINE, GUARD, list_guard_events
from reinforge.runs.summary import RunSummary
from reinforge.trainer.context import RunContext
from reinforge.trainer.guards import GuardWatch, find_warnings, list_held_out_metrics
from reinforge.trainer.options import LiveRun
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem
from reinforge.types.tracking import TrackedRun
from reinforge.types.workflow import BoundWorkflow


@dataclass
class Parts:
    config: FinetuneConfig
    workflow: BoundWorkflow
    splits: dict[str, list[EvalInputItem]]  # examples by split: `train`, `select`, `confirm`
    llms: dict[str, ChatModel]
    evaluators: dict[str, Evaluator]
    held_out_evaluators: dict[str, Evaluator]
    """By name, for `select` and `confirm`; the same unless the validation file has its own."""
    algorithm: Algorithm
    adapter: TrainerAdapter
    trajectory_builder: TrajectoryBuilder
    trainer: Trainer
    shape: str | None = None  # detected shape of the dataset's rows; None if the loader does not report it
    trackers: dict[str, Tracker] = field(default_factory=dict)

    @property
    def reward_metric(self) -> str:
        assert self.config.reward_function is not None  # FinetuneConfig requires it
        return self.config.reward_function.name

    @property
    def part_weights(self) -> dict[str, float]:
        """Weight of each part of the evaluator of the verdict, or else of the reward; empty: neither is `weighted`."""
        for metric in (self.gate_metric, self.reward_metric):
            evaluator = self.held_out_evaluators[metric]
            if isinstance(evaluator, Weighted):
                return dict(evaluator.weights)
        return {}

    @cached_property
    def clusters(self) -> dict[str, str]:
        """Example id -> its cluster, of examples that share a prompt or a conversation; see `find_clusters`."""
        items = [item for split in self.splits.values() for item in split]
        return find_clusters(items, self.config.splits)

    @property
    def gate_metric(self) -> str:
        return self.config.gate.metric or self.reward_metric

    def measure_size(self) -> RunSize:
        """Returns how much the run does; known once the trajectory builder is initialized."""
        config, splits, plan = self.config, self.splits, find_plan(self.trajectory_builder, 0)
        wanted = getattr(self.trajectory_builder.trajectory_builder_config, "examples_per_epoch", None)
        num_rows = min(wanted or len(splits["train"]), len(splits["train"]))
        interval = config.run_configuration.validation_interval if config.run_configuration is not None else 5
        return RunSize(
            num_epochs=config.num_epochs,
            examples_per_epoch=len(plan.example_ids) if plan is not None else num_rows,
            group_size=plan.episodes_per_example if plan is not None else 0,
            groups_per_example=plan.groups_per_example if plan is not None else 1,
            num_select=len(splits["select"]),
            num_validations=1 + sum(epoch % interval == 0 for epoch in range(1, config.num_epochs)),
            num_confirm=len(splits["confirm"]),
            num_samples=config.gate.num_samples,
        )


async def bind_parts(loaded: LoadedConfig, parts: Parts, context: RunContext) -> EpisodeRunner:
    """Binds the parts of a run to each other and to its context; returns what runs the episodes."""
    config = parts.config
    runner = EpisodeRunner.from_config(loaded.config, parts.workflow, parts.llms)

    async def compute_reward(score: EvalOutputItem, meta: dict[str, Any]) -> float | None:
        """Returns the builder's reward of a score; a builder that drives its own collection calls it itself."""
        meta = {**meta, "run_id": context.run_id, "trainer_run_id": context.run_id}
        return await parts.trajectory_builder.compute_reward(score, meta)

    if (levels := config.curriculum_learning.levels) is not None:
        trained = [item for split, items in parts.splits.items() if split not in HELD_OUT for item in items]
        context.levels = Levels(levels, find_levels(trained))
    parts.trajectory_builder.evaluation = DatasetEvaluation(
        runner,
        parts.splits,
        parts.evaluators,
        reward_metric=parts.reward_metric,
        outcomes=config.outcomes,
        compute_reward=compute_reward if parts.trajectory_builder.is_resumable else None,
        listener=context.record_episode,
        num_samples={"confirm": config.gate.num_samples},
        held_out_evaluators=parts.held_out_evaluators,
        clusters=parts.clusters,
        recall=context.recall,
        load_episodes=context.load_episodes,
        note=context.progress.note,
        includes=None if context.levels is None else context.levels.includes,
    )
    context.is_relative = isinstance(parts.held_out_evaluators[parts.reward_metric], GroupEvaluator)
    runner.limit = context.limit_episodes
    parts.trainer.context = context  # type: ignore[attr-defined]  # a user's trainer may ignore it
    await parts.trainer.bind_components(parts.trajectory_builder, parts.adapter)
    return runner


KEY = "tracking_key"  # the fact of a run that names it at every tracker


def start_guards(parts: Parts, context: RunContext) -> None:
    """Warns of what is wrong with the measure of the run, once, and sets the guards that watch it."""
    config = parts.config
    held_out = list_held_out_metrics(config.gate, parts.reward_metric)
    known = {event.guard for event in list_guard_events(context.journal.stages()) if event.epoch == BASELINE}
    is_trained_on = parts.trajectory_builder.rewards_are_scores
    evaluators = list(parts.held_out_evaluators)
    splits = {name: items for name, items in parts.splits.items() if name != REGRESSION}
    for event in find_warnings(config, splits, parts.reward_metric, evaluators, trains_on_reward=is_trained_on):
        if event.guard not in known:
            context.journal.record_stage(event.epoch, GUARD, event.as_dict())
            context.progress.note(event.text if event.action == "note" else f"warning: {event.text}")
    is_relative = context.is_relative
    context.guards = GuardWatch(
        config.guards, context.journal, lambda text: context.progress.note(text), held_out, is_relative=is_relative
    )


def start_trackers(loaded: LoadedConfig, parts: Parts, context: RunContext) -> None:
    """Sends the metrics of the run to its trackers from now on, and those that earlier processes measured."""
    if not parts.trackers:
        return
    from reinforge.runs.tracking import TrackedProgress  # for trackers alone

    context.journal.flush()
    facts = context.journal.facts()
    started_s = context.journal.sessions()[0].started_s
    key = facts.get(KEY) or hashlib.sha256(f"{context.run_id} {started_s!r}".encode()).hexdigest()[:16]
    context.journal.set_facts(**{KEY: key})
    settings = parse_yaml(dump_config(loaded)).data
    run = TrackedRun(context.run_id, context.folder, str(key), context.resumed is not None, settings)
    tracked = TrackedProgress(context.progress, parts.trackers, run, context.journal)
    if context.resumed is not None:
        tracked.send_history(context.journal.metrics(before=context.resumed.epoch), context.validations)
    context.progress = tracked


def finish_trackers(parts: Parts, context: RunContext, summary: RunSummary, live: LiveRun) -> None:
    if parts.trackers:
        from reinforge.runs.tracking import TrackedProgress

        if isinstance(context.progress, TrackedProgress):  # it started before the run failed
            live.is_saving = any(each.stop_s > Tracker.stop_s for each in parts.trackers.values())
            context.progress.finish(summary)
