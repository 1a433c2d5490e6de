"""The collections of an epoch: which examples, when they begin, and what is fit for the job that comes next."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Self

from reinforge.algorithms.curriculum import ExampleFilter
from reinforge.config.pipeline import find_stage
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import Problem
from reinforge.evaluation.reasons import ReasonCounts, describe_failure
from reinforge.evaluation.run import check_missing_share
from reinforge.interfaces import Trainer, TrainerAdapter, TrajectoryBuilder
from reinforge.port_bases import DiscardsRuns, TakesNotes, find_plan
from reinforge.rollout.episode import attach_sources
from reinforge.rollout.history import count_repeated_tokens
from reinforge.trainer.context import RunContext
from reinforge.types.trajectory import TrajectoryCollection, TrajectoryGroup

PATH = "finetuning.limits.max_staleness"


@dataclass(frozen=True, slots=True)
class ExampleChoice:
    """The examples that an epoch collects, chosen when its collection begins."""

    example_ids: list[str] | None = None  # their ids; None: all that the builder plans
    skipped: frozenset[str] = frozenset()  # planned ones that the curriculum leaves out

    def as_dict(self) -> dict[str, Any]:
        return {"example_ids": self.example_ids, "skipped": sorted(self.skipped)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(data["example_ids"], frozenset(data["skipped"]))


@dataclass
class EarlyCollections:
    """The collections that have begun before their epoch's turn."""

    config: FinetuneConfig
    num_epochs: int = 0  # number of epochs of the run; 0: nothing begins early
    started: dict[int, ExampleChoice] = field(default_factory=dict)
    """Epoch -> its examples, of the collections that have begun and whose turn has not come."""
    known: dict[int, ExampleChoice] = field(default_factory=dict)
    """Epoch -> its examples, as an earlier process of the run had chosen them."""

    def list_due(self, epoch: int) -> list[int]:
        """Returns the epochs whose collection may begin now, all epochs before `epoch` being done.

        A stage of a pipeline begins after the job of the one before: it has its own builder and its own reference.
        """
        stage = find_stage(self.config, epoch)
        last = find_last_due(epoch, self.config.limits.max_staleness)
        later = range(epoch + 1, min(last + 1, self.num_epochs))
        return [each for each in later if each not in self.started and find_stage(self.config, each) == stage]

    def as_dict(self) -> dict[str, Any]:
        return {str(epoch): choice.as_dict() for epoch, choice in self.started.items()}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Restores what `as_dict` returned in an earlier process, so that the same episodes run again."""
        self.known = {int(epoch): ExampleChoice.from_dict(choice) for epoch, choice in data.items()}


def name_collection(run_id: str, epoch: int, round_: int = 0) -> str:
    return f"{run_id}-epoch-{epoch}-round-{round_}"


def find_last_due(epoch: int, max_staleness: int) -> int:
    """Returns the last epoch whose episodes may run while all epochs before `epoch` are done, and it is not.

    Example: epoch 4 is being collected or trained, max_staleness 2 -> 6: its tokens are sampled by version 4 or a later
    one, and its job starts from version 6 at the latest.
    """
    return epoch + max_staleness


def is_stale(group: TrajectoryGroup, oldest: int) -> bool:
    """Returns True if a version before `oldest` sampled one of the group's trained tokens."""
    return any(
        turn.is_trained and turn.tokens is not None and 0 <= turn.tokens.policy_version < oldest
        for trajectory in group.trajectories
        for turn in trajectory.turns
    )


def attach_calls(collection: TrajectoryCollection, builder: TrajectoryBuilder, adapter: TrainerAdapter) -> None:
    """Gives the turns of a collection what the backend trains on, where the builder has kept no more than a call's id.

    See `attach_sources`.
    """
    evaluation = builder.evaluation
    attach_sources(
        chain.from_iterable(collection.trajectories),
        evaluation.find_call if evaluation is not None else lambda call_id: None,
        trains_on=adapter.trains_on,
        is_remote=adapter.policy() is None,
    )


def check_overlap(
    config: FinetuneConfig, trainer: Trainer | None, adapter: TrainerAdapter | None, builder: TrajectoryBuilder | None
) -> list[Problem]:
    """Returns why a run with these components cannot sample while it trains; none with `max_staleness: 0`."""
    if not config.limits.max_staleness:
        message = "no reply is being sampled when weights are published, since max_staleness is 0"
        keep = Problem("finetuning.limits.in_flight", message, f"set it to wait, or {PATH} to 1")
        return [] if config.limits.in_flight == "wait" else [keep]
    problems = []
    if trainer is not None and not trainer.collects_ahead:
        message = f"{type(trainer).__name__} collects and trains one after the other"
        problems.append(Problem(PATH, message, "set it to 0, or use the trainer `_type: epoch`"))
    if trainer is not None and getattr(trainer.trainer_config, "save_every", 1) > 1:
        message = f"{PATH} is {config.limits.max_staleness}, so every version that a token names needs a checkpoint"
        fix = "set it to 1, or max_staleness to 0"
        problems.append(Problem(f"trainers.{config.trainer}.save_every", message, fix))
    if adapter is not None and not adapter.serves_during_jobs:
        message = f"{type(adapter).__name__} does not serve the policy while a job trains"
        problems.append(Problem(PATH, message, "set it to 0, or use the trainer adapter `_type: local`"))
    if builder is not None and not builder.collects_ahead:
        message = f"{type(builder).__name__} collects one epoch at a time"
        problems.append(Problem(PATH, message, "set it to 0, or use the trajectory builder `_type: group`"))
    if config.deterministic:
        message = "what a version samples then depends on how long the job before it takes"
        problems.append(Problem("finetuning.deterministic", message, f"set it to false, or {PATH} to 0"))
    return problems


