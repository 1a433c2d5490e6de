"""Errors for collections that cannot train anything: what is wrong and what to do about it."""

from __future__ import annotations

from typing import Literal

from reinforge.algorithms.curriculum import Selection
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import EvaluationError
from reinforge.interfaces import TrajectoryBuilder
from reinforge.rollout.episode import WORKFLOW
from reinforge.types.trajectory import TrajectoryCollection, TrajectoryGroup

IDENTICAL_SHARE = 0.98
IDENTICAL_EPOCHS = 3
"""More than this share of groups with identical siblings, in this many epochs in a row, is an error."""


def refuse_untrainable(
    collection: TrajectoryCollection,
    builder: TrajectoryBuilder,
    config: FinetuneConfig,
    *,
    trains_on: Literal["tokens", "messages"] = "tokens",
) -> None:
    """Refuses a collection that holds nothing trainable.

    Args:
        collection: The epoch's collection.
        builder: The trajectory builder.
        config: The run's configuration.
        trains_on: What the trainer adapter needs of a turn.

    Raises:
        EvaluationError: No episode called the model, no turn has tokens, or no call is selected for training.
    """
    trajectories = [trajectory for group in collection.groups for trajectory in group.trajectories]
    if trains_on == "messages" and any(trajectory.pairs for trajectory in trajectories):
        return
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    if trajectories and not turns:
        raise EvaluationError(
            f"none of the {len(trajectories)} episodes called the model: the workflow must call "
            "llm.chat.completions.create(...) on the `llm` it is given"
        )
    if trains_on == "messages" and turns and all(not turn.is_recorded and turn.trained is None for turn in turns):
        raise EvaluationError(
            f"no assistant turn of the {len(trajectories)} trajectories is known to come from the policy, so nothing "
            "can be trained: the builder must put the completion's `id` into the item's metadata as `call_id`, or "
            "create the item with EpisodeItem(trained=True)"
        )
    if trains_on == "tokens" and turns and all(turn.tokens is None and turn.trained is not False for turn in turns):
        raise EvaluationError(
            f"no assistant turn of the {len(trajectories)} trajectories has token ids, so nothing can be trained: the "
            "builder must put the completion's `choices[0].logprobs` into EpisodeItem.logprobs unchanged, or the "
            "completion's `id` into the item's metadata as `call_id`"
        )
    if trajectories and not any(trajectory.is_trainable for trajectory in trajectories):
        records = builder.records or []
        calls = [call for record in records for call in record.calls]
        seen = sorted({name for call in calls for name in call.functions or (WORKFLOW,)})
        raise EvaluationError(
            f"no model call of the {len(trajectories)} episodes is selected for training: finetuning.target_functions "
            f"is {config.target_functions} and target_model {config.target_model!r}, but the calls came from the "
            f"functions {seen} and the llms {sorted({call.llm for call in calls})}"
        )


def refuse_identical(collection: TrajectoryCollection, *, epoch: int, epochs_before: int, temperature: float) -> int:
    """Refuses a collection whose siblings are identical: comparing them trains nothing.

    Args:
        collection: The epoch's collection.
        epoch: From 0.
        epochs_before: Epochs in a row, up to the previous one, in which nearly all groups had identical siblings.
        temperature: The sampling temperature, for the message.

    Returns:
        The epochs in a row, including this one.

    Raises:
        EvaluationError: All groups of the first epoch, or nearly all in several epochs in a row.
    """
    several = [group for group in collection.groups if len(group.trajectories) > 1]
    groups = [group for group in several if not any(trajectory.pairs for trajectory in group.trajectories)]
    if not groups:
        return epochs_before
    share = sum(map(_has_identical_siblings, groups)) / len(groups)
    epochs = epochs_before + 1 if share > IDENTICAL_SHARE else 0
    if (share == 1.0 and epoch == 0) or epochs >= IDENTICAL_EPOCHS:
        raise EvaluationError(
            f"{share:.0%} of the groups have identical siblings, so their rewards carry no signal; the cause may be "
            f"temperature 0 (finetuning.sampling.temperature is {temperature:g}), a response cache in the agent, or a "
            "model whose answers no longer vary"
        )
    return epochs


def explain_empty_selection(selection: Selection) -> str:
    """Returns why a selection is empty, with counts."""
    if selection.skip_reason is not None:
        return selection.skip_reason
    return (
        f"{len(selection.zero_variance)} groups have equal rewards, {len(selection.low_spread)} differ by less "
        f"than curriculum_learning.min_reward_diff, {len(selection.untrainable)} have no trained tokens"
        + (f", {len(selection.unused)} are not used by the algorithm" if selection.unused else "")
    )


def _has_identical_siblings(group: TrajectoryGroup) -> bool:
    """Returns True if every sibling sampled the same tokens in every turn."""
    replies = {
        tuple(turn.tokens.token_ids if turn.tokens else turn.content for turn in t.turns) for t in group.trajectories
    }
    return len(replies) == 1
