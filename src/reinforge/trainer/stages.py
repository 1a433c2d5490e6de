"""The stages that both the loop and the run go through: keep a checkpoint, validate, adopt new weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforge.errors import JobFailed, StorageError, boundary
from reinforge.interfaces import PolicyServer, Trainer, TrainerAdapter
from reinforge.trainer.canary import CanaryReport, probe
from reinforge.trainer.gate import choose_best
from reinforge.trainer.store import write_json
from reinforge.types.job import TrainingJobStatus, TrainingStatusEnum
from reinforge.types.request import Message

if TYPE_CHECKING:
    from reinforge.trainer.context import RunContext

BASELINE = -1
"""The epoch of everything that happens before the first one."""


async def keep_checkpoint(context: RunContext, adapter: TrainerAdapter, version: int) -> Path | None:
    """Writes the weights as `checkpoints/step-<version>`; None where the backend keeps its weights to itself."""
    folder = context.folder / "checkpoints" / f"step-{version:06d}"
    return folder if await adapter.save(folder, version) else None


async def validate(trainer: Trainer, context: RunContext, epoch: int, gate_metric: str | None) -> dict[str, Any]:
    """Validates on `select`, records the figure with the version it belongs to, and keeps what may be the best.

    Args:
        trainer: Any trainer; its own `run_validation_evaluation` is what runs.
        context: The run.
        epoch: -1 for the baseline.
        gate_metric: What the best checkpoint is chosen by; None: the reward.
    """
    assert trainer.trajectory_builder.evaluation is not None
    total = len(trainer.trajectory_builder.evaluation.example_ids("select"))
    context.begin_stage("BASELINE" if epoch == BASELINE else "VALIDATE", None if epoch == BASELINE else epoch, total)
    report = await trainer.run_validation_evaluation(epoch, context.run_id)
    policy = trainer.trainer_adapter.policy()
    version = policy.version if policy is not None else epoch + 1
    checkpoint = context.folder / "checkpoints" / f"step-{version:06d}"
    row = {**report, "epoch": epoch, "version": version, "checkpoint": str(checkpoint) if checkpoint.exists() else None}
    context.validations.append(row)
    write_json(context.folder / "validation_history.json", context.validations)
    context.end_stage(row)
    context.progress.validation(epoch, row)
    drop_checkpoints(context, gate_metric)
    return row


def drop_checkpoints(context: RunContext, gate_metric: str | None) -> None:
    """Removes every checkpoint but the base, the best and the newest; a name that begins with a dot is never valid."""
    folder = context.folder / "checkpoints"
    steps = sorted(folder.glob("step-*"))
    best = choose_best(context.validations, gate_metric)
    kept = {steps[0].name, steps[-1].name} if steps else set()
    if best is not None and best["checkpoint"]:
        kept.add(Path(best["checkpoint"]).name)
    for step in steps:
        if step.name not in kept:
            with boundary(StorageError, f"removing {step}"):
                trash = folder / f".trash-{step.name}-{os.getpid()}"
                step.rename(trash)
                shutil.rmtree(trash)


async def adopt(
    context: RunContext | None, policy: PolicyServer, *, prompts: list[list[Message]], num_updates: int | None
) -> CanaryReport:
    """Publishes the weights of a finished job as the next version and proves that the agent gets them.

    Args:
        context: The run; without one nothing is known of the weights before, and nothing is recorded.
        policy: What the agent calls.
        prompts: A few histories that the agent asked.
        num_updates: Optimizer steps of the job; None: the backend does not say.

    Raises:
        JobFailed: The canary says otherwise.
    """
    before = context.policy_versions[-1] if context is not None and context.policy_versions else None
    version = policy.version
    if before is None or version == before["version"]:  # else whoever trained published already
        version += 1
    await policy.publish(version)
    report = await probe(policy, version, prompts, before["fingerprint"] if before else None)
    if context is not None:
        context.version_published(version, report.fingerprint, num_updates, None)
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
    report = await adopt(context, policy, prompts=[], num_updates=sum(counts) if counts else None)
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
