"""Groups of trajectories from the outputs of `run_eval`, for a group builder outside a run.

A run has the episodes themselves. Outside a run there are only outputs, steps and scores, also those of a `run_eval`
that a user has overridden.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from reinforge.config.schema import FinetuneConfig
from reinforge.errors import EvaluationError
from reinforge.interfaces import TrajectoryBuilder
from reinforge.rollout.episode import extract_text
from reinforge.rollout.step_messages import parse_to_openai_messages
from reinforge.types.evaluation import EvalOutputItem, EvaluationRunOutput
from reinforge.types.steps import IntermediateStep, IntermediateStepCategory
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory

logger = logging.getLogger(__name__)

KEPT_KEYS = ("tool_calls", "tool_call_id", "function_call", "name")
"""What an item's `metadata` keeps of its message."""

ROLES = frozenset(role.value for role in EpisodeItemRole)


async def build_output_groups(
    builder: TrajectoryBuilder, outputs: Sequence[EvaluationRunOutput], run_id: str, meta: dict[str, Any]
) -> list[list[Trajectory]]:
    """Returns the trajectories of each example; those without a score or without a trained turn are left out."""
    config, groups = builder.run_config, dict[Any, list[Trajectory]]()
    left_out: Counter[str] = Counter()
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
            trajectory = Trajectory(episode=episode, reward=reward, metadata=metadata, group_id=str(item.id))
            groups.setdefault(item.id, []).append(trajectory)
    if left_out:
        counts = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        logger.warning("%s: %d trajectories; left out: %s", run_id, sum(map(len, groups.values())), counts)
    return list(groups.values())


def build_episode(steps: Sequence[IntermediateStep]) -> list[EpisodeItem]:
    """Returns the messages of an episode; a reply without log-probs is context."""
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
