"""The jobs of a backend in this process, which run one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforge.adapters.training import StepsSkipped
from reinforge.errors import BackendError, BackendUnavailable, OutOfMemory, ReinforgeError, StorageError
from reinforge.files import write_folder
from reinforge.types.job import JOB_TRANSITIONS, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from reinforge.types.trajectory import TrajectoryCollection

if TYPE_CHECKING:
    from reinforge.engine import Engine


@dataclass(slots=True)
class LocalJob:
    """One job of this process; `machine_error` is set if memory, storage or a teacher's endpoint was missing."""

    ref: TrainingJobRef
    status: TrainingJobStatus
    done: asyncio.Event
    machine_error: ReinforgeError | None = None

    def set_status(self, status: TrainingStatusEnum, message: str, metadata: dict[str, Any] | None = None) -> None:
        """Changes the status, if the table of transitions allows it."""
        if status not in JOB_TRANSITIONS[self.status.status]:
            raise BackendError(f"the status of a job cannot change from {self.status.status} to {status}")
        update = {"status": status, "message": message, "metadata": metadata}
        self.status = self.status.model_copy(update=update)
        if status.is_terminal:
            self.done.set()


class JobQueue:
    """Runs jobs one after the other, each in its own task; a job key is never run twice."""

    def __init__(self, backend: str):
        self._backend = backend
        self._jobs: dict[str, LocalJob] = {}
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._jobs

    def add(
        self, trajectories: TrajectoryCollection, train: Callable[[], Awaitable[dict[str, Any]]] | None
    ) -> TrainingJobRef:
        """Adds a job, which starts when those before it have ended.

        Args:
            train: Trains and returns the job's metrics; None: the job is trained already.
        """
        key = trajectories.resolve_job_key()
        metadata = {"job_key": key, "epoch": trajectories.epoch}
        ref = TrainingJobRef(run_id=trajectories.run_id, backend=self._backend, metadata=metadata)
        status = TrainingJobStatus(
            run_id=ref.run_id, backend=self._backend, status=TrainingStatusEnum.PENDING, progress=0.0
        )
        job = self._jobs[key] = LocalJob(ref, status, asyncio.Event())
        if train is None:
            job.set_status(TrainingStatusEnum.COMPLETED, "already trained")
            return ref
        task = asyncio.create_task(self._run(job, train))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return ref

    def get(self, key: str) -> LocalJob:
        if key not in self._jobs:
            raise BackendError(f'the {self._backend} backend has no job with the key "{key}"')
        return self._jobs[key]

    async def cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, job: LocalJob, train: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        """Runs one job; every error becomes the job's failure, with its reason."""
        async with self._one_at_a_time:
            job.set_status(TrainingStatusEnum.RUNNING, "training")
            try:
                metadata = await train()
            except asyncio.CancelledError:
                job.set_status(TrainingStatusEnum.CANCELED, "the run was stopped")
                raise
            except Exception as error:  # noqa: BLE001  any error becomes the job's status, with its reason
                text = str(error) if isinstance(error, ReinforgeError) else f"{type(error).__name__}: {error}"
                if isinstance(error, StorageError | OutOfMemory | BackendUnavailable):
                    job.machine_error = error
                metadata = error.metadata if isinstance(error, StepsSkipped) else {}
                job.set_status(TrainingStatusEnum.FAILED, text, {"num_updates": 0, **metadata})
            else:
                job.set_status(TrainingStatusEnum.COMPLETED, "trained", metadata)


def save_job(engine: Engine, folder: Path) -> None:
    version = engine.policy.version + 1
    write_folder(folder, lambda staged: write_checkpoint(engine, staged, version), version=version)


def write_checkpoint(engine: Engine, folder: Path, version: int) -> None:
    for name in engine.policies:
        engine.write(get_adapter_folder(folder, engine, name), version, name)


def find_checkpoint(folder: Path, version: int) -> Path:
    stem, _, digits = folder.name.rpartition("-")
    return folder.with_name(f"{stem}-{version:0{len(digits)}d}")


def get_adapter_folder(folder: Path, engine: Engine, name: str) -> Path:
    return folder / name if len(engine.policies) > 1 else folder
