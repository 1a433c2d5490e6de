"""Fine-tuning jobs at the service: poll their status, wait for them, cancel or leave them.

a poll fails            no answer, or an odd one: the job's status is unchanged, polls slow down, and the third
                        failure in a row logs a warning
a status is terminal    it is final, and the service is not polled again
max_wait_s is exceeded  the job is cancelled, unless it has just ended
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from reinforge.errors import BackendError, BackendUnavailable
from reinforge.protocols.service import NOT_FOUND, HostedJob, HostedService
from reinforge.rollout.models.openai_http import MAX_WAIT_S, RetryableError, UnexpectedAnswer
from reinforge.types.job import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from reinforge.types.seeding import stable_random

logger = logging.getLogger(__name__)

WARN_AFTER = 3  # failed polls in a row before a warning is logged
MAX_BACKOFF = 8  # after failed polls, the pause grows up to this multiple of the poll interval
CANCEL_TIMEOUT_S = 3.0
FAILED_POLL = (RetryableError, UnexpectedAnswer)  # what a poll may raise without changing the job's status


class JobLimits(Protocol):
    """How long to wait for a job, and what happens to it when the run stops."""

    @property
    def poll_interval_s(self) -> float:
        """Seconds between two polls of a job."""

    @property
    def max_wait_s(self) -> float:
        """Seconds to wait for a job."""

    @property
    def cancel_on_stop(self) -> bool | None:
        """True: cancel unfinished jobs when the run stops; None: the service cannot cancel jobs."""


S = TypeVar("S", bound=HostedService)


@dataclass(slots=True)
class _JobState:
    """The last known status of one job, and its failed polls: in a row since then, and in total."""

    ref: TrainingJobRef
    status: TrainingJobStatus | None = None
    num_errors: int = 0
    num_all_errors: int = 0
    last_error: str = ""
    is_unknown: bool = False


class HostedJobs(Generic[S]):
    def __init__(self, service: S, config: JobLimits, seed: int):
        self.service, self.config, self.seed = service, config, seed
        self._states: dict[str, _JobState] = {}

    def record(self, ref: TrainingJobRef, job: HostedJob) -> TrainingJobStatus:
        """Stores what the service reports of a job, and returns it as a status."""
        state = self._get_state(ref)
        state.status = self._build_status(ref, job, state)
        return state.status

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Returns the status of a job; while the service does not answer, the last known one."""
        if (ended := self._final_status(ref)) is not None:
            return ended
        try:
            return await self._poll(ref)
        except FAILED_POLL as error:
            state = self._get_state(ref)
            if state.status is None:
                raise error if isinstance(error, BackendError) else BackendUnavailable(str(error)) from None
            return state.status.model_copy(update={"message": _format_poll_errors(ref, state)})

    async def wait(self, ref: TrainingJobRef, poll_interval_s: float | None = None) -> TrainingJobStatus:
        """Polls a job until it ends or `max_wait_s` is exceeded; polls slow down while they fail."""
        if (ended := self._final_status(ref)) is not None:
            return ended
        interval_s = self.config.poll_interval_s if poll_interval_s is None else poll_interval_s
        state, deadline = self._get_state(ref), time.monotonic() + self.config.max_wait_s
        jitter = stable_random(self.seed, "poll", _get_job_id(ref))
        while True:
            retry_after_s = 0.0
            try:
                status = await self._poll(ref)
            except FAILED_POLL as error:
                retry_after_s = min(getattr(error, "wait_s", None) or 0.0, MAX_WAIT_S)
            else:
                if status.is_terminal:
                    return status
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return await self._time_out(ref, state)
            backoff = min(2**state.num_errors, MAX_BACKOFF) * jitter.uniform(0.75, 1.25)
            await asyncio.sleep(min(max(interval_s * backoff, retry_after_s), left_s))

    async def cancel(self, ref: TrainingJobRef) -> TrainingJobStatus:
        return self._final_status(ref) or self.record(ref, await self.service.cancel(_get_job_id(ref)))

    async def release(self) -> None:
        for id_, state in self._states.items():
            if state.is_unknown or self._final_status(state.ref) is not None:
                continue
            if not self.config.cancel_on_stop:
                logger.warning(
                    "job %s keeps running at the service; --resume will use it instead of starting another%s",
                    id_,
                    "" if self.config.cancel_on_stop is None else " (cancel_on_stop: false)",
                )
                continue
            try:
                async with asyncio.timeout(CANCEL_TIMEOUT_S):
                    status = await self.cancel(state.ref)
            except (BackendError, TimeoutError) as error:
                logger.warning("could not cancel job %s; it may keep running and cost money: %s", id_, error)
            else:
                logger.warning("the run stopped; job %s (cancel_on_stop: true)", status.message)

    async def _poll(self, ref: TrainingJobRef) -> TrainingJobStatus:
        state = self._get_state(ref)
        try:
            job = await self.service.retrieve_job(_get_job_id(ref))
        except FAILED_POLL as error:
            state.num_errors += 1
            state.num_all_errors += 1
            state.last_error = str(error)
            if state.num_errors == WARN_AFTER:
                logger.warning("%s", _format_poll_errors(ref, state))
            raise
        except BackendError as error:
            state.is_unknown = getattr(error, "status", None) == NOT_FOUND
            raise
        if state.num_errors >= WARN_AFTER:
            logger.warning("polling job %s works again", job.id)
        state.num_errors = 0
        return self.record(ref, job)

    async def _time_out(self, ref: TrainingJobRef, state: _JobState) -> TrainingJobStatus:
        """Cancels a job that exceeded `max_wait_s`; if it succeeded just before, returns that status."""
        last = (state.status.metadata or {}).get("service_status") if state.status else "unknown"
        message = f"job {_get_job_id(ref)} was still {last} after max_wait_s ({self.config.max_wait_s:g} s)"
        try:
            status = await self.cancel(ref)
        except BackendError as error:
            message += f"; cancelling it failed, so it may keep running and cost money: {error}"
            state.status = _make_status(ref, TrainingStatusEnum.FAILED, message)
        else:
            if not status.produced_model:
                message += " and has been cancelled; raise max_wait_s to wait longer"
                state.status = _make_status(ref, TrainingStatusEnum.CANCELED, message, status.metadata)
        assert state.status is not None  # set here, or by cancel
        return state.status

    def _final_status(self, ref: TrainingJobRef) -> TrainingJobStatus | None:
        refused = (ref.metadata or {}).get("refused")
        if refused is not None:
            return _make_status(ref, TrainingStatusEnum.FAILED, refused)
        status = self._get_state(ref).status
        return status if status is not None and status.is_terminal else None

    def _get_state(self, ref: TrainingJobRef) -> _JobState:
        return self._states.setdefault(_get_job_id(ref), _JobState(ref))

    def _build_status(self, ref: TrainingJobRef, job: HostedJob, state: _JobState) -> TrainingJobStatus:
        if job.status is TrainingStatusEnum.COMPLETED and job.fine_tuned_model is None:
            message = f"{job.id}: the service reports {job.raw_status} but no fine_tuned_model"
            return _make_status(ref, TrainingStatusEnum.FAILED, message)
        metadata: dict[str, Any] = {"job_id": job.id, "service_status": job.raw_status}
        metadata |= {key: value for key, value in (ref.metadata or {}).items() if key in ("num_rows", "left_out")}
        if job.fine_tuned_model is not None:
            metadata["fine_tuned_model"] = job.fine_tuned_model
        if job.trained_tokens is not None:
            metadata["num_tokens"] = job.trained_tokens
        metadata |= job.metrics
        if state.num_all_errors:
            metadata["num_poll_errors"] = state.num_all_errors
        message = f"{job.id}: {job.error or job.raw_status}"
        return _make_status(ref, job.status, message, metadata)


def _make_status(
    ref: TrainingJobRef, status: TrainingStatusEnum, message: str, metadata: dict[str, Any] | None = None
) -> TrainingJobStatus:
    return TrainingJobStatus(run_id=ref.run_id, backend=ref.backend, status=status, message=message, metadata=metadata)


def _format_poll_errors(ref: TrainingJobRef, state: _JobState) -> str:
    polls = "poll" if state.num_errors == 1 else f"{state.num_errors} polls"
    return f"job {_get_job_id(ref)}: the last {polls} failed, still polling; latest error: {state.last_error}"


def _get_job_id(ref: TrainingJobRef) -> str:
    id_ = (ref.metadata or {}).get("job_id")
    if not isinstance(id_, str):
        message = f"the job reference of run {ref.run_id} has no metadata.job_id"
        raise BackendError(f"{message}; pass a reference that `submit` of this adapter returned")
    return id_
