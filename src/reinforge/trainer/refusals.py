"""Errors for collections that cannot train anything and for validations without scores: what is wrong, what to do."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Literal, TypeVar

from reinforge.algorithms.curriculum import Selection
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import EvaluationError, JobFailed, ReinforgeError
from reinforge.evaluation.run import choose_error_type, describe_too_many
from reinforge.interfaces import TrainerAdapter, TrajectoryBuilder
from reinforge.rollout.episode import WORKFLOW
from reinforge.runs.rows import BASELINE, ValidationRow
from reinforge.types.job import TrainingJobStatus
from reinforge.types.trajectory import Outcome, TrajectoryGroup

IDENTICAL_SHARE = 0.98
IDENTICAL_EPOCHS = 3
"""More than this share of groups with identical siblings, in this many epochs in a row, is an error."""


Error = TypeVar("Error", bound=ReinforgeError)


def _forbid_resume(error: Error) -> Error:
    error.can_resume = False  # the same agent and settings would collect the same again
    return error


def _exhaust(error: Error) -> Error:
    error.is_exhausted = True
    return _forbid_resume(error)


def _build_refusal(message: str) -> EvaluationError:
    return _forbid_resume(EvaluationError(message))


async def refuse_unhealthy(adapter: TrainerAdapter) -> None:
    if not await adapter.is_healthy():
        raise JobFailed(f"{type(adapter).__name__} is not healthy, so training did not start")


def build_empty_epochs_error(num_epochs: int, setting: str, reasons: str, found: str | None, episode: str) -> JobFailed:
    """Returns the error to raise after epochs in a row without anything to train on.

    Args:
        setting: Of `finetuning.limits`, what makes it an error.
        found: What all its episodes have in common; None: nothing.
    """
    count = "1 epoch" if num_epochs == 1 else f"{num_epochs} epochs in a row"
    head = f"{count} had nothing to train on (limits.{setting}); in the last one"
    why = found or (
        "The task may be too hard or too easy for this model, or the reward may not distinguish its answers: use "
        "easier or harder examples, a finer reward, or a larger num_generations"
    )
    sentence = f"{why[0].upper()}{why[1:]}" + ("" if why.endswith("?") else ".")
    return _exhaust(JobFailed(f"{head}, {reasons}. {sentence} Look at an episode with `{episode}`"))


def build_no_job_error(trainer: str, num_collections: int, num_epochs: int) -> JobFailed:
    """Returns the error to raise after a run in which a user's trainer submitted no job."""
    text = (
        f"nothing was trained: {trainer} collected {num_collections} times and submitted no job in {num_epochs} "
        f"epoch{'s' * (num_epochs != 1)} (limits.allow_no_training: true accepts that). Its run() must call "
        "self.trainer_adapter.submit(...) with the groups to train on, and return the status of each job"
    )
    return _forbid_resume(JobFailed(text))


def refuse_untrained(statuses: Sequence[TrainingJobStatus]) -> None:
    """Refuses jobs that say that they have made no optimizer step."""
    if statuses and all(status.num_updates == 0 for status in statuses):
        message = "nothing was trained: no job made an optimizer step (limits.allow_no_training accepts that)"
        raise _forbid_resume(JobFailed(message))


def find_episode_command(selection: Selection, run: str, epoch: int) -> str:
    """Returns the command that shows one of an epoch's episodes: of a group with equal rewards, if there is one."""
    dropped = [*selection.zero_variance, *selection.low_spread, *selection.unused]
    ids = [each.episode_id or "" for group in dropped for each in group.trajectories]
    keys = [id_ for id_ in ids if id_.startswith("collect/")]  # others are not in the journal
    which = f"--episode {shlex.quote(keys[0])}" if keys else f"--episode 0 --phase collect --epoch {epoch}"
    return f"reinforge runs show {shlex.quote(run)} {which}"


