"""Gives a run's builder its evaluation, and its trainer the builder and the adapter."""

from __future__ import annotations

from typing import Any

from reinforge.config.loaded_config import LoadedConfig
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.interfaces import GroupEvaluator
from reinforge.rollout.runner import EpisodeRunner
from reinforge.trainer.context import RunContext
from reinforge.trainer.setup.parts import Parts
from reinforge.types.evaluation import EvalOutputItem


async def bind_parts(loaded: LoadedConfig, parts: Parts, context: RunContext) -> EpisodeRunner:
    """Binds the parts of a run to each other and to its context; returns what runs the episodes."""
    config = parts.config
    runner = EpisodeRunner.from_config(loaded.config, parts.workflow, parts.llms)

    async def compute_reward(score: EvalOutputItem, meta: dict[str, Any]) -> float | None:
        """Returns the builder's reward of a score; a builder that drives its own collection calls it itself."""
        return await parts.trajectory_builder.compute_reward(score, {**meta, "trainer_run_id": context.run_id})

    parts.trajectory_builder.evaluation = DatasetEvaluation(
        runner,
        parts.splits,
        parts.evaluators,
        reward_metric=parts.reward_metric,
        outcomes=config.outcomes,
        compute_reward=compute_reward if parts.trajectory_builder.is_resumable else None,
        listener=context.record_episode,
        num_samples={"confirm": config.gate.num_samples},
        held_out_evaluators=parts.held_out_evaluators,
        recall=context.recall,
        load_episodes=context.load_episodes,
        note=context.progress.note,
    )
    context.is_relative = isinstance(parts.held_out_evaluators[parts.reward_metric], GroupEvaluator)
    runner.limit = context.limit_episodes
    parts.trainer.context = context  # type: ignore[attr-defined]  # a user's trainer may ignore it
    await parts.trainer.bind_components(parts.trajectory_builder, parts.adapter)
    return runner
