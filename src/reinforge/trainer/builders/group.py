"""The trajectory builder `_type: group`: several episodes of each example become one group of siblings."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from pydantic import Field

from reinforge.config.schema import Config, FinetuneConfig, TrajectoryBuilderConfig
from reinforge.errors import EvaluationError, Problem, TrajectoryError
from reinforge.interfaces import Algorithm, Builder, TrajectoryBuilder
from reinforge.registry import register_trajectory_builder
from reinforge.rollout.episode import build_adapter_trajectories, extract_text, is_trained_call
from reinforge.rollout.models.policy_llm import find_adapters, find_served_entries
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem, EvaluationRunOutput
from reinforge.types.seeding import stable_random
from reinforge.types.steps import IntermediateStep, IntermediateStepCategory
from reinforge.types.trajectory import CollectionPlan, EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection


class GroupTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="group"):
    """How many episodes make a group, and how many groups make an epoch."""

    num_generations: int = Field(default=8, ge=1, description="Episodes per example: the siblings of a group.")
    examples_per_epoch: int | None = Field(
        default=None, ge=1, description="Training examples per epoch, shuffled on each pass; null: all."
    )
    drop_last: bool = Field(
        default=True,
        description="Leave out the examples of a pass that do not fill an epoch. False: the last epoch of a pass is "
        "smaller.",
    )


class GroupTrajectoryBuilder(TrajectoryBuilder):
    """Collects `num_generations` episodes of each example and returns all groups."""

    siblings_setting = "num_generations"
    groups_are_examples = True  # True: each example makes exactly one group, named by the example's id
    is_resumable = True
    requires_policy_llm = True
    collects_ahead = True
    trajectory_builder_config: GroupTrajectoryBuilderConfig

    def __init__(
        self,
        trajectory_builder_config: GroupTrajectoryBuilderConfig,
        policies: Sequence[str] | Mapping[str, str | None] = (),
    ):
        super().__init__(trajectory_builder_config)
        self.policies = dict(policies) if isinstance(policies, Mapping) else dict.fromkeys(policies)
        self.evaluation_runs: dict[
            str, asyncio.Task[list[EpisodeRecord]] | list[asyncio.Task[EvaluationRunOutput]]
        ] = {}

    @property
    def num_generations(self) -> int:
        return self.trajectory_builder_config.num_generations

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Starts the episodes of an epoch; outside a run, one `run_eval` per generation."""
        if run_id in self.evaluation_runs:
            message = f'run "{run_id}" is being collected already; finalize it first, or use another run_id'
            raise TrajectoryError(message)
        if self.evaluation is None:
            self.evaluation_runs[run_id] = [asyncio.create_task(self.run_eval()) for _ in range(self.num_generations)]
            return
        meta = meta or {}
        epoch, round_ = int(meta.get("epoch", 0)), int(meta.get("round", 0))
        plan = self.plan(epoch)
        assert plan is not None  # it is, in a run
        ids, count = meta.get("example_ids") or plan.example_ids, plan.episodes_per_example
        keys = [EpisodeKey("collect", epoch, str(id_), number, round_) for id_ in ids for number in range(count)]
        self.evaluation_runs[run_id] = asyncio.create_task(self.evaluation.collect(keys))

    def plan(self, epoch: int) -> CollectionPlan | None:
        """Returns the episodes of an epoch; None outside a run, where the examples are known to `run_eval` alone."""
        if self.evaluation is None:
            return None
        config = self.trajectory_builder_config
        number = epoch - self.first_epoch
        ids = select_epoch_examples(
            self.evaluation.example_ids("train"),
            config.examples_per_epoch,
            self.run_config.seed,
            number,
            drop_last=config.drop_last,
        )
        return CollectionPlan(tuple(ids), config.num_generations, max(1, len(set(self.policies.values()))))

    def further_examples(self, epoch: int, used: set[str], count: int) -> list[str]:
        if self.evaluation is None:
            return []
        spare = [id_ for id_ in self.evaluation.example_ids("train") if id_ not in used]
        rng = stable_random(self.run_config.seed, "refill", epoch, len(used))
        return rng.sample(spare, min(count, len(spare)))

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """Waits for the episodes and returns all groups; missing episodes are left out, never scored 0."""
        if run_id not in self.evaluation_runs:
            started = ", ".join(self.evaluation_runs) or "none"
            raise TrajectoryError(f'run "{run_id}" was not started; started and not finalized: {started}')
        meta, collected = meta or {}, self.evaluation_runs.pop(run_id)
        if isinstance(collected, list):
            self.records = None
            groups = await build_output_groups(self, await _gather(collected), run_id, meta)
        else:
            self.records = await collected
            groups = await self._build_groups(self.records, meta)
        return TrajectoryCollection(trajectories=groups, run_id=run_id, epoch=meta.get("epoch"))

    def validate(
        self, config: Config, algorithm: Algorithm, examples: Sequence[EvalInputItem], row_locations: Mapping[str, str]
    ) -> list[Problem]:
        problems, path = self._validate_target(config), "finetuning.curriculum_learning.collect_only_included"
        # the backend of a model that the adapter does not serve may form its own groups
        adapter = config.trainer_adapters.get(str(config.finetuning.trainer_adapter))
        is_served = any(llm.static_type == "policy" for llm in config.llms.values()) or (
            adapter is not None and bool(adapter.served_models)
        )
        compares = algorithm.needs_groups and (is_served or not config.llms)
        if compares and self.num_siblings(config.workflow) < 2:
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

    def _validate_target(self, config: Config) -> list[Problem]:
        target = config.finetuning.target_model
        if config.llms and not self.policies:
            message = f"not set, and nothing says which of {', '.join(config.llms)} the trainer adapter trains"
            fix = "set it to that entry of llms, and leave `train: false` out of that"
            return [Problem("finetuning.target_model", message, fix)]
        if target is None or target not in config.llms or target in self.policies:
            return []
        trained = ", ".join(self.policies) or "none"
        message = (
            f'"{target}" is not trained, since the trained entries of llms are those of `_type: policy`: {trained}'
        )
        return [Problem("finetuning.target_model", message, "name one of these, or leave target_model out")]

    def num_siblings(self, workflow_config: Any) -> int:
        return self.num_generations

    async def _build_groups(self, records: Sequence[EpisodeRecord], meta: dict[str, Any]) -> list[list[Trajectory]]:
        scored = [(record, reward) for record in records if (reward := reward_of_episode(record)) is not None]
        return self._group_scored(scored)

    def _group_scored(self, scored: Sequence[tuple[EpisodeRecord, float]]) -> list[list[Trajectory]]:
        return group_siblings(
            trajectory
            for record, reward in scored
            for trajectory in build_adapter_trajectories(record, reward, self._targets(record), self.policies)
        )

    def _targets(self, record: EpisodeRecord) -> list[bool]:
        config = self.run_config
        return [
            is_trained_call(call, config.target_model, config.target_functions, self.policies) for call in record.calls
        ]

    async def discard_run(self, run_id: str) -> None:
        await self._cancel([run_id])

    async def cleanup(self) -> None:
        await self._cancel(list(self.evaluation_runs))

    async def _cancel(self, run_ids: Sequence[str]) -> None:
        runs = [self.evaluation_runs.pop(run_id) for run_id in run_ids if run_id in self.evaluation_runs]
        tasks = [task for run in runs for task in (run if isinstance(run, list) else [run])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _gather(tasks: list[asyncio.Task[EvaluationRunOutput]]) -> list[EvaluationRunOutput]:
    """Returns the outputs of all tasks; if one fails, the others are cancelled before its error is raised."""
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def group_siblings(trajectories: Iterable[Trajectory]) -> list[list[Trajectory]]:
    groups: dict[str | None, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    return list(groups.values())


def reward_of_episode(record: EpisodeRecord) -> float | None:
    return None if record.outcome.is_missing else record.reward


def select_epoch_examples(
    ids: Sequence[str], count: int | None, seed: int, epoch: int, *, drop_last: bool = True
) -> list[str]:
    """Returns an epoch's slice of the shuffled example ids; each pass over the data is shuffled again.

    Args:
        drop_last: The remainder of a pass that is shorter than a whole slice is not used in that pass; False: it is the
            pass's last slice.
    """
    size = min(count or len(ids), len(ids))
    num_slices = len(ids) // size if drop_last else -(-len(ids) // size)
    number, stretch = divmod(epoch, num_slices)
    order = stable_random(seed, "examples", number).sample(list(ids), len(ids))
    return order[stretch * size : (stretch + 1) * size]


@register_trajectory_builder(config_type=GroupTrajectoryBuilderConfig)
async def group_builder(
    config: GroupTrajectoryBuilderConfig, builder: Builder
) -> AsyncIterator[GroupTrajectoryBuilder]:
    yield GroupTrajectoryBuilder(config, find_policy_entries(builder))


def find_policy_entries(builder: Builder) -> dict[str, str | None]:
    """Returns the entries of `llms` that are trained, with the adapter of each.

    These are those of `_type: policy`, and those that name the trained model as its backend serves it. Without any, the
    trainer adapter trains a model that it does not serve itself.
    """
    llms, named = builder.config.llms, find_adapters(builder.config.llms)
    policies = {entry: named.get(entry) for entry, llm in llms.items() if llm.static_type == "policy"}
    policies |= dict.fromkeys(find_served_entries(builder.config))
    policies = policies or dict.fromkeys(find_remote_entries(builder.config))
    return {entry: adapter for entry, adapter in policies.items() if llms[entry].train}


def find_remote_entries(config: Config) -> list[str]:
    """Returns the entries of `llms` that a backend without a policy server trains.

    These are the entry that `target_model` names, or else the one that the workflow calls, and others with its model.

    Example: llms {planner: {model_name: m}, critic: {model_name: m}, judge: {model_name: j}}, workflow.llm: planner ->
    ["planner", "critic"].
    """
    from reinforge.rollout.functions import find_named_llm  # for such a backend alone

    models = {entry: getattr(llm, "model_name", None) or entry for entry, llm in config.llms.items()}
    wanted = config.finetuning.target_model or find_named_llm(config.workflow, config.llms)
    if wanted is None:
        return list(models) if len(models) == 1 else []
    return [entry for entry, model in models.items() if wanted in (entry, model) or model == models.get(wanted)]


logger = logging.getLogger(__name__)

KEPT_KEYS = ("tool_calls", "tool_call_id", "function_call", "name")  # what an item's `metadata` keeps of its message

ROLES = frozenset(role.value for role in EpisodeItemRole)


async def build_output_groups(
    builder: TrajectoryBuilder, outputs: Sequence[EvaluationRunOutput], run_id: str, meta: dict[str, Any]
) -> list[list[Trajectory]]:
    """Returns the trajectories of each example from the outputs of `run_eval`, for a group builder outside a run.

    A run has the episodes themselves. Outside a run there are only outputs, steps and scores, also those of a
    `run_eval` that a user has overridden. Those without a score or without a trained turn are left out.
    """
    config, trajectories, left_out = builder.run_config, list[Trajectory](), Counter[str]()
    reward_function = config.reward_function if config is not None else builder.trajectory_builder_config.reward
    for generation, output in enumerate(outputs):
        scores = _find_scores(output, reward_function)
        for item in output.eval_input.eval_input_items:
            score = scores.get(item.id)
            episode = build_episode(_select_steps(item.trajectory, config))
            if not any(part.logprobs is not None for part in episode):
                left_out["without a reply with log-probs (of target_functions and target_model)"] += 1
                continue
            reward = await builder.compute_reward(score, meta) if score is not None else None
            if score is None or reward is None:
                left_out["without a score"] += 1
                continue
            metadata = {"id": item.id, "reasoning": score.reasoning, "run_id": run_id, "generation": generation}
            made = Trajectory(episode=episode, reward=reward, metadata=metadata, group_id=str(item.id))
            trajectories.append(made)
    if left_out:
        counts = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        logger.warning("%s: %d trajectories; left out: %s", run_id, len(trajectories), counts)
    return group_siblings(trajectories)


def build_episode(steps: Sequence[IntermediateStep]) -> list[EpisodeItem]:
    """Returns the messages of an episode; a reply without log-probs is context."""
    from reinforge.rollout.step_messages import parse_to_openai_messages  # outside a run alone

    episode = []
    for message in parse_to_openai_messages(steps):
        role, content = message["role"], message["content"]
        metadata = {key: message[key] for key in KEPT_KEYS if key in message}
        item = EpisodeItem(
            role=EpisodeItemRole(role) if role in ROLES else EpisodeItemRole.OTHER,
            content=extract_text(content),
            logprobs=message.get("logprobs"),
            metadata=metadata or None,
        )
        episode.append(item)
    return episode


def _find_scores(output: EvaluationRunOutput, reward: Any) -> dict[Any, EvalOutputItem]:
    for name, result in output.evaluation_results:
        if reward is None or name == reward.name:
            return {item.id: item for item in result.eval_output_items}
    names = ", ".join(name for name, _ in output.evaluation_results) or "none"
    raise EvaluationError(f'the evaluation has no scores of "{reward.name if reward else None}"; it has {names}')


def _select_steps(steps: Sequence[IntermediateStep], config: FinetuneConfig | None) -> list[IntermediateStep]:
    """Returns the steps of the target functions and, of model calls, those of the target model."""
    if config is None:
        return list(steps)
    return [
        step
        for step in steps
        if step.function_ancestry.function_name in config.target_functions
        and (
            config.target_model is None
            or step.event_category is not IntermediateStepCategory.LLM
            or step.name == config.target_model
        )
    ]
