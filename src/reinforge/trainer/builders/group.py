"""The trajectory builder `_type: group`: several episodes of each example become one group of siblings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from reinforge.config.schema import Config, TrajectoryBuilderConfig
from reinforge.errors import EvaluationError, Problem
from reinforge.interfaces import Algorithm, Builder, TrajectoryBuilder
from reinforge.registry import register_trajectory_builder
from reinforge.rollout.episode import build_adapter_trajectories, is_trained_call
from reinforge.rollout.llms import find_adapters
from reinforge.types.collection import CollectionPlan
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.seeding import stable_random
from reinforge.types.trajectory import Trajectory, TrajectoryCollection


class GroupTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="group"):
    """How many episodes make a group, and how many groups make an epoch."""

    num_generations: int = Field(default=8, ge=1, description="Episodes per example: the siblings of a group.")
    examples_per_epoch: int | None = Field(
        default=None, ge=1, description="Training examples per epoch, shuffled on each pass; null: all."
    )


class GroupTrajectoryBuilder(TrajectoryBuilder):
    """Collects `num_generations` episodes of each example and returns all groups.

    Args:
        trajectory_builder_config: Its configuration.
        policies: Entries of `llms` that are trained, with the adapter of each.

    Attributes:
        siblings_setting: The setting that says how many siblings there are, for messages.
        groups_are_examples: True: each example makes exactly one group, named by the example's id.
    """

    siblings_setting = "num_generations"
    groups_are_examples = True
    is_resumable = True
    requires_policy_llm = True
    trajectory_builder_config: GroupTrajectoryBuilderConfig

    def __init__(
        self,
        trajectory_builder_config: GroupTrajectoryBuilderConfig,
        policies: Sequence[str] | Mapping[str, str | None] = (),
    ):
        super().__init__(trajectory_builder_config)
        self.policies = dict(policies) if isinstance(policies, Mapping) else dict.fromkeys(policies)
        self.evaluation_runs: dict[str, asyncio.Task[list[EpisodeRecord]]] = {}

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Starts the episodes of an epoch; `meta` names the epoch, and for a refill the examples and the round."""
        if self.evaluation is None:
            raise EvaluationError(
                "builder.evaluation is not set; a run sets it, but outside a run you have to set it yourself"
            )
        meta = meta or {}
        epoch, round_ = int(meta.get("epoch", 0)), int(meta.get("round", 0))
        plan = self.plan(epoch)
        ids, count = meta.get("example_ids") or plan.example_ids, plan.episodes_per_example
        keys = [EpisodeKey("collect", epoch, str(id_), number, round_) for id_ in ids for number in range(count)]
        self.evaluation_runs[run_id] = asyncio.create_task(self.evaluation.collect(keys))

    def plan(self, epoch: int) -> CollectionPlan:
        """Returns the episodes of an epoch."""
        assert self.evaluation is not None
        config = self.trajectory_builder_config
        ids = select_epoch_examples(
            self.evaluation.example_ids("train"), config.examples_per_epoch, self.run_config.seed, epoch
        )
        return CollectionPlan(tuple(ids), config.num_generations, max(1, len(set(self.policies.values()))))

    def further_examples(self, epoch: int, used: set[str], count: int) -> list[str]:
        """Returns up to `count` training examples that the epoch has not used yet, for a refill."""
        assert self.evaluation is not None
        spare = [id_ for id_ in self.evaluation.example_ids("train") if id_ not in used]
        rng = stable_random(self.run_config.seed, "refill", epoch, len(used))
        return rng.sample(spare, min(count, len(spare)))

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """Waits for the episodes and returns all groups; missing episodes are left out, never scored 0."""
        try:
            records = await self.evaluation_runs[run_id]
        finally:
            self.evaluation_runs.pop(run_id, None)
        self.records = records
        groups = await self._build_groups(records, meta or {})
        return TrajectoryCollection(trajectories=groups, run_id=run_id, epoch=(meta or {}).get("epoch"))

    def validate(
        self, config: Config, algorithm: Algorithm, examples: Sequence[EvalInputItem], row_locations: Mapping[str, str]
    ) -> list[Problem]:
        """Returns why the algorithm or the curriculum cannot use the groups that this builder makes."""
        problems, path = list[Problem](), "finetuning.curriculum_learning.collect_only_included"
        if algorithm.needs_groups and self.num_siblings(config.workflow) < 2:
            message = "with 1, each group has one episode, so a group-relative algorithm has nothing to compare"
            fix = "use at least 2 (8 is usual), or an algorithm without groups, such as sft"
            problems.append(Problem(self.siblings_setting, message, fix))
        if config.finetuning.curriculum_learning.collect_only_included:
            names = [name or "the policy" for name in dict.fromkeys(self.policies.values())]
            if not self.groups_are_examples:
                message = "this builder makes several groups per example, and the curriculum may include only some"
                problems.append(Problem(path, message, "set it to false"))
            elif len(names) > 1:
                message = f"each example has a group per adapter ({', '.join(names)}), and the curriculum may include "
                problems.append(Problem(path, f"{message}only some of them", "set it to false"))
        return problems

    def num_siblings(self, workflow_config: Any) -> int:
        """Returns the maximum number of trajectories that are compared with each other."""
        return self.trajectory_builder_config.num_generations

    async def _build_groups(self, records: Sequence[EpisodeRecord], meta: dict[str, Any]) -> list[list[Trajectory]]:
        scored = [(record, reward) for record in records if (reward := reward_of_episode(record)) is not None]
        return self._group_scored(scored)

    def _group_scored(self, scored: Sequence[tuple[EpisodeRecord, float]]) -> list[list[Trajectory]]:
        """Returns the siblings of each example and adapter."""
        groups: dict[str, list[Trajectory]] = {}
        for record, reward in scored:
            for trajectory in build_adapter_trajectories(record, reward, self._targets(record), self.policies):
                groups.setdefault(str(trajectory.group_id), []).append(trajectory)
        return list(groups.values())

    def _targets(self, record: EpisodeRecord) -> list[bool]:
        config = self.run_config
        return [
            is_trained_call(call, config.target_model, config.target_functions, self.policies) for call in record.calls
        ]

    async def cleanup(self) -> None:
        """Cancels the collections that are still running."""
        for task in self.evaluation_runs.values():
            task.cancel()
        await asyncio.gather(*self.evaluation_runs.values(), return_exceptions=True)
        self.evaluation_runs.clear()


