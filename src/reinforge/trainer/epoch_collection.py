"""The collections of an epoch: which examples, when they begin, and what is fit for the job that comes next."""

from __future__ import annotations

import logging
from typing import Any

from reinforge.algorithms.curriculum import ExampleFilter
from reinforge.config.schema import FinetuneConfig
from reinforge.evaluation.reasons import ReasonCounts, describe_failure
from reinforge.evaluation.run import check_missing_share
from reinforge.interfaces import TrainerAdapter, TrajectoryBuilder
from reinforge.rollout.episode import attach_captured_tokens, attach_prompts, attach_remote_prompts
from reinforge.trainer.context import RunContext
from reinforge.trainer.overlap import EarlyCollections, ExampleChoice, build_meta, drop_stale, name_collection
from reinforge.types.trajectory import TrajectoryCollection

logger = logging.getLogger(__name__)


class EpochCollector:
    """Collects for one epoch after the other, and begins later collections while a job trains.

    Args:
        builder: Runs the episodes.
        adapter: Trains on them.
        config: The configuration.
        example_filter: Leaves out examples that the curriculum would exclude.
        context: The run; None: there is none.

    Attributes:
        early: The collections that have begun before their epoch's turn.
        num_missing: Missing episodes of the epoch, those of its refills too.
        missing_reasons: Why.
        num_stale: Groups of the epoch that are too old to be trained.
    """

    def __init__(
        self,
        builder: TrajectoryBuilder,
        adapter: TrainerAdapter,
        config: FinetuneConfig,
        example_filter: ExampleFilter,
        context: RunContext | None,
    ):
        self._builder, self._adapter, self._config = builder, adapter, config
        self._example_filter, self._context = example_filter, context
        self.early = EarlyCollections(config)
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self.num_missing, self.missing_reasons, self.num_stale = 0, ReasonCounts(), 0

    def plan_first(self, epoch: int, run_id: str) -> dict[str, Any]:
        """Returns what the first collection of an epoch is told, whose examples may have been chosen before."""
        early = self.early
        choice = early.started.get(epoch) or early.known.pop(epoch, None) or self._choose_examples(epoch)
        self._example_filter.skipped = set(choice.skipped)
        return build_meta(epoch, run_id, choice)

    async def collect(self, epoch: int, run_id: str, meta: dict[str, Any]) -> TrajectoryCollection:
        """Returns the groups of one collection, which may have begun before, and begins those that are due.

        Args:
            meta: What the builder is told: the epoch, and its examples and round if they are chosen.
        """
        name = name_collection(run_id, epoch, meta.get("round", 0))
        builder = self._builder
        plan = builder.plan(epoch)
        ids = meta.get("example_ids") or (plan.example_ids if plan is not None else ())
        total = len(ids) * plan.episodes_per_example if plan is not None else None
        if self._context is not None:
            self._context.begin_stage("COLLECT", epoch, total)
        if builder.evaluation is not None:
            builder.evaluation.epoch = epoch
        if self.early.started.pop(epoch, None) is None:
            await builder.start_run(name, meta)
        await self._begin_early(epoch, run_id)
        collection = await builder.finalize(name, meta)
        self._attach_tokens(collection)
        if self._context is not None:
            for note in builder.take_notes():
                self._context.progress.note(note)
        num_missing = self._count_missing(epoch)
        if self._context is not None:
            self._context.end_stage({"trajectories": collection.num_trajectories, "missing": num_missing})
        return self._drop_stale(collection)

    async def discard_early(self, run_id: str) -> None:
        """Ends the collections whose turn has not come."""
        for epoch in self.early.started:
            await self._builder.discard_run(name_collection(run_id, epoch))

    def _choose_examples(self, epoch: int) -> ExampleChoice:
        """Returns the examples to collect; fewer than planned if the curriculum would leave some out anyway."""
        plan = self._builder.plan(epoch)
        if plan is None:
            return ExampleChoice()
        ids = list(plan.example_ids)
        skipped = self._example_filter.find_skipped(ids, epoch)
        return ExampleChoice([id_ for id_ in ids if id_ not in skipped] if skipped else None, frozenset(skipped))

    async def _begin_early(self, epoch: int, run_id: str) -> None:
        for later in self.early.list_due(epoch):
            choice = self.early.known.pop(later, None) or self._choose_examples(later)
            self.early.started[later] = choice
            if self._context is not None:
                self._context.expect_early(later)
            name = name_collection(run_id, later)
            await self._builder.start_run(name, build_meta(later, run_id, choice))

    def _attach_tokens(self, collection: TrajectoryCollection) -> None:
        """Gives the turns what the backend trains on: captured tokens, or the prompts of a remote model."""
        evaluation = self._builder.evaluation
        if evaluation is not None:
            attach_captured_tokens(collection, evaluation.find_call)
        if self._adapter.policy() is None:
            attach_remote_prompts(collection, evaluation.find_call if evaluation else lambda _: None)
        elif self._adapter.trains_on == "messages":
            for trajectory in (each for siblings in collection.trajectories for each in siblings):
                attach_prompts(trajectory)

    def _count_missing(self, epoch: int) -> int:
        """Counts the missing episodes of a collection; returns their number.

        Raises:
            EvaluationError: There are too many of them.
        """
        records = self._builder.records or []
        check_missing_share(records, self._config.outcomes.max_missing, f"epoch {epoch}")
        missing = [record for record in records if record.outcome.is_missing]
        self.num_missing += len(missing)
        for record in missing:
            self.missing_reasons.add(describe_failure(record))
        return len(missing)

    def _drop_stale(self, collection: TrajectoryCollection) -> TrajectoryCollection:
        """Returns the groups that are recent enough for the job that comes next."""
        policy, allowed = self._adapter.policy(), self._config.limits.max_staleness
        if policy is None or not allowed:
            return collection
        collection, num_stale = drop_stale(collection, policy.version - allowed)
        if num_stale:
            self.num_stale += num_stale
            logger.warning(
                "%d groups have tokens of versions before %d and are not trained (finetuning.limits.max_staleness: %d)",
                num_stale,
                policy.version - allowed,
                allowed,
            )
        return collection