def refuse_untrainable(
    groups: Sequence[TrajectoryGroup],
    builder: TrajectoryBuilder,
    config: FinetuneConfig,
    *,
    trains_on: Literal["tokens", "messages"] = "tokens",
) -> None:
    """Refuses collected groups that hold nothing trainable."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if trains_on == "messages" and any(trajectory.pairs for trajectory in trajectories):
        return
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    if trajectories and not turns:
        _refuse_long_prompts(builder, config)
        raise _build_refusal(
            f"none of the {len(trajectories)} episodes called the model: the workflow must call "
            "llm.chat.completions.create(...) on the `llm` it is given; a program or a service must send its calls to "
            "the base URL it is given (OPENAI_BASE_URL)"
        )
    if trains_on == "messages" and turns and all(not turn.is_recorded and turn.trained is None for turn in turns):
        raise _build_refusal(
            f"no assistant turn of the {len(trajectories)} trajectories is known to come from the policy, so nothing "
            "can be trained: the builder must put the completion's `id` into the item's metadata as `call_id`, or "
            "create the item with EpisodeItem(trained=True)"
        )
    if trains_on == "tokens" and turns and all(turn.tokens is None and turn.trained is not False for turn in turns):
        raise _build_refusal(
            f"no assistant turn of the {len(trajectories)} trajectories has token ids, so nothing can be trained: the "
            "builder must put the completion's `choices[0].logprobs` into EpisodeItem.logprobs unchanged, or the "
            "completion's `id` into the item's metadata as `call_id`"
        )
    if trajectories and not any(trajectory.is_trainable for trajectory in trajectories):
        head = f"no model call of the {len(trajectories)} episodes is selected for training"
        raise _build_refusal(f"{head}: {_explain_unselected(builder, config)}")


def _explain_unselected(builder: TrajectoryBuilder, config: FinetuneConfig) -> str:
    """Returns the first setting that excludes every model call."""
    calls = [call for record in builder.records or [] for call in record.calls]
    trained = list(getattr(builder, "policies", ()))
    entries = sorted({call.llm for call in calls})
    if calls and trained and not set(trained) & set(entries):
        return f"the trained entries of llms are {trained}, but the agent called {entries}"
    if config.target_model is not None and all(config.target_model not in (call.llm, call.model) for call in calls):
        return f"finetuning.target_model is {config.target_model!r}, but the agent called {entries}"
    called = sorted({name for call in calls for name in call.functions or (WORKFLOW,)})
    if calls and WORKFLOW not in config.target_functions and not set(called) & set(config.target_functions):
        return f"finetuning.target_functions is {config.target_functions}, but the calls came from {called}"
    return "the builder marked every assistant turn as not trained (EpisodeItem.trained is False)"


def _refuse_long_prompts(builder: TrajectoryBuilder, config: FinetuneConfig) -> None:
    """Refuses a collection without any reply, if the reason is that the prompts do not fit the context."""
    records = [record for record in builder.records or [] if not record.outcome.is_missing]
    overflows = ((each, each.overflow or each.reason) for each in records if not each.calls)
    too_long = [(each, why) for each, why in overflows if each.overflow or each.outcome is Outcome.CONTEXT_OVERFLOW]
    if not too_long:
        return
    wanted = config.policy.max_model_len
    fix = (
        "shorten the prompts, or use a model with a longer context"
        if wanted is None
        else f"raise finetuning.policy.max_model_len, which is {wanted}, or shorten the prompts"
    )
    raise _build_refusal(
        f"no episode has a reply, because the prompt is too long in {len(too_long)} of {len(records)}: in example "
        f'"{too_long[0][0].key.example_id}", {too_long[0][1]}; {fix}'
    )


def refuse_unscored(row: ValidationRow, allowed: float) -> None:
    """Refuses a validation that lacks too many scores to choose a checkpoint by."""
    what = "the baseline" if row.epoch == BASELINE else f"the validation after epoch {row.epoch}"
    unscored, scored = row.num_unscored or 0, row.num_examples or 0
    if row.avg_reward is None and row.epoch == BASELINE:
        error = choose_error_type(row.outcomes)(f"{what} could not be scored: {row.error}")
        raise _forbid_resume(error) if set(row.outcomes) == {Outcome.REWARD_ERROR.value} else error
    if unscored > allowed * (unscored + scored):
        counts = f"{unscored} of {unscored + scored} examples"
        raise choose_error_type(row.outcomes)(describe_too_many(what, counts, allowed, row.unscored_reason or ""))


def refuse_identical(
    groups: Sequence[TrajectoryGroup], *, epoch: int, epochs_before: int, temperature: float | None
) -> int:
    """Refuses groups whose siblings are identical: comparing them trains nothing.

    Args:
        epochs_before: Epochs in a row, up to the previous one, in which nearly all groups had identical siblings.

    Returns:
        The epochs in a row, including this one.
    """
    several = [group for group in groups if len(group.trajectories) > 1]
    groups = [group for group in several if not any(trajectory.pairs for trajectory in group.trajectories)]
    if not groups:
        return epochs_before
    share = sum(map(_has_identical_siblings, groups)) / len(groups)
    epochs = epochs_before + 1 if share > IDENTICAL_SHARE else 0
    if (share == 1.0 and epoch == 0) or epochs >= IDENTICAL_EPOCHS:
        setting = f"finetuning.sampling.temperature is {temperature:g}" if temperature is not None else ""
        setting = setting or "that of the agent or its endpoint: finetuning.sampling has no effect on a remote model"
        cause = f"temperature 0 ({setting}), a response cache in the agent, or a model whose answers no longer vary"
        if epoch and temperature:
            cause = f"a model whose answers do not vary at temperature {temperature:g}, or the agent's response cache"
        message = f"{share:.0%} of the groups have identical siblings, so their rewards carry no signal"
        raise _exhaust(EvaluationError(f"{message}; the cause may be {cause}"))
    return epochs


def explain_empty_selection(selection: Selection) -> str:
    if selection.skip_reason is not None:
        return selection.skip_reason
    counts = {
        "have equal rewards": selection.zero_variance,
        "have rewards that differ by less than finetuning.curriculum_learning.min_reward_diff": selection.low_spread,
        "have no trained tokens": selection.untrainable,
        "are not used by the algorithm": selection.unused,
    }
    parts = [f"{len(groups)} groups {what}" for what, groups in counts.items() if groups]
    return ", ".join(parts) or "there was no group"


def _has_identical_siblings(group: TrajectoryGroup) -> bool:
    """Returns True if every sibling sampled the same tokens in every turn."""
    replies = {
        tuple(turn.tokens.token_ids if turn.tokens else turn.content for turn in t.turns) for t in group.trajectories
    }
    return len(replies) == 1
