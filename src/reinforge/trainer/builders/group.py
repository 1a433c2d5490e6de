"""The trajectory builder `_type: group`: several episodes of each example become one group of siblings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from reinforge.config.schema import TrajectoryBuilderConfig
from reinforge.errors import EvaluationError, Problem
from reinforge.interfaces import Algorithm, TrajectoryBuilder
from reinforge.registry import register_trajectory_builder
from reinforge.rollout.episode import is_target, trajectories_of
from reinforge.rollout.llms import adapters_of
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.seeding import stable_random
from reinforge.types.trajectory import Trajectory, TrajectoryCollection


class GroupTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="group"):
    """How many episodes make a group, and how many groups an epoch."""

    num_generations: int = Field(default=8, ge=1, description="Episodes of each example: the siblings of a group.")
    examples_per_epoch: int | None = Field(
        default=None, ge=1, description="Training examples of an epoch, in a fresh order each pass; null: all."
    )


class GroupTrajectoryBuilder(TrajectoryBuilder):
    """Collects `num_generations` episodes of each example and returns every group.

    Args:
        trajectory_builder_config: Its configuration.
        policies: Entries of `llms` that are trained, with the adapter that each names.

    Attributes:
        siblings_setting: What says how many siblings there are, for messages.
        groups_are_examples: Each example makes one group of its own name.
    """

    siblings_setting = "num_generations"
    groups_are_examples = True
    trajectory_builder_config: GroupTrajectoryBuilderConfig

    def __init__(
        self,
        trajectory_builder_config: GroupTrajectoryBuilderConfig,
        policies: Sequence[str] | Mapping[str, str | None] = (),
    ):
        super().__init__(trajectory_builder_config)
        self.policies = dict(policies) if isinstance(policies, Mapping) else dict.fromkeys(policies)
        self.evaluation_runs: dict[str, asyncio.Task[list[EpisodeRecord]]] = {}
        self.last_records: list[EpisodeRecord] = []

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Starts the episodes of an epoch; `meta` names the epoch, and for a refill the examples and the round."""
        if self.evaluation is None:
            raise EvaluationError("builder.evaluation is not set: a builder runs inside a run, or set it yourself")
        meta = meta or {}
        epoch, round_ = int(meta.get("epoch", 0)), int(meta.get("round", 0))
        ids = meta.get("example_ids") or self.examples_of(epoch)
        count = self.trajectory_builder_config.num_generations
        keys = [EpisodeKey("collect", epoch, str(id_), number, round_) for id_ in ids for number in range(count)]
        self.evaluation_runs[run_id] = asyncio.create_task(self.evaluation.collect(keys))

    @property
    def groups_per_example(self) -> int:
        """Most groups that the episodes of one example make: one for each adapter."""
        return max(1, len(set(self.policies.values())))

    def examples_of(self, epoch: int) -> list[str]:
        """Returns an epoch's example ids, each once."""
        assert self.evaluation is not None
        ids = self.evaluation.example_ids("train")
        return ids_of_epoch(ids, self.trajectory_builder_config.examples_per_epoch, self.run_config.seed, epoch)

    def further_examples(self, epoch: int, used: set[str], count: int) -> list[str]:
        """Returns up to `count` training examples that an epoch has not used yet, for a refill."""
        assert self.evaluation is not None
        spare = [id_ for id_ in self.evaluation.example_ids("train") if id_ not in used]
        rng = stable_random(self.run_config.seed, "refill", epoch, len(used))
        return rng.sample(spare, min(count, len(spare)))

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """Waits for the episodes and returns every group; missing episodes are counted, never scored 0."""
        try:
            records = await self.evaluation_runs[run_id]
        finally:
            self.evaluation_runs.pop(run_id, None)
        self.last_records = records
        groups = await self._grouped(records, meta or {})
        return TrajectoryCollection(trajectories=groups, run_id=run_id, epoch=(meta or {}).get("epoch"))

    def problems(self, algorithm: Algorithm, workflow_config: Any) -> list[Problem]:
        """Returns why an algorithm cannot learn from what is collected here; paths are below the builder's.

        Args:
            algorithm: The run's.
            workflow_config: The configuration of the agent that runs.
        """
        if not algorithm.needs_groups or self.num_siblings(workflow_config) > 1:
            return []
        message = "1 gives groups of one: there is nothing that a group-relative algorithm could compare"
        fix = "use at least 2 (8 is usual), or an algorithm that compares nothing, such as sft"
        return [Problem(self.siblings_setting, message, fix)]

    def num_siblings(self, workflow_config: Any) -> int:
        """Returns the most trajectories that are compared with each other."""
        return self.trajectory_builder_config.num_generations

    async def _grouped(self, records: Sequence[EpisodeRecord], meta: dict[str, Any]) -> list[list[Trajectory]]:
        rewards = [await self._reward(record, meta) for record in records]
        scored = [(record, reward) for record, reward in zip(records, rewards, strict=True) if reward is not None]
        return self._groups(scored)

    def _groups(self, scored: Sequence[tuple[EpisodeRecord, float]]) -> list[list[Trajectory]]:
        """Returns the siblings of each example and adapter, of episodes that are not missing with their rewards."""
        groups: dict[str, list[Trajectory]] = {}
        for record, reward in scored:
            for trajectory in trajectories_of(record, reward, self._targets(record), self.policies):
                groups.setdefault(str(trajectory.group_id), []).append(trajectory)
        return list(groups.values())

    async def _reward(self, record: EpisodeRecord, meta: dict[str, Any] | None) -> float | None:
        if record.outcome.is_missing or self.run_config.reward_function is None:
            return None
        return await self.compute_reward(record.scores[self.run_config.reward_function.name], meta)

    def _targets(self, record: EpisodeRecord) -> list[bool]:
        config = self.run_config
        return [is_target(call, config.target_model, config.target_functions, self.policies) for call in record.calls]

    async def cleanup(self) -> None:
        """Cancels what is still running."""
        for task in self.evaluation_runs.values():
            task.cancel()
        await asyncio.gather(*self.evaluation_runs.values(), return_exceptions=True)
        self.evaluation_runs.clear()


def ids_of_epoch(ids: Sequence[str], count: int | None, seed: int, epoch: int) -> list[str]:
    """Returns an epoch's share of example ids: stretches of a shuffled order, shuffled anew on each pass.

    What is left of a pass when less than a whole stretch remains is not used in that pass.

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
async def group_builder(config: GroupTrajectoryBuilderConfig, builder: Any) -> AsyncIterator[GroupTrajectoryBuilder]:
    """Yields the group builder."""
    yield GroupTrajectoryBuilder(config, policy_entries(builder))


def policy_entries(builder: Any) -> dict[str, str | None]:
    """Returns the entries of `llms` that are the policy being trained, with the adapter that each names."""
    llms, named = builder.config.llms, adapters_of(builder.config.llms)
    return {entry: named.get(entry) for entry, llm in llms.items() if llm.static_type == "policy"}
