"""The trajectory builder `_type: tree`: each branching point of an episode becomes one group of siblings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import Field

from reinforge.interfaces import Builder
from reinforge.registry import register_trajectory_builder
from reinforge.rollout.tree import BackUp, groups_from_tree
from reinforge.trainer.builders.group import GroupTrajectoryBuilder, GroupTrajectoryBuilderConfig, find_policy_entries
from reinforge.types.episode import EpisodeRecord
from reinforge.types.trajectory import Trajectory


class TreeTrajectoryBuilderConfig(GroupTrajectoryBuilderConfig, name="tree"):
    """For agents that sample several replies to the same prompt and continue from each."""

    num_generations: int = Field(default=1, ge=1, description="Trees per example.")
    back_up: BackUp = Field(
        default="none",
        description="none: a reply earns the reward marked on it; mean, max: plus that of its continuations.",
    )


class TreeTrajectoryBuilder(GroupTrajectoryBuilder):
    """Collects trees and returns one group per branching point."""

    siblings_setting = "workflow.width"
    groups_are_examples = False
    trajectory_builder_config: TreeTrajectoryBuilderConfig

    def num_siblings(self, workflow_config: Any) -> int:
        """Returns the agent's `width`: the siblings are the branches of a tree; 2 if the agent has no such setting."""
        return getattr(workflow_config, "width", 2)

    def _group_scored(self, scored: Sequence[tuple[EpisodeRecord, float]]) -> list[list[Trajectory]]:
        """Returns the siblings of each branching point, with the reward marked on each reply."""
        back_up = self.trajectory_builder_config.back_up
        return [
            siblings
            for record, _ in scored
            for siblings in groups_from_tree(record, self._targets(record), back_up, self.policies)
        ]


@register_trajectory_builder(config_type=TreeTrajectoryBuilderConfig)
async def tree_builder(config: TreeTrajectoryBuilderConfig, builder: Builder) -> AsyncIterator[TreeTrajectoryBuilder]:
    yield TreeTrajectoryBuilder(config, find_policy_entries(builder))
