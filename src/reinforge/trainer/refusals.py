"""When a collection cannot teach anything: what is wrong, in words that say what to do about it."""

from __future__ import annotations

from typing import Literal

from reinforge.algorithms.curriculum import Selection
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import EvaluationError
from reinforge.interfaces import TrajectoryBuilder
from reinforge.rollout.episode import WORKFLOW
from reinforge.trainer.builders.group import GroupTrajectoryBuilder
from reinforge.types.trajectory import TrajectoryCollection, TrajectoryGroup

IDENTICAL_SHARE = 0.98
IDENTICAL_EPOCHS = 3
"""More than this share of groups with word-for-word equal siblings, in this many epochs in a row, is an error."""


def refuse_untrainable(
    collection: TrajectoryCollection,
    builder: TrajectoryBuilder,
    config: FinetuneConfig,
    *,
    trains_on: Literal["tokens", "messages"] = "tokens",
) -> None:
    """Stops where a collection holds nothing that could ever be trained.

    Args:
        collection: What an epoch collected.
        builder: What collected it.
        config: The run's.
        trains_on: What the adapter needs of a turn.

    Raises:
        EvaluationError: No episode called the model, no turn has its tokens, or no call is one that is trained.
    """
    trajectories = [trajectory for group in collection.groups for trajectory in group.trajectories]
    if trains_on == "messages" and any(trajectory.pairs for trajectory in trajectories):
        return
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    if trajectories and not turns:
        raise EvaluationError(
            f"none of {len(trajectories)} episodes called the model: the workflow must call "
            "llm.chat.completions.create(...) with the handle it is given"
        )
    if trains_on == "messages" and turns and all(not turn.is_known and turn.trained is None for turn in turns):
        raise EvaluationError(
            f"of no assistant turn of {len(trajectories)} trajectories it is known that the policy said it, so nothing "
            "is trained: a builder puts the completion's `id` into the item's metadata as `call_id`, or says "
            "EpisodeItem(trained=True)"
        )
    if trains_on == "tokens" and turns and all(turn.tokens is None and turn.trained is not False for turn in turns):
        raise EvaluationError(
            f"no assistant turn of {len(trajectories)} trajectories has its token ids, so nothing can be trained: "
            "a builder puts the completion's `choices[0].logprobs` into EpisodeItem.logprobs as it is, or the "
            "completion's `id` into the item's metadata as `call_id`"
        )
    if trajectories and not any(trajectory.is_trainable for trajectory in trajectories):
        records = builder.last_records if isinstance(builder, GroupTrajectoryBuilder) else []
        calls = [call for record in records for call in record.calls]
        seen = sorted({name for call in calls for name in call.functions or (WORKFLOW,)})
        raise EvaluationError(
            f"no model call of {len(trajectories)} episodes is trained: finetuning.target_functions "
            f"{config.target_functions} and target_model {config.target_model!r} match none; "
            f"calls came from the functions {seen} and the llms {sorted({call.llm for call in calls})}"
        )


def refuse_identical(collection: TrajectoryCollection, *, epoch: int, epochs_before: int, temperature: float) -> int:
    """Stops where siblings are word for word the same: nothing can be learnt from comparing them.

    Args:
        collection: What an epoch collected.
        epoch: From 0.
        epochs_before: Epochs in a row, up to the last one, in which nearly all groups were so.
        temperature: What the run draws with, for the message.

    Returns:
        The epochs in a row, this one included.

    Raises:
        EvaluationError: In the first epoch all groups are so, or nearly all are in too many epochs in a row.
    """
    several = [group for group in collection.groups if len(group.trajectories) > 1]
    groups = [group for group in several if not any(trajectory.pairs for trajectory in group.trajectories)]
    if not groups:
        return epochs_before
    share = sum(map(_all_equal, groups)) / len(groups)
    epochs = epochs_before + 1 if share > IDENTICAL_SHARE else 0
    if (share == 1.0 and epoch == 0) or epochs >= IDENTICAL_EPOCHS:
        raise EvaluationError(
            f"the siblings of {share:.0%} of the groups are word for word the same, so their rewards teach "
            f"nothing: finetuning.sampling.temperature is {temperature:g}; a cache in the "
            "agent, a model that has become certain, or temperature 0 does this"
        )
    return epochs


def why_empty(selection: Selection) -> str:
    """Returns why a selection has no group left, with counts."""
    if selection.too_little is not None:
        return selection.too_little
    return (
        f"{len(selection.zero_variance)} groups have equal rewards, {len(selection.low_spread)} differ by less "
        f"than curriculum_learning.min_reward_diff, {len(selection.untrainable)} have no trained tokens"
        + (f", of {len(selection.not_taken)} the algorithm takes nothing" if selection.not_taken else "")
    )


def _all_equal(group: TrajectoryGroup) -> bool:
    """True if every sibling sampled the same tokens in every turn."""
    said = {
        tuple(turn.tokens.token_ids if turn.tokens else turn.content for turn in t.turns) for t in group.trajectories
    }
    return len(said) == 1
