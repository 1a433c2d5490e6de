"""The reference's names for our loop and our builder: `openpipe_art_trainer` and `openpipe_art_traj_builder`.

`ARTTrainer` is `EpochTrainer` itself, so a file of the reference runs on the same loop as ours.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from reinforge.config.schema import TrainerConfig
from reinforge.registry import register_trainer, register_trajectory_builder
from reinforge.trainer.builders.group import GroupTrajectoryBuilder, GroupTrajectoryBuilderConfig, policy_entries
from reinforge.trainer.loop import EpochTrainer

logger = logging.getLogger(__name__)

MATPLOTLIB_AVAILABLE = importlib.util.find_spec("matplotlib") is not None
"""True if `reward_plot.png` can be drawn."""

ARTTrainer = EpochTrainer
ARTTrajectoryBuilder = GroupTrajectoryBuilder


class ARTTrainerConfig(TrainerConfig, name="openpipe_art_trainer"):
    """The loop under the reference's name; everything it needs stands in `finetuning`."""


class ARTTrajectoryBuilderConfig(GroupTrajectoryBuilderConfig, name="openpipe_art_traj_builder"):
    """The group builder under the reference's name, with the reference's default."""

    num_generations: int = Field(default=2, ge=1, description="Episodes of each example: the siblings of a group.")


@register_trainer(config_type=ARTTrainerConfig)
async def art_trainer(config: ARTTrainerConfig, builder: Any) -> AsyncIterator[EpochTrainer]:
    """Yields the loop."""
    algorithm = await builder.get_algorithm()
    told = {"teaches": algorithm.teaches, "too_little": algorithm.too_little}
    yield ARTTrainer(config, compares=algorithm.needs_groups, **told)


@register_trajectory_builder(config_type=ARTTrajectoryBuilderConfig)
async def art_builder(config: ARTTrajectoryBuilderConfig, builder: Any) -> AsyncIterator[GroupTrajectoryBuilder]:
    """Yields the group builder."""
    yield ARTTrajectoryBuilder(config, policy_entries(builder))
