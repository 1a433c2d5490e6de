"""The loop under NeMo Agent Toolkit's name for preference pairs: `nemo_customizer_trainer`.

Each epoch collects `num_runs` times, merges the pairs of each example, and submits one job.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field, field_validator

from reinforge.config.schema import TrainerConfig
from reinforge.errors import EvaluationError
from reinforge.interfaces import Builder
from reinforge.registry import register_trainer
from reinforge.trainer.loop import EpochTrainer
from reinforge.types.trajectory import Trajectory, TrajectoryCollection, TrajectoryGroup

logger = logging.getLogger(__name__)


class NeMoCustomizerTrainerConfig(TrainerConfig, name="nemo_customizer_trainer"):
    """How the pairs of an epoch are collected; the rest is in `finetuning`."""

    num_runs: int = Field(default=1, ge=1, description="Collections per epoch; their pairs go into one job.")
    continue_on_collection_error: bool = Field(
        default=False, description="true: a collection that fails is left out, unless all of them do."
    )
    deduplicate_pairs: bool = Field(default=True, description="Train equal pairs once.")
    max_pairs: int | None = Field(
        default=None, ge=1, description="Most pairs of a job, those with the highest rewards; null: all."
    )
    wait_for_completion: bool = Field(default=True, description="Must be true: the run reports on its job.")

    @field_validator("wait_for_completion")
    @classmethod
    def _check_wait(cls, waits: bool) -> bool:
        if not waits:
            raise ValueError("false is not supported: stop the run instead, and --resume it to see its job")
        return waits


class NeMoCustomizerTrainer(EpochTrainer):
    """The epoch loop with several collections per epoch."""

    collects_ahead = False
    trainer_config: NeMoCustomizerTrainerConfig  # type: ignore[assignment]  # EpochTrainer reads its own with getattr

    async def _collect(self, epoch: int, run_id: str, meta: dict[str, Any]) -> list[TrajectoryGroup]:
        config, first = self.trainer_config, int(meta.get("round", 0)) * self.trainer_config.num_runs
        groups: dict[str, list[Trajectory]] = {}
        failure: EvaluationError | None = None
        num_collected = 0
        for number in range(first, first + config.num_runs):
            try:
                collected = await super()._collect(epoch, run_id, {**meta, "round": number})
            except EvaluationError as error:
                if not config.continue_on_collection_error:
                    raise
                logger.warning("epoch %d: collection %d failed and is left out: %s", epoch, number, error)
                failure = error
                continue
            num_collected += 1
            for group in collected:
                groups.setdefault(group.group_id, []).extend(group.trajectories)
        if failure is not None and not num_collected:
            raise failure
        return TrajectoryCollection(trajectories=list(groups.values()), run_id=run_id, epoch=epoch).groups

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        """Drops equal pairs and those above `max_pairs`, then does what the epoch loop does."""
        config = self.trainer_config
        groups = [list(group.trajectories) for group in trajectory_collection.groups]
        if config.deduplicate_pairs:
            groups = _drop_equal_pairs(groups)
        if config.max_pairs is not None:
            groups = _keep_best_pairs(groups, config.max_pairs)
        kept = TrajectoryCollection(
            trajectories=[each for each in groups if each], run_id=trajectory_collection.run_id, epoch=epoch
        )
        return super().apply_curriculum_learning(kept, epoch)


def _drop_equal_pairs(groups: list[list[Trajectory]]) -> list[list[Trajectory]]:
    """Returns the groups without trajectories whose pairs came before; trajectories without pairs are kept."""
    known: set[str] = set()
    kept: list[list[Trajectory]] = []
    for siblings in groups:
        kept.append([])
        for trajectory in siblings:
            content = str([item.model_dump() for item in trajectory.pairs])
            if not trajectory.pairs or content not in known:
                kept[-1].append(trajectory)
                known.add(content)
    return kept


def _keep_best_pairs(groups: list[list[Trajectory]], most: int) -> list[list[Trajectory]]:
    ranked = sorted((trajectory for siblings in groups for trajectory in siblings), key=lambda each: -each.reward)
    chosen = {id(trajectory) for trajectory in ranked[:most]}
    return [[trajectory for trajectory in siblings if id(trajectory) in chosen] for siblings in groups]


@register_trainer(config_type=NeMoCustomizerTrainerConfig)
async def nemo_customizer_trainer(
    config: NeMoCustomizerTrainerConfig, builder: Builder
) -> AsyncIterator[NeMoCustomizerTrainer]:
    yield NeMoCustomizerTrainer(config, algorithm=await builder.get_algorithm())
