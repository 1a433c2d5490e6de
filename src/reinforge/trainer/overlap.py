"""Sampling ahead: episodes of later epochs run while an earlier epoch is trained (`limits.max_staleness`).

max_staleness 1   epoch 0   collect ─── train → version 1 ─┐
                  epoch 1   collect ··················──── train → version 2 ─┐    sampled by versions 0 and 1
                  epoch 2                                  collect ······──── train    sampled by versions 1 and 2

When the job of epoch k starts, at most k jobs have been published. Its collection begins when all but `max_staleness`
of the epochs before it are done, so none of its tokens can be older than that; whatever a builder or a server does
otherwise is dropped before it is trained, and counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from reinforge.config.pipeline import find_stage
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import Problem
from reinforge.interfaces import Trainer, TrainerAdapter, TrajectoryBuilder
from reinforge.types.trajectory import TrajectoryCollection, TrajectoryGroup

PATH = "finetuning.limits.max_staleness"


@dataclass(frozen=True, slots=True)
class ExampleChoice:
    """The examples that an epoch collects, chosen when its collection begins.

    Attributes:
        example_ids: Their ids; None: all that the builder plans.
        skipped: Planned ones that the curriculum leaves out.
    """

    example_ids: list[str] | None = None
    skipped: frozenset[str] = frozenset()

    def as_dict(self) -> dict[str, Any]:
        """Returns it ready for JSON."""
        return {"example_ids": self.example_ids, "skipped": sorted(self.skipped)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Returns what `as_dict` wrote."""
        return cls(data["example_ids"], frozenset(data["skipped"]))


@dataclass
class EarlyCollections:
    """The collections that have begun before their epoch's turn.

    Attributes:
        config: The run's configuration.
        num_epochs: Number of epochs of the run; 0: nothing begins early.
        started: Epoch -> its examples, of the collections that have begun and whose turn has not come.
        known: Epoch -> its examples, as an earlier process of the run had chosen them.
    """

    config: FinetuneConfig
    num_epochs: int = 0
    started: dict[int, ExampleChoice] = field(default_factory=dict)
    known: dict[int, ExampleChoice] = field(default_factory=dict)

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


def build_meta(epoch: int, run_id: str, choice: ExampleChoice) -> dict[str, Any]:
    chosen = {} if choice.example_ids is None else {"example_ids": choice.example_ids}
    return {"epoch": epoch, "trainer_run_id": run_id, **chosen}


def find_last_due(epoch: int, max_staleness: int) -> int:
    """Returns the last epoch whose episodes may run while all epochs before `epoch` are done, and it is not.

    Example: epoch 4 is being collected or trained, max_staleness 2 -> 6: its tokens are sampled by version 4 or a later
    one, and its job starts from version 6 at the latest.
    """
    return epoch + max_staleness


def drop_stale(collection: TrajectoryCollection, oldest: int) -> tuple[TrajectoryCollection, int]:
    """Returns the groups without a trained token of a version before `oldest`, and the number of the others."""
    kept = [group.trajectories for group in collection.groups if not is_stale(group, oldest)]
    if len(kept) == len(collection.trajectories):
        return collection, 0
    recent = TrajectoryCollection(trajectories=kept, run_id=collection.run_id, epoch=collection.epoch)
    return recent, len(collection.trajectories) - len(kept)


def is_stale(group: TrajectoryGroup, oldest: int) -> bool:
    """Returns True if a version before `oldest` sampled one of the group's trained tokens."""
    return any(
        turn.is_trained and turn.tokens is not None and 0 <= turn.tokens.policy_version < oldest
        for trajectory in group.trajectories
        for turn in trajectory.turns
    )


def check_overlap(
    config: FinetuneConfig, trainer: Trainer | None, adapter: TrainerAdapter | None, builder: TrajectoryBuilder | None
) -> list[Problem]:
    """Returns why a run with these components cannot sample while it trains; none with `max_staleness: 0`."""
    if not config.limits.max_staleness:
        return []
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
