"""The trajectory builder `_type: agents`: each trained agent of a protocol gets its own view of every episode.

What an agent said is `assistant`, what it heard is `user`, and its reward is its own. Siblings are the views of one
agent on one example, or of one agent at one point of a tree.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from reinforge.errors import EvaluationError
from reinforge.registry import register_trajectory_builder
from reinforge.rollout.episode import trajectory_of
from reinforge.rollout.tree import groups_from_tree
from reinforge.trainer.builder import GroupTrajectoryBuilder, GroupTrajectoryBuilderConfig, policy_entries
from reinforge.types.episode import EpisodeRecord
from reinforge.types.trajectory import Trajectory


class AgentsTrajectoryBuilderConfig(GroupTrajectoryBuilderConfig, name="agents"):
    """For workflows that are protocols: flat dialogues, or trees where the protocol's num_responses is above 1."""


class AgentsTrajectoryBuilder(GroupTrajectoryBuilder):
    """Collects dialogues and returns groups of each trained agent's views."""

    trajectory_builder_config: AgentsTrajectoryBuilderConfig

    def _groups(self, scored: Sequence[tuple[EpisodeRecord, float]]) -> list[list[Trajectory]]:
        """Returns the siblings of each agent and example, or of each agent and point of a tree."""
        groups: dict[str, list[Trajectory]] = {}
        for record, _ in scored:
            output = output_of(record)
            targets = dict(zip((call.call_id for call in record.calls), self._targets(record), strict=True))
            for name, agent in output["agents"].items():
                if not agent["trained"]:
                    continue
                view = view_of(record, output, name)
                trained = [targets[call.call_id] for call in view.calls]
                for siblings in _siblings(view, output, name, trained):
                    for trajectory in siblings:
                        trajectory.agent, trajectory.model_group = name, agent["model_group"]
                        trajectory.group_id = f"{trajectory.group_id}/{name}"
                        groups.setdefault(trajectory.group_id, []).append(trajectory)
        return list(groups.values())


def output_of(record: EpisodeRecord) -> dict[str, Any]:
    """Returns what a protocol's episode left.

    Raises:
        EvaluationError: The workflow is no protocol.
    """
    output = record.item.output_obj
    if not isinstance(output, dict) or "branches" not in output:
        raise EvaluationError(
            "the trajectory builder `agents` needs a workflow that is a protocol (docs/multiagent.md)"
        )
    return output


def view_of(record: EpisodeRecord, output: dict[str, Any], agent: str) -> EpisodeRecord:
    """Returns an episode with the valid replies of one agent alone, in the order in which it spoke."""
    own = [message["call_id"] for message in output["messages"] if message["agent"] == agent]
    calls = {call.call_id: call for call in record.calls}
    marks = [mark for mark in record.marks if mark.call_id in own]
    return replace(record, calls=[calls[call_id] for call_id in own], marks=marks)


def _siblings(
    view: EpisodeRecord, output: dict[str, Any], agent: str, trained: Sequence[bool]
) -> list[list[Trajectory]]:
    """Returns an agent's trajectories of one episode: one, or the groups of its tree; none where nothing is known."""
    if len(output["branches"]) > 1:
        known = {mark.call_id for mark in view.marks}  # what nobody can tell the worth of is not worth 0
        return groups_from_tree(
            view, [t and call.call_id in known for t, call in zip(trained, view.calls, strict=True)]
        )
    reward = output["branches"][0]["rewards"].get(agent)
    if reward is None or not view.calls:
        return []
    return [[trajectory_of(view, reward, trained)]]


@register_trajectory_builder(config_type=AgentsTrajectoryBuilderConfig)
async def agents_builder(config: AgentsTrajectoryBuilderConfig, builder: Any) -> AsyncIterator[AgentsTrajectoryBuilder]:
    """Yields the builder."""
    yield AgentsTrajectoryBuilder(config, policy_entries(builder))
