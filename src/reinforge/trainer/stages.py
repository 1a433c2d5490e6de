"""The stages that both the loop and the run go through: keep a checkpoint, validate, adopt new weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from reinforge.crash import crash_point
from reinforge.errors import JobFailed
from reinforge.files import write_json
from reinforge.interfaces import PolicyServer, Trainer, TrainerAdapter
from reinforge.runs.journal import Snapshot
from reinforge.runs.validations import BASELINE, choose_best
from reinforge.trainer.canary import CanaryReport, Prompts, probe
from reinforge.types.job import TrainingJobStatus, TrainingStatusEnum

if TYPE_CHECKING:
    from reinforge.trainer.context import RunContext


async def commit(
    context: RunContext, adapter: TrainerAdapter, epoch: int, state: dict[str, Any], *, version: int | None
) -> str | None:
    """Makes durable that an epoch's job is done: its weights, then, in one transaction, that the run goes on from here.

    Args:
        context: The run.
        adapter: Keeps the weights.
        epoch: -1 before the first.
        state: What is needed to go on; the counters as they are now unless it holds them.
        version: Version of the weights as they are; None: the backend serves no policy.

    Returns:
        The checkpoint; None where the backend keeps its weights to itself.
    """
    state = {"epoch": epoch, "version": version, "counters": context.counters(), **state}
    number = epoch + 1 if version is None else version
    name = context.checkpoints.name(number)
    holds = not state["adopt"] and context.checkpoints.has(number) and context.checkpoints.damage(name) is None
    checkpoint = name if holds else await context.checkpoints.keep(adapter, number, state)
    context.store.snapshot(Snapshot(epoch, version, checkpoint, state))
    return checkpoint


async def validate(trainer: Trainer, context: RunContext, epoch: int) -> dict[str, Any]:
    """Validates on `select` and records the figure with the version it belongs to.

    Args:
        trainer: Any trainer; its own `run_validation_evaluation` is what runs.
        context: The run.
        epoch: -1 for the baseline.
    """
    assert trainer.trajectory_builder.evaluation is not None
    total = len(trainer.trajectory_builder.evaluation.example_ids("select"))
    context.begin_stage("BASELINE" if epoch == BASELINE else "VALIDATE", None if epoch == BASELINE else epoch, total)
    report = await trainer.run_validation_evaluation(epoch, context.run_id)
    policy = trainer.trainer_adapter.policy()
    version = policy.version if policy is not None else epoch + 1
    checkpoint = context.checkpoints.name(version) if context.checkpoints.has(version) else None
    row = {**report, "epoch": epoch, "version": version, "checkpoint": checkpoint}
    context.validations.append(row)
    context.store.validation(epoch, row)
    write_json(context.folder / "validation_history.json", context.validations)
    context.end_stage(row)
    context.progress.validation(epoch, row)
    return row


def drop_checkpoints(context: RunContext, gate_metric: str | None, *, keep_last: int, pin_every: int | None) -> None:
    """Removes every checkpoint but the base, the best, the newest and the pinned ones.

    Args:
        context: The run.
        gate_metric: What the best checkpoint is chosen by; None: the reward.
        keep_last: How many of the newest stay.
        pin_every: Versions that this divides stay, too.
    """
    names = context.checkpoints.all()
    best = choose_best(context.validations, gate_metric)
    kept = {*names[:1], *names[-keep_last:], *([best["checkpoint"]] if best is not None else [])}
    if pin_every is not None:
        kept |= {name for name in names if int(name.rpartition("-")[2]) % pin_every == 0}
    for name in context.checkpoints.drop_all_but(kept):
        context.store.drop_checkpoint(name)


async def adopt(
    context: RunContext | None, policy: PolicyServer, *, prompts: Prompts, num_updates: int | None
) -> CanaryReport:
    """Publishes the weights of a finished job as the next version and proves that the agent gets them.

    Args:
        context: The run; without one nothing is known of the weights before, and nothing is recorded.
        policy: What the agent calls.
        prompts: A few histories that the agent asked, by adapter.
        num_updates: Optimizer steps of the job; None: the backend does not say.

    Raises:
        JobFailed: The canary says otherwise.
    """
    before = context.policy_versions[-1] if context is not None and context.policy_versions else None
    version = policy.version
    if before is None or version == before["version"]:  # else whoever trained published already
        version += 1
    crash_point("publish.before")
    await policy.publish(version)
    crash_point("publish.mid")
    report = await probe(policy, version, prompts, before["fingerprint"] if before else None)
    if context is not None:
        checkpoint = context.checkpoints.name(version) if context.checkpoints.has(version) else None
        context.version_published(version, report.fingerprint, num_updates, checkpoint)
    return report


async def adopt_what_is_left(
    context: RunContext, adapter: TrainerAdapter, statuses: Sequence[TrainingJobStatus]
) -> None:
    """Adopts weights that a trainer left behind without doing so itself, as one version; else does nothing.

    Raises:
        JobFailed: Jobs completed, and yet the agent is served the weights from before them.
    """
    policy = adapter.policy()
    if policy is None:
        return
    known = [version["fingerprint"] for version in context.policy_versions]
    if len(known) > 1 and await policy.fingerprint() == known[-1]:
        return
    if len(known) == 1 and not statuses and await policy.fingerprint() == known[-1]:
        return  # nothing was trained, and nothing is claimed
    counts = [status.num_updates for status in statuses if status.num_updates is not None]
    context.begin_stage("ADOPT")
    report = await adopt(context, policy, prompts={}, num_updates=sum(counts) if counts else None)
    context.end_stage({"version": report.version, "fingerprint": report.fingerprint})


def refuse_failed(statuses: Sequence[TrainingJobStatus]) -> None:
    """Stops the run where a trainer came back with a job that did not complete.

    Raises:
        JobFailed: A job failed, was cancelled, or has not ended.
    """
    for status in statuses:
        if status.status is not TrainingStatusEnum.COMPLETED:
            reason = status.message or "no reason given"
            raise JobFailed(f"the job {status.run_id} on {status.backend} ended as {status.status}: {reason}")