def reward_of_episode(record: EpisodeRecord) -> float | None:
    """Returns the reward that the journal keeps of an episode; None where the episode is missing."""
    return None if record.outcome.is_missing else record.reward


def select_epoch_examples(ids: Sequence[str], count: int | None, seed: int, epoch: int) -> list[str]:
    """Returns an epoch's slice of the shuffled example ids; each pass over the data is shuffled again.

    The remainder of a pass that is shorter than a whole slice is not used in that pass.

    Args:
        ids: All of them.
        count: How many an epoch uses; None: all.
        seed: The run's.
        epoch: From 0.
    """
    size = min(count or len(ids), len(ids))
    number, stretch = divmod(epoch, len(ids) // size)
    order = stable_random(seed, "examples", number).sample(list(ids), len(ids))
    return order[stretch * size : (stretch + 1) * size]


@register_trajectory_builder(config_type=GroupTrajectoryBuilderConfig)
async def group_builder(
    config: GroupTrajectoryBuilderConfig, builder: Builder
) -> AsyncIterator[GroupTrajectoryBuilder]:
    """Yields the group builder."""
    yield GroupTrajectoryBuilder(config, find_policy_entries(builder))


def find_policy_entries(builder: Builder) -> dict[str, str | None]:
    """Returns the entries of `llms` that are the trained policy, with the adapter of each."""
    llms, named = builder.config.llms, find_adapters(builder.config.llms)
    return {entry: named.get(entry) for entry, llm in llms.items() if llm.static_type == "policy"}
