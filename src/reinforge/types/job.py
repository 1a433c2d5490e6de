"""Training jobs: a reference to one, its status, and the one table of what the world calls each status."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from reinforge.errors import BackendError


class TrainingStatusEnum(StrEnum):
    """Where a training job stands."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"

    @property
    def is_terminal(self) -> bool:
        """True once nothing can change the status any more."""
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


def job_status(word: str) -> TrainingStatusEnum:
    """Returns the status that a service means by `word`.

    Raises:
        BackendError: The word is not in the table; guessing "running" would wait for ever.
    """
    try:
        return JOB_STATUS[word.lower()]
    except KeyError:
        raise BackendError(f'unknown job status "{word}"; known: {", ".join(JOB_STATUS)}') from None


class TrainingJobRef(BaseModel):
    """Names one submitted job."""

    model_config = ConfigDict(extra="forbid")

    run_id: str = Field(description="The run that submitted the job.")
    backend: str = Field(description="The adapter that runs it.")
    metadata: dict[str, Any] | None = Field(default=None, description="What the adapter needs to find it again.")


class TrainingJobStatus(BaseModel):
    """What is known of one job at one time."""

    model_config = ConfigDict(extra="forbid")

    run_id: str = Field(description="The run that submitted the job.")
    backend: str = Field(description="The adapter that runs it.")
    status: TrainingStatusEnum = Field(description="Where the job stands.")
    progress: float | None = Field(default=None, description="Percent done, 0 to 100; None: unknown.")
    message: str | None = Field(default=None, description="What the backend says, for a person.")
    metadata: dict[str, Any] | None = Field(default=None, description="Metrics and names that the backend reports.")

    @property
    def is_terminal(self) -> bool:
        """True once nothing can change the status any more."""
        return self.status.is_terminal

    @property
    def produced_model(self) -> bool:
        """True if the job completed with at least one optimizer step, or a backend that does not count steps."""
        return self.status is TrainingStatusEnum.COMPLETED and self.num_updates != 0

    @property
    def num_updates(self) -> int | None:
        """Optimizer steps that the job made; None: the backend does not say."""
        return (self.metadata or {}).get("num_updates")
