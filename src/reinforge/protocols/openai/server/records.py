"""What the server stores of files, uploads and fine-tuning jobs, each with its form in OpenAI's API."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from reinforge.safe_text import redact_secrets


class JobState(enum.StrEnum):
    """A state of a job, by OpenAI's name; `paused` is what `pause` leads to.

    validating_files -> queued -> running -> succeeded | failed
                          ^         |
                          +---------+   the server restarted; also after a pause: paused -> queued
    cancelled may follow every state that is not final
    """

    VALIDATING = "validating_files"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return not TRANSITIONS[self]


TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.VALIDATING: frozenset({JobState.QUEUED, JobState.PAUSED, JobState.FAILED, JobState.CANCELLED}),
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.PAUSED, JobState.FAILED, JobState.CANCELLED}),
    JobState.RUNNING: frozenset(
        {JobState.QUEUED, JobState.PAUSED, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}
    ),
    JobState.PAUSED: frozenset({JobState.QUEUED, JobState.VALIDATING, JobState.CANCELLED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


MAX_MESSAGE = 4000  # maximum characters of the message of a job's error
ORGANIZATION = "reinforge"  # the organization of every job and model: there is one for each server


@dataclass(frozen=True, slots=True)
class FileRecord:
    """An uploaded file, or one with the results of a job."""

    id: str
    num_bytes: int
    created_at: int  # Unix time
    filename: str
    purpose: str
    sha256: str
    expires_at: int | None = None  # Unix time after which it is deleted; None: never

    def as_answer(self) -> dict[str, Any]:
        expires = {} if self.expires_at is None else {"expires_at": self.expires_at}
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
            **expires,
        }


@dataclass(frozen=True, slots=True)
class UploadRecord:
    """A file that arrives in parts.

    Attributes:
        created_at, expires_at: Unix times.
        status: `pending`, `completed`, `cancelled` or `expired`.
        expires_after: Seconds after which the file is deleted; None: never.
    """

    id: str
    num_bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "pending"
    file_id: str | None = None
    expires_after: int | None = None

    def as_answer(self, file: FileRecord | None = None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "upload",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": self.status,
            "file": None if file is None else file.as_answer(),
        }


@dataclass(frozen=True, slots=True)
class JobError:
    code: str
    message: str
    param: str | None = None

    def as_answer(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "param": self.param}


class JobFailure(Exception):
    def __init__(self, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.error = JobError(code, redact_secrets(message)[:MAX_MESSAGE], param)


@dataclass(frozen=True, slots=True)
class FineTuningJob:
    """A fine-tuning job."""

    id: str
    created_at: int  # Unix time
    model: str
    training_file: str
    method: dict[str, Any]  # `{"type": T, T: {...}}` with the hyperparameters as the client gave them
    seed: int
    state: JobState = JobState.VALIDATING
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    """Those that take effect; empty until the files are validated."""
    validation_file: str | None = None
    suffix: str | None = None
    metadata: dict[str, str] | None = None
    error: JobError | None = None
    fine_tuned_model: str | None = None
    finished_at: int | None = None  # Unix time of its final state
    trained_tokens: int | None = None
    result_files: tuple[str, ...] = ()

    @property
    def method_type(self) -> str:
        return str(self.method["type"])

    @property
    def method_settings(self) -> dict[str, Any]:
        return dict(self.method.get(self.method_type) or {})

    def as_answer(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "fine_tuning.job",
            "created_at": self.created_at,
            "finished_at": self.finished_at,
            "model": self.model,
            "fine_tuned_model": self.fine_tuned_model,
            "organization_id": ORGANIZATION,
            "status": self.state.value,
            "hyperparameters": self.hyperparameters,
            "method": self.method,
            "training_file": self.training_file,
            "validation_file": self.validation_file,
            "result_files": list(self.result_files),
            "trained_tokens": self.trained_tokens,
            "error": None if self.error is None else self.error.as_answer(),
            "estimated_finish": None,
            "integrations": [],
            "metadata": self.metadata,
            "seed": self.seed,
            "user_provided_suffix": self.suffix,
        }


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something that happened to a job."""

    id: str
    created_at: int  # Unix time
    message: str
    level: str = "info"  # `info`, `warn` or `error`
    data: dict[str, Any] | None = None  # metrics; None: none

    def as_answer(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "fine_tuning.job.event",
            "created_at": self.created_at,
            "level": self.level,
            "message": self.message,
            "type": "message" if self.data is None else "metrics",
            "data": self.data,
        }


@dataclass(frozen=True, slots=True)
class JobCheckpoint:
    id: str
    created_at: int
    step: int
    model: str
    metrics: dict[str, Any]

    def as_answer(self, job_id: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "fine_tuning.job.checkpoint",
            "created_at": self.created_at,
            "fine_tuned_model_checkpoint": self.model,
            "fine_tuning_job_id": job_id,
            "metrics": {"step": self.step, **self.metrics},
            "step_number": self.step,
        }


@dataclass(frozen=True, slots=True)
class TunedModel:
    name: str
    base: str
    folder: str
