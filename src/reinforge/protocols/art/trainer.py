"""The loop and the builder under NeMo Agent Toolkit's names: `openpipe_art_trainer`, `openpipe_art_traj_builder`.

They are the loop and the builder of any other run, with the groups, the files and the fields that a file or a program
written for NeMo Agent Toolkit expects.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import Field

from reinforge.config.schema import FinetuneConfig, TrainerConfig
from reinforge.files import append_line
from reinforge.interfaces import Builder
from reinforge.registry import register_trainer, register_trajectory_builder
from reinforge.runs.rows import EpochMetrics
from reinforge.runs.summary import can_draw_plots
from reinforge.trainer.builders.group import (
    GroupTrajectoryBuilder,
    GroupTrajectoryBuilderConfig,
    find_policy_entries,
    group_siblings,
)
from reinforge.trainer.loop import EpochTrainer
from reinforge.types.trajectory import TrajectoryCollection, TrajectoryGroup

logger = logging.getLogger(__name__)

MATPLOTLIB_AVAILABLE = can_draw_plots()  # True if `reward_plot.png` can be drawn


class ARTTrainerConfig(TrainerConfig, name="openpipe_art_trainer"):
    """The epoch loop; all of its settings are in `finetuning`."""


class ARTTrainer(EpochTrainer):
    """The epoch loop; its rows have the fields of NeMo Agent Toolkit too, and it draws the plot after each epoch."""

    def _epoch_metrics(
        self, epoch: int, groups: Sequence[TrajectoryGroup], kept: Sequence[TrajectoryGroup]
    ) -> EpochMetrics:
        row = super()._epoch_metrics(epoch, groups, kept)
        counts = {"filtered_groups": len(kept), "filtered_trajectories": sum(len(each.trajectories) for each in kept)}
        row.job |= {**self._stamp(), **_find_range(groups), **_find_range(kept, "filtered_"), **counts}
        return row

    def _stamp(self) -> dict[str, Any]:
        state = {"curriculum_state": self.get_curriculum_state()} if self.curriculum_config.enabled else {}
        return {"timestamp": _now(), "run_id": self._run_id, **state}

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Writes the metrics files and the plot, to `output_dir` or the run folder, and updates the progress."""
        super().log_progress(epoch, {**self._stamp(), **metrics}, output_dir)
        if output_dir is None and can_draw_plots():
            self._create_reward_plot(epoch, self.context.folder)


def _now() -> str:
    return datetime.now().astimezone().isoformat()


def _find_range(groups: Sequence[TrajectoryGroup], prefix: str = "") -> dict[str, float | None]:
    rewards = [reward for group in groups for reward in group.rewards]
    return {f"{prefix}min_reward": min(rewards, default=None), f"{prefix}max_reward": max(rewards, default=None)}


class ARTTrajectoryBuilderConfig(GroupTrajectoryBuilderConfig, name="openpipe_art_traj_builder"):
    """The group builder, with NeMo Agent Toolkit's default of two generations."""

    num_generations: int = Field(
        default=2,
        ge=1,
        description="Episodes per example: the siblings of a group; 1: all episodes of an epoch are one group.",
    )


class ARTTrajectoryBuilder(GroupTrajectoryBuilder):
    """The group builder; with one generation, all episodes of an epoch are one group."""

    def num_siblings(self, workflow_config: Any) -> int:
        if self.num_generations > 1:
            return self.num_generations
        return self.trajectory_builder_config.examples_per_epoch or sys.maxsize

    def further_examples(self, epoch: int, used: set[str], count: int) -> list[str]:
        return super().further_examples(epoch, used, count) if self.num_generations > 1 else []

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        collection = await super().finalize(run_id, meta)
        if self.num_generations > 1:
            return collection
        flat = [trajectory for group in collection.trajectories for trajectory in group]
        for trajectory in flat:
            trajectory.group_id = trajectory.model_group or "all"
        return TrajectoryCollection(trajectories=group_siblings(flat), run_id=run_id, epoch=collection.epoch)

    def example_rewards(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[str, float]]:
        if self.num_generations > 1:
            return super().example_rewards(groups)
        flat = [trajectory for group in groups for trajectory in group.trajectories]
        alone = [TrajectoryGroup(group_id=str(each.group_id), trajectories=[each]) for each in flat]
        return [(group.example_id, group.mean_reward) for group in alone]

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Adds a line to `trajectory_builder_RUN.jsonl`, in `output_dir` or that of the run's configuration."""
        folder = Path(output_dir) if output_dir else (self.run_config or FinetuneConfig()).output_dir
        folder.mkdir(parents=True, exist_ok=True)
        known = {"timestamp": _now(), "run_id": run_id, "num_generations": self.num_generations}
        append_line(folder / f"trajectory_builder_{run_id}.jsonl", {**known, **metrics})


@register_trainer(config_type=ARTTrainerConfig)
async def art_trainer(config: ARTTrainerConfig, builder: Builder) -> AsyncIterator[ARTTrainer]:
    yield ARTTrainer(config, algorithm=await builder.get_algorithm())


@register_trajectory_builder(config_type=ARTTrajectoryBuilderConfig)
async def art_builder(config: ARTTrajectoryBuilderConfig, builder: Builder) -> AsyncIterator[ARTTrajectoryBuilder]:
    yield ARTTrajectoryBuilder(config, find_policy_entries(builder))
