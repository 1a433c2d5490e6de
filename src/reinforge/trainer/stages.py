"""Stages shared by the loop and the run: commit a checkpoint, validate, adopt new weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from reinforge.crash import crash_point
from reinforge.errors import JobFailed
from reinforge.files import write_json
from reinforge.interfaces import PolicyServer, Trainer, TrainerAdapter
from reinforge.runs.rows import BASELINE, EpochSnapshot, ValidationRow
from reinforge.runs.validations import choose_best_validation
from reinforge.trainer.canary import CanaryReport, Prompts, probe
from reinforge.types.job import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from reinforge.types.trajectory import TrajectoryCollection

if TYPE_CHECKING:
    from reinforge.trainer.context import RunContext


async def commit(
    context: RunContext, adapter: TrainerAdapter, epoch: int, state: dict[str, Any], *, version: int | None
) -> str | None:
    """Makes an epoch durable: its weights first, then, in one transaction, the point to resume from.

    Args:
        adapter: Saves the weights.
        state: What a resume needs; the current counters are added unless it holds some.
        version: Version of the current weights; None: the backend serves no policy.

    Returns:
        The checkpoint; None if the backend does not save its weights.
    """
    newest = asdict(context.policy_versions[-1]) if context.policy_versions else None  # to rebuild a damaged journal
    state = {"epoch": epoch, "version": version, "newest_version": newest, "counters": context.counters(), **state}
    number = epoch + 1 if version is None else version
    name = context.checkpoints.name(number)
    holds = not state["adopt"] and context.checkpoints.has(number) and context.checkpoints.find_damage(name) is None
    checkpoint = name if holds else await context.checkpoints.write(adapter, number, state)
    context.journal.record_snapshot(EpochSnapshot(epoch, version, checkpoint, state))
    return checkpoint


async def validate(trainer: Trainer, context: RunContext, epoch: int) -> ValidationRow:
    """Validates on `select` and records the result with the version of the weights.

    Args:
        trainer: Any trainer; its `run_validation_evaluation` is called.
        epoch: -1 for the baseline.
    """
    assert trainer.trajectory_builder.evaluation is not None
    total = len(trainer.trajectory_builder.evaluation.example_ids("select"))
    context.begin_stage("BASELINE" if epoch == BASELINE else "VALIDATE", None if epoch == BASELINE else epoch, total)
    report = await trainer.run_validation_evaluation(epoch, context.run_id)
    policy = trainer.trainer_adapter.policy()
    version = policy.version if policy is not None else epoch + 1
    checkpoint = context.checkpoints.name(version) if context.checkpoints.has(version) else None
    row = ValidationRow.from_dict({**report, "epoch": epoch, "version": version, "checkpoint": checkpoint})
    context.validations.append(row)
    context.journal.record_validation(row)
    write_json(context.folder / "validation_history.json", [each.as_dict() for each in context.validations])
    context.end_stage(row.as_dict())
    context.progress.validation(row)
    return row


async def submit(
    context: RunContext, adapter: TrainerAdapter, epoch: int, chosen: TrajectoryCollection
) -> TrainingJobRef:
    """Submits a job once: after a resume, the backend may already have it."""
    key = str(chosen.job_key)
    context.pending = None  # from here on the weights may change
    known = context.journal.find_job(key) if context.resumed is not None else None
    if known is None:
        context.journal.record_job_intent(key, epoch, chosen.run_id)
        crash_point("submit.after_intent")
        ref = await adapter.submit(chosen)
    else:
        ref = await adapter.resubmit(chosen, known.ref)
    crash_point("submit.after_send")
    context.journal.record_job_submission(key, ref)
    crash_point("submit.after_id")
    return ref


def drop_checkpoints(
    context: RunContext,
    gate_metric: str | None,
    *,
    keep_last: int,
    pin_every: int | None,
    stage_ends: Collection[int] = (),
) -> None:
    """Removes all checkpoints except the base, the best, the newest, the pinned ones and those between two stages.

    Args:
        gate_metric: The metric that chooses the best checkpoint; None: the reward.
        keep_last: How many of the newest to keep.
        pin_every: Keep every version that this divides.
        stage_ends: The last epochs of the stages of a pipeline; the model after one is the reference of the next stage.
    """
    names = context.checkpoints.names()
    best = choose_best_validation(context.validations, gate_metric)
    kept = {*names[:1], *names[-keep_last:], *([best.checkpoint] if best is not None and best.checkpoint else [])}
    kept |= {row.checkpoint for row in context.validations if row.epoch in stage_ends and row.checkpoint}
    if pin_every is not None:
        kept |= {name for name in names if int(name.rpartition("-")[2]) % pin_every == 0}
    for name in context.checkpoints.remove_except(kept):
        context.journal.forget_checkpoint(name)


async def adopt(
    context: RunContext | None, policy: PolicyServer, *, prompts: Prompts, num_updates: int | None
) -> CanaryReport:
    """Publishes the weights of a finished job as the next version and checks that the agent is served them.

    Args:
        context: The run; None: the previous weights are unknown and nothing is recorded.
        prompts: A few of the agent's conversations, by adapter.
        num_updates: Optimizer steps of the job; None: the backend does not report them.

    Raises:
        JobFailed: The canary failed.
    """
    before = context.policy_versions[-1] if context is not None and context.policy_versions else None
    version = policy.version
    if before is None or version == before.version:  # otherwise the trainer has published already
        version += 1
    crash_point("publish.before")
    await policy.publish(version)
    crash_point("publish.mid")
    report = await probe(policy, version, prompts, before.fingerprint if before else None)
    if context is not None:
        checkpoint = context.checkpoints.name(version) if context.checkpoints.has(version) else None
        context.record_version(version, report.fingerprint, num_updates, checkpoint)
    return report


async def adopt_unpublished(
    context: RunContext, adapter: TrainerAdapter, statuses: Sequence[TrainingJobStatus]
) -> None:
    """Adopts weights that a trainer has trained but not published, as one version.

    Raises:
        JobFailed: Jobs completed, but the policy still serves the previous weights.
    """
    policy = adapter.policy()
    if policy is None:
        return
    known = [version.fingerprint for version in context.policy_versions]
    if len(known) > 1 and await policy.fingerprint() == known[-1]:
        return
    if len(known) == 1 and not statuses and await policy.fingerprint() == known[-1]:
        return  # nothing was trained
    counts = [status.num_updates for status in statuses if status.num_updates is not None]
    context.begin_stage("ADOPT")
    report = await adopt(context, policy, prompts={}, num_updates=sum(counts) if counts else None)
    context.end_stage({"version": report.version, "fingerprint": report.fingerprint})


def refuse_failed(statuses: Sequence[TrainingJobStatus]) -> None:
    """Stops the run if the trainer returned a job that did not complete.

    Raises:
        JobFailed: A job failed, was cancelled, or has not ended.
    """
    for status in statuses:
        if status.status is not TrainingStatusEnum.COMPLETED:
            reason = status.message or "no reason given"
            raise JobFailed(f"the job {status.run_id} on {status.backend} ended with status {status.status}: {reason}")
