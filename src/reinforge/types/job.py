"""Training jobs: a reference to one, its status, and the table of the names that services use."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from reinforge.errors import BackendError


class TrainingStatusEnum(StrEnum):
    """Status of a training job."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"

    @property
    def is_terminal(self) -> bool:
        return self in (TrainingStatusEnum.COMPLETED, TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED)


_PENDING, _RUNNING, _COMPLETED, _FAILED, _CANCELED = TrainingStatusEnum

JOB_TRANSITIONS: dict[TrainingStatusEnum, frozenset[TrainingStatusEnum]] = {
    _PENDING: frozenset({_RUNNING, _COMPLETED, _FAILED, _CANCELED}),
    _RUNNING: frozenset({_PENDING, _COMPLETED, _FAILED, _CANCELED}),  # back to pending: a service paused the job
    _COMPLETED: frozenset(),
    _FAILED: frozenset(),
    _CANCELED: frozenset(),
}

JOB_STATUS: dict[str, TrainingStatusEnum] = {
    "pending": _PENDING,
    "queued": _PENDING,
    "created": _PENDING,
    "validating_files": _PENDING,
    "paused": _PENDING,
    "running": _RUNNING,
    "in_progress": _RUNNING,
    "completed": _COMPLETED,
    "succeeded": _COMPLETED,
    "failed": _FAILED,
    "error": _FAILED,
    "canceled": _CANCELED,
    "cancelled": _CANCELED,
}


def parse_job_status(status: str) -> TrainingStatusEnum:
    try:
        return JOB_STATUS[status.lower()]
    except KeyError:
        raise BackendError(f'unknown job status "{status}"; known: {", ".join(JOB_STATUS)}') from None


class TrainingJobRef(BaseModel):
    """Identifies a submitted job."""

    model_config = ConfigDict(extra="forbid")

    run_id: str = Field(description="The run that submitted the job.")
    backend: str = Field(description="The adapter that runs it.")
    metadata: dict[str, Any] | None = Field(default=None, description="What the adapter needs to find it again.")


class TrainingJobStatus(BaseModel):
    """Status report of a job."""

    model_config = ConfigDict(extra="forbid")

    run_id: str = Field(description="The run that submitted the job.")
    backend: str = Field(description="The adapter that runs it.")
    status: TrainingStatusEnum = Field(description="Status of the job.")
    progress: float | None = Field(default=None, description="Progress in percent, 0 to 100; None: unknown.")
    message: str | None = Field(default=None, description="Readable message of the backend.")
    metadata: dict[str, Any] | None = Field(default=None, description="Metrics and names reported by the backend.")

    @property
    def is_terminal(self) -> bool:
        return self.status.is_terminal

    @property
    def produced_model(self) -> bool:
        """True if the job completed with at least one optimizer step, or on a backend that does not count them."""
        return self.status is TrainingStatusEnum.COMPLETED and self.num_updates != 0

    @property
    def num_updates(self) -> int | None:
        """Number of optimizer steps of the job; None: the backend does not report it."""
        return (self.metadata or {}).get("num_updates")