logger = logging.getLogger(__name__)


class EpochCollector:
    """Collects for one epoch after the other, and begins later collections while a job trains."""

    def __init__(self, trainer: Trainer, example_filter: ExampleFilter, context: RunContext):
        self._builder, self._adapter, self._config = (
            trainer.trajectory_builder,
            trainer.trainer_adapter,
            trainer.run_config,
        )
        self._trainer_config = trainer.trainer_config
        self._example_filter, self._context = example_filter, context
        self.early, self._is_told = EarlyCollections(self._config), False
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self.num_missing, self.missing_reasons, self.num_stale = 0, ReasonCounts(), 0

    def plan_first(self, epoch: int, run_id: str) -> dict[str, Any]:
        """Returns what the first collection of an epoch is told, whose examples may have been chosen before."""
        early = self.early
        choice = early.started.get(epoch) or early.known.pop(epoch, None) or self._choose_examples(epoch)
        self._example_filter.skipped = set(choice.skipped)
        return self.build_meta(epoch, run_id, choice)

    def build_meta(self, epoch: int, run_id: str, choice: ExampleChoice) -> dict[str, Any]:
        chosen = {} if choice.example_ids is None else {"example_ids": choice.example_ids}
        known = {"run_id": run_id, "trainer_run_id": run_id, "trainer_config": self._trainer_config.model_dump()}
        return {"epoch": epoch, **known, **chosen}

    async def collect(self, epoch: int, run_id: str, meta: dict[str, Any]) -> list[TrajectoryGroup]:
        """Returns the groups of one collection, which may have begun before, and begins those that are due."""
        name = name_collection(run_id, epoch, meta.get("round", 0))
        builder = self._builder
        plan = find_plan(builder, epoch)
        ids = meta.get("example_ids") or (plan.example_ids if plan is not None else ())
        total = len(ids) * plan.episodes_per_example if plan is not None else None
        self._context.begin_stage("COLLECT", epoch, total)
        if builder.evaluation is not None:
            builder.evaluation.epoch = epoch
        if self.early.started.pop(epoch, None) is None:
            await builder.start_run(name, meta)
        await self._begin_early(epoch, run_id)
        collection = await builder.finalize(name, meta)
        attach_calls(collection, builder, self._adapter)
        for note in builder.take_notes() if isinstance(builder, TakesNotes) else ():
            self._context.progress.note(note)
        self._tell_repeated()
        num_missing = self._count_missing(epoch)
        self._context.end_stage({"trajectories": collection.num_trajectories, "missing": num_missing})
        return self._drop_stale(collection.groups)

    async def discard_early(self, run_id: str) -> None:
        if isinstance(builder := self._builder, DiscardsRuns):
            for epoch in self.early.started:
                await builder.discard_run(name_collection(run_id, epoch))

    def _choose_examples(self, epoch: int) -> ExampleChoice:
        """Returns the examples to collect; fewer than planned if the curriculum would leave some out anyway."""
        plan = find_plan(self._builder, epoch)
        if plan is None:
            return ExampleChoice()
        ids = list(plan.example_ids)
        skipped = self._example_filter.find_skipped(ids, epoch)
        return ExampleChoice([id_ for id_ in ids if id_ not in skipped] if skipped else None, frozenset(skipped))

    async def _begin_early(self, epoch: int, run_id: str) -> None:
        for later in self.early.list_due(epoch):
            choice = self.early.known.pop(later, None) or self._choose_examples(later)
            self.early.started[later] = choice
            self._context.expect_early(later)
            name = name_collection(run_id, later)
            await self._builder.start_run(name, self.build_meta(later, run_id, choice))

    def _tell_repeated(self) -> None:
        """Says once what it costs that the chat template writes earlier replies unlike they were sampled."""
        records, self._is_told = () if self._is_told else self._builder.records or (), True
        counts = [count_repeated_tokens(record.calls) for record in records]
        if total := sum(counts):
            logger.warning(
                "the chat template writes earlier replies of %d episodes with other tokens than were sampled, so "
                "%d tokens are trained as context again; `finetuning.policy.history: splice` continues those",
                sum(map(bool, counts)), total,
            )  # fmt: skip

    def _count_missing(self, epoch: int) -> int:
        records = self._builder.records or []
        check_missing_share(records, self._config.outcomes.max_missing, f"epoch {epoch}")
        missing = [record for record in records if record.outcome.is_missing]
        self.num_missing += len(missing)
        for record in missing:
            self.missing_reasons.add(describe_failure(record))
        return len(missing)

    def _drop_stale(self, groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        policy, allowed = self._adapter.policy(), self._config.limits.max_staleness
        if policy is None or not allowed:
            return groups
        oldest = policy.version - allowed
        kept = [group for group in groups if not is_stale(group, oldest)]
        if num_stale := len(groups) - len(kept):
            self.num_stale += num_stale
            logger.warning(
                "%d groups have tokens of versions before %d and are not trained (finetuning.limits.max_staleness: %d)",
                num_stale,
                oldest,
                allowed,
            )
        return kept
