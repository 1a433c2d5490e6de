"""Jobs at the service: where each stands, the wait for its end, and what is left behind.

a look fails          nothing is known, and nothing changes; the next look comes later; after three, a warning
a status is terminal  it is final: the service is not asked again
the time is over      the job is cancelled, unless it is done after all
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reinforge.adapters.openai_model import BACKEND
from reinforge.adapters.openai_service import FineTuningService, HostedJob
from reinforge.errors import BackendError, BackendUnavailable
from reinforge.rollout.openai_http import MAX_WAIT_S, TryAgain
from reinforge.types.job import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from reinforge.types.seeding import stable_random

if TYPE_CHECKING:
    from reinforge.adapters.openai_config import OpenAIAdapterConfig

logger = logging.getLogger(__name__)

DEGRADED_AFTER = 3
"""Looks in a row that fail before anybody is told."""
BACKOFF_POLLS = 8
"""The pause between looks that fail grows to so many times the usual one."""
CLEANUP_S = 3.0


@dataclass(slots=True)
class _Watch:
    """What is known of one job: its last status, and the looks that failed, in a row since then and in all."""

    ref: TrainingJobRef
    status: TrainingJobStatus | None = None
    num_errors: int = 0
    num_all_errors: int = 0
    last_error: str = ""


class HostedJobs:
    """The jobs of one adapter.

    Args:
        service: Where they run.
        config: How long to wait, and what becomes of jobs that are left.
        seed: The run's, for the jitter of the pauses.
    """

    def __init__(self, service: FineTuningService, config: OpenAIAdapterConfig, seed: int):
        self.service, self.config, self.seed = service, config, seed
        self._watches: dict[str, _Watch] = {}

    def note(self, ref: TrainingJobRef, job: HostedJob) -> TrainingJobStatus:
        """Remembers what the service tells of a job, and returns it as a status."""
        watch = self._watch(ref)
        watch.status = self._status_of(ref, job, watch)
        return watch.status

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Returns where a job stands; while the service does not answer, where it stood.

        Raises:
            BackendUnavailable: The service does not answer, and nothing is known of the job here.
            BackendError: The service knows no such job, or says a status that nobody knows.
        """
        if (ended := self._ended(ref)) is not None:
            return ended
        try:
            return await self._look(ref)
        except TryAgain as error:
            watch = self._watch(ref)
            if watch.status is None:
                raise BackendUnavailable(str(error)) from None
            return watch.status.model_copy(update={"message": _degraded(ref, watch)})

    async def wait(self, ref: TrainingJobRef, poll_interval_s: float | None = None) -> TrainingJobStatus:
        """Looks at a job until it has ended or its time is over; while looks fail, less often.

        Args:
            ref: The job.
            poll_interval_s: Seconds between looks; None: the configuration's.

        Raises:
            BackendError: The service knows no such job, refuses the key, or says a status that nobody knows.
        """
        if (ended := self._ended(ref)) is not None:
            return ended
        usual_s = self.config.poll_interval_s if poll_interval_s is None else poll_interval_s
        watch, deadline = self._watch(ref), time.monotonic() + self.config.max_wait_s
        jitter = stable_random(self.seed, "poll", _id_of(ref))
        while True:
            asked_s = 0.0
            try:
                status = await self._look(ref)
            except TryAgain as error:
                asked_s = min(error.wait_s or 0.0, MAX_WAIT_S)
            else:
                if status.is_terminal:
                    return status
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return await self._give_up(ref, watch)
            backoff = min(2**watch.num_errors, BACKOFF_POLLS) * jitter.uniform(0.75, 1.25)
            await asyncio.sleep(min(max(usual_s * backoff, asked_s), left_s))

    async def cancel(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Cancels a job and returns how it ended: it may have been done before.

        Raises:
            BackendError: It could not be cancelled.
        """
        return self._ended(ref) or self.note(ref, await self.service.cancel(_id_of(ref)))

    async def leave(self) -> None:
        """Leaves jobs that have not ended, as far as is known: they go on, or are cancelled where that is asked for."""
        for id_, watch in self._watches.items():
            if self._ended(watch.ref) is not None:
                continue
            if not self.config.cancel_on_stop:
                logger.warning("the job %s goes on at the service; --resume takes it up (cancel_on_stop: false)", id_)
                continue
            try:
                async with asyncio.timeout(CLEANUP_S):
                    status = await self.cancel(watch.ref)
            except (BackendError, TimeoutError) as error:
                logger.warning("the job %s could not be cancelled, so it may go on and cost: %s", id_, error)
            else:
                logger.warning("the run ends: %s (cancel_on_stop: true)", status.message)

    async def _look(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Returns where a job stands by one call; an error of that call says nothing about the job."""
        watch = self._watch(ref)
        try:
            job = await self.service.look_at(_id_of(ref))
        except TryAgain as error:
            watch.num_errors += 1
            watch.num_all_errors += 1
            watch.last_error = str(error)
            if watch.num_errors == DEGRADED_AFTER:
                logger.warning("%s", _degraded(ref, watch))
            raise
        if watch.num_errors >= DEGRADED_AFTER:
            logger.warning("the job %s can be looked at again", job.id)
        watch.num_errors = 0
        return self.note(ref, job)

    async def _give_up(self, ref: TrainingJobRef, watch: _Watch) -> TrainingJobStatus:
        """Ends the wait for a job that takes too long; a job that is done after all is done."""
        was = (watch.status.metadata or {}).get("service_status") if watch.status else "unknown"
        over = f"not done within max_wait_s ({self.config.max_wait_s:g} s), when it was {was}"
        try:
            found = await self.cancel(ref)
        except BackendError as error:
            message = f"{over}; it could not be cancelled, so it may go on and cost: {error}"
            watch.status = _status(ref, TrainingStatusEnum.FAILED, message)
        else:
            if not found.produced_model:
                message = f"{over}; it is cancelled at the service"
                watch.status = _status(ref, TrainingStatusEnum.CANCELED, message, found.metadata)
        assert watch.status is not None  # set here, or by cancel
        return watch.status

    def _ended(self, ref: TrainingJobRef) -> TrainingJobStatus | None:
        """Returns how a job ended, where that is known here; else None."""
        refused = (ref.metadata or {}).get("refused")
        if refused is not None:
            return _status(ref, TrainingStatusEnum.FAILED, refused)
        status = self._watch(ref).status
        return status if status is not None and status.is_terminal else None

    def _watch(self, ref: TrainingJobRef) -> _Watch:
        return self._watches.setdefault(_id_of(ref), _Watch(ref))

    def _status_of(self, ref: TrainingJobRef, job: HostedJob, watch: _Watch) -> TrainingJobStatus:
        if job.status is TrainingStatusEnum.COMPLETED and job.fine_tuned_model is None:
            return _status(ref, TrainingStatusEnum.FAILED, f"{job.id} has {job.word}, and no model is named")
        told: dict[str, Any] = {"job_id": job.id, "service_status": job.word}
        told |= {key: value for key, value in (ref.metadata or {}).items() if key in ("num_rows", "left_out")}
        if job.fine_tuned_model is not None:
            told["fine_tuned_model"] = job.fine_tuned_model
        if job.trained_tokens is not None:
            told["num_tokens"] = job.trained_tokens
        if watch.num_all_errors:
            told["num_poll_errors"] = watch.num_all_errors
        message = f"{job.id}: {job.error or job.word}"
        return _status(ref, job.status, message, told)


def _status(
    ref: TrainingJobRef, status: TrainingStatusEnum, message: str, metadata: dict[str, Any] | None = None
) -> TrainingJobStatus:
    return TrainingJobStatus(run_id=ref.run_id, backend=BACKEND, status=status, message=message, metadata=metadata)


def _degraded(ref: TrainingJobRef, watch: _Watch) -> str:
    return (
        f"degraded: {watch.num_errors} looks at the job {_id_of(ref)} in a row failed, and polling goes on; the last: "
        f"{watch.last_error}"
    )


def _id_of(ref: TrainingJobRef) -> str:
    id_ = (ref.metadata or {}).get("job_id")
    if not isinstance(id_, str):
        raise BackendError(f"the reference of {ref.run_id} names no job of the service (metadata.job_id)")
    return id_
