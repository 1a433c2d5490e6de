"""The loop and the builder under NeMo Agent Toolkit's names: `openpipe_art_trainer`, `openpipe_art_traj_builder`.

`ARTTrainer` is `EpochTrainer` itself, so a file written for NeMo Agent Toolkit runs on the same loop.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

from pydantic import Field

from reinforge.config.schema import TrainerConfig
from reinforge.interfaces import Builder
from reinforge.registry import register_trainer, register_trajectory_builder
from reinforge.runs.plot import can_draw_plots
from reinforge.trainer.builders.group import GroupTrajectoryBuilder, GroupTrajectoryBuilderConfig, find_policy_entries
from reinforge.trainer.loop import EpochTrainer

logger = logging.getLogger(__name__)

MATPLOTLIB_AVAILABLE = can_draw_plots()
"""True if `reward_plot.png` can be drawn."""

ARTTrainer = EpochTrainer
ARTTrajectoryBuilder = GroupTrajectoryBuilder


class ARTTrainerConfig(TrainerConfig, name="openpipe_art_trainer"):
    """The epoch loop; all of its settings are in `finetuning`."""


class ARTTrajectoryBuilderConfig(GroupTrajectoryBuilderConfig, name="openpipe_art_traj_builder"):
    """The group builder, with NeMo Agent Toolkit's default of two generations."""

    num_generations: int = Field(default=2, ge=1, description="Episodes per example: the siblings of a group.")


@register_trainer(config_type=ARTTrainerConfig)
async def art_trainer(config: ARTTrainerConfig, builder: Builder) -> AsyncIterator[EpochTrainer]:
    yield ARTTrainer(config, algorithm=await builder.get_algorithm())


@register_trajectory_builder(config_type=ARTTrajectoryBuilderConfig)
async def art_builder(config: ARTTrajectoryBuilderConfig, builder: Builder) -> AsyncIterator[GroupTrajectoryBuilder]:
    yield ARTTrajectoryBuilder(config, find_policy_entries(builder))
