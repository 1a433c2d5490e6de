"""What the clients of both ART protocols have in common: calls, answers, and jobs that are known by their step only.

A submission has no idempotency key in either protocol. A job whose id was lost, with the response or with the process,
is found by what it makes: the model's next checkpoint. Its id is then `after-step-N`, the step that it started from.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import SecretStr

from reinforge.errors import BackendError, BackendUnavailable
from reinforge.protocols.art.config import AFTER_STEP, ARTTrainerAdapterConfig
from reinforge.protocols.hosted_policy import HostedPolicy
from reinforge.protocols.service import KEY_REJECTED, HostedJob, HostedService
from reinforge.rollout.models.openai_client import OpenAIChat
from reinforge.rollout.models.openai_http import OpenAIEndpoint, RetryableError
from reinforge.types.job import TrainingStatusEnum

logger = logging.getLogger(__name__)

MAX_PAUSE_S = 10.0  # longest pause before a job is submitted again that the backend did not take


class SubmissionLost(BackendError):
    """A submission got no answer; the backend may have started the job."""


@dataclass(frozen=True, slots=True)
class Serving:
    url: str
    key: SecretStr | None


class ARTClient(HostedService):
    """One model at one ART backend."""

    serves_steps: bool = True  # True: each step is served under its own name; False: only the newest, under the model's
    url_setting = "backend.base_url"
    fixes: ClassVar[Mapping[str, str]] = {}  # path -> what to check if a request there is refused

    def __init__(self, config: ARTTrainerAdapterConfig, key: SecretStr | None = None):
        super().__init__(OpenAIEndpoint(config.endpoint, config.backend.url, key))
        self.config, self.backend = config, config.backend
        self._base_steps: dict[str, int] = {}
        self._unsettled_since: dict[str, float] = {}

    def find_fix(self, status: int, method: str, path: str) -> str | None:
        return "check the trainer adapter's backend.api_key" if status in KEY_REJECTED else self.fixes.get(path)

    def remember_base(self, id_: str, step: int) -> None:
        self._base_steps[id_] = step

    @abstractmethod
    async def connect(self) -> Serving:
        """Registers the model, or finds the existing one, and returns where it is served."""

    @abstractmethod
    async def get_step(self) -> int:
        """Returns the step of the newest checkpoint, from one attempt; 0: the base model."""

    @abstractmethod
    async def find_step_after(self, step: int) -> int | None:
        """Returns the first step after one, from one attempt; None: there is none yet."""

    @abstractmethod
    async def start_job(self, step: int, groups: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
        """Starts a job from the newest checkpoint and returns its id; makes one attempt.

        Args:
            settings: The training settings, under the names of protocol 2.

        Raises:
            SubmissionLost: There was no answer, so the job may have been started.
            RetryableError: The backend did not take the job now.
            BackendError: It refuses the job.
        """

    async def find_or_start(
        self, base: int, groups: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], *, was_interrupted: bool
    ) -> str:
        """Returns the id of the job that starts from a step; starts one unless one is found."""
        lost, name = f"{AFTER_STEP}{base}", self.backend.name
        newest = await self.endpoint.retry(self.get_step)
        if was_interrupted and (newest > base or await self._settle(base)):
            logger.info("found the job that starts from step %d of %s; not starting another", base, name)
            return lost
        if newest != base:
            raise BackendError(
                f"{self.backend.url}: {name} is at step {newest}, but this run left it at step {base}: something else "
                "trains it, or its checkpoints were deleted; give each run its own backend.name"
            )
        attempts, pause_s = self.config.max_retries + 1, 0.5
        for attempt in range(1, attempts + 1):
            try:
                return await self.start_job(base, groups, settings)
            except SubmissionLost as error:
                logger.warning("no answer to a submission: %s; looking for the job", error)
                if await self._settle(base):
                    return lost
                reason = str(error)
            except RetryableError as error:
                reason = str(error)
                await asyncio.sleep(min(error.wait_s or pause_s, MAX_PAUSE_S) if attempt < attempts else 0)
                pause_s *= 2
        raise BackendUnavailable(f"{reason} ({attempts} attempts)")

    async def _settle(self, base: int) -> bool:
        """Returns True once the model has a step after `base`; False if none comes within `settle_s`."""
        logger.warning(
            "a job may have been started from step %d of %s, but its id is not known; looking for its checkpoint for "
            "up to %g s (settle_s)",
            base,
            self.backend.name,
            self.config.settle_s,
        )
        deadline = time.monotonic() + self.config.settle_s
        while True:
            try:
                if await self.find_step_after(base) is not None:
                    return True
            except RetryableError as error:
                logger.debug("looking for a job: %s", error)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            await asyncio.sleep(min(self.config.poll_interval_s, left_s))

    @abstractmethod
    async def keep_steps(self, steps: Sequence[int]) -> None:
        """Deletes all checkpoints but these."""

    @abstractmethod
    def name_step(self, step: int) -> str:
        """Returns the name under which the weights of one step are served."""

    async def cancel(self, id_: str) -> HostedJob:
        raise BackendError(f"ART cannot cancel the job {id_}; stop it at the server")

    async def retrieve_by_step(self, id_: str) -> HostedJob:
        """Returns a job that is only known by the step it started from: completed once there is a newer one."""
        step = await self.find_step_after(int(id_.removeprefix(AFTER_STEP)))
        return self.make_job(
            id_, TrainingStatusEnum.RUNNING if step is None else TrainingStatusEnum.COMPLETED, step=step
        )

    def wait_for_step(self, id_: str, reason: str, metrics: Mapping[str, Any] | None = None) -> HostedJob:
        """Returns a job that has ended, or broke off, without a checkpoint: failed once `settle_s` have passed."""
        since = self._unsettled_since.setdefault(id_, time.monotonic())
        if time.monotonic() - since < self.config.settle_s:
            return self.make_job(id_, TrainingStatusEnum.RUNNING, metrics=metrics)
        error = f"{reason}, and no new step came within {self.config.settle_s:g} s (settle_s)"
        return self.make_job(id_, TrainingStatusEnum.FAILED, error=error, metrics=metrics)

    def make_job(
        self,
        id_: str,
        status: TrainingStatusEnum,
        *,
        step: int | None = None,
        error: str | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> HostedJob:
        return HostedJob(
            id=id_,
            raw_status=status.value,
            status=status,
            fine_tuned_model=self.name_step(step)
            if status is TrainingStatusEnum.COMPLETED and step is not None
            else None,
            error=self.endpoint.redact(error) if error else None,
            metrics={**(metrics or {}), **({"art_step": step} if step is not None else {})},
        )


def average_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the number of gradient steps, and the mean of each number that they report.

    Example: [{"loss": 0.5}, {"loss": 0.4}] -> {"num_updates": 2, "loss": 0.45}.
    """
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values.setdefault(str(name), []).append(float(value))
    return {"num_updates": len(rows), **{name: sum(each) / len(each) for name, each in values.items()}}


class ARTPolicy(HostedPolicy):
    """Samples from the newest adopted step, with log-probs."""

    def __init__(self, chat: OpenAIChat, base_model: str, model_name: str, step: int, *, ready_s: float = 600.0):
        super().__init__(chat, base_model, ready_s=ready_s)
        self._model_name, self._step = model_name, step
        self._staged_step: int | None = None

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def newest_step(self) -> int:
        return self._step if self._staged_step is None else self._staged_step

    def stage_step(self, model: str, step: int) -> None:
        self.stage(model)
        self._staged_step = step

    async def publish(self, version: int) -> None:
        await super().publish(version)
        self._step, self._staged_step = self.newest_step, None

    async def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.served_model} {self._step}".encode()).hexdigest()[:16]
