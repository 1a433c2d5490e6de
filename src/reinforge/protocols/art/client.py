"""What the clients of both ART protocols have in common: calls, answers, and jobs that are known by their step only.

A submission has no idempotency key in either protocol. A job whose id was lost, with the response or with the process,
is found by what it makes: the model's next checkpoint. Its id is then `after-step-N`, the step that it started from.
"""

from __future__ import annotations

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import SecretStr

from reinforge.errors import BackendError
from reinforge.protocols.service import HostedJob
from reinforge.rollout.models.openai_http import OpenAIEndpoint, RequestRejected, RetryableError, extract_error_message
from reinforge.types.job import TrainingStatusEnum

AFTER_STEP = "after-step-"
KEY_REJECTED = (401, 403)
NOT_FOUND = 404
MAX_PAUSE_S = 10.0
"""Longest pause before a job is submitted again that the backend did not take."""


class SubmissionLost(BackendError):
    """A submission got no answer; the backend may have started the job."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Where the trained model is served.

    Attributes:
        url: The inference endpoint, up to /v1.
        key: Its key.
    """

    url: str
    key: SecretStr | None


class ARTClient(ABC):
    """One model at one ART backend.

    Args:
        endpoint: The connection to the backend.
        settle_s: Seconds to look for the checkpoint of a job whose end is not known.

    Attributes:
        serves_steps: True: each step is served under its own name; False: only the newest, under the model's.
    """

    serves_steps: bool = True

    def __init__(self, endpoint: OpenAIEndpoint, settle_s: float = 600.0):
        self.endpoint, self.settle_s = endpoint, settle_s
        self._base_steps: dict[str, int] = {}
        self._unsettled_since: dict[str, float] = {}

    def remember_base(self, id_: str, step: int) -> None:
        """Notes the step that a job started from; the next one is its own."""
        self._base_steps[id_] = step

    @abstractmethod
    async def connect(self) -> Serving:
        """Registers the model, or finds the existing one, and returns where it is served.

        Raises:
            BackendError: The backend does not answer, or refuses.
        """

    @abstractmethod
    async def check_access(self) -> None:
        """Checks that the backend answers.

        Raises:
            BackendError: It does not.
        """

    @abstractmethod
    async def get_step(self) -> int:
        """Returns the step of the newest checkpoint; 0: the base model.

        Raises:
            RetryableError: The request failed in a way that may be temporary.
            BackendError: The backend refused, or sent something else.
        """

    @abstractmethod
    async def find_step_after(self, step: int) -> int | None:
        """Returns the first step after one; None: there is none yet.

        Raises:
            RetryableError: The request failed in a way that may be temporary.
            BackendError: The backend refused, or sent something else.
        """

    @abstractmethod
    async def start_job(self, step: int, groups: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
        """Starts a job from the newest checkpoint and returns its id; makes one attempt.

        Args:
            step: The step of that checkpoint.
            groups: The trajectory groups.
            settings: The training settings, under the names of protocol 2.

        Raises:
            SubmissionLost: There was no answer, so the job may have been started.
            RetryableError: The backend did not take the job now.
            BackendError: It refuses the job.
        """

    @abstractmethod
    async def retrieve_job(self, id_: str) -> HostedJob:
        """Returns a job from a single request.

        Raises:
            RetryableError: The request failed in a way that may be temporary.
            BackendError: The backend has no such job.
        """

    @abstractmethod
    async def keep_steps(self, steps: Sequence[int]) -> None:
        """Deletes all checkpoints but these.

        Raises:
            BackendError: The backend could not delete them.
        """

    @abstractmethod
    def name_step(self, step: int) -> str:
        """Returns the name under which the weights of one step are served."""

    async def cancel(self, id_: str) -> HostedJob:
        """Raises: neither protocol can cancel a job.

        Raises:
            BackendError: Always.
        """
        raise BackendError(f"ART cannot cancel the job {id_}; stop it at the server")

    async def close(self) -> None:
        """Closes the connections."""
        await self.endpoint.close()

    async def retrieve_by_step(self, id_: str) -> HostedJob:
        """Returns a job that is only known by the step it started from: completed once there is a newer one."""
        step = await self.find_step_after(int(id_.removeprefix(AFTER_STEP)))
        return self.make_job(
            id_, TrainingStatusEnum.RUNNING if step is None else TrainingStatusEnum.COMPLETED, step=step
        )

    def wait_for_step(self, id_: str, reason: str, metrics: Mapping[str, Any] | None = None) -> HostedJob:
        """Returns a job that has ended, or broke off, without a checkpoint: failed once `settle_s` have passed.

        Args:
            id_: The job.
            reason: What is known of its end.
            metrics: What it reported.
        """
        since = self._unsettled_since.setdefault(id_, time.monotonic())
        if time.monotonic() - since < self.settle_s:
            return self.make_job(id_, TrainingStatusEnum.RUNNING, metrics=metrics)
        error = f"{reason}, and no new step came within {self.settle_s:g} s (settle_s)"
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
        """Returns what is known of a job; a completed one names its model."""
        done = status is TrainingStatusEnum.COMPLETED and step is not None
        return HostedJob(
            id=id_,
            raw_status=status.value,
            status=status,
            fine_tuned_model=self.name_step(step) if done and step is not None else None,
            error=self.endpoint.redact(error) if error else None,
            trained_tokens=None,
            metadata={},
            metrics={**(metrics or {}), **({"art_step": step} if step is not None else {})},
        )

    async def request(self, method: str, path: str, *, fix: str = "", **arguments: Any) -> Any:
        """Returns the JSON of one answer; None for an empty one.

        Args:
            method: GET, POST or DELETE.
            path: Path below the backend's URL.
            fix: What the user can do if the backend refuses.
            arguments: As for `OpenAIEndpoint.send`.

        Raises:
            RetryableError: The request failed in a way that may be temporary, or was answered by something else.
            RequestRejected: The backend refused it.
        """
        try:
            text = await self.endpoint.send(method, path, **arguments)
        except RequestRejected as error:
            if error.status in KEY_REJECTED:
                fix = "check the trainer adapter's backend.api_key"
            raise RequestRejected(f"{error}{f'; {fix}' if fix else ''}", error.status) from None
        if not text.strip():
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            shown = self.endpoint.redact(extract_error_message(text))
            raise RetryableError(f"{self.endpoint.url}{path}: expected JSON, found: {shown}") from None


def parse_step(name: str) -> int | None:
    """Returns the step in the name of served weights; None: the name has none.

    Example: "run@3" -> 3; "wandb-artifact:///team/project/run:step12" -> 12; "run" -> None.
    """
    found = re.search(r"(?:@|:step)(\d+)$", name)
    return int(found[1]) if found else None


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
