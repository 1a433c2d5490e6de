"""ART protocol 2, as its clients speak it as of 0.5.23: the training service of ART's ServerlessBackend.

    POST   /preview/models                       the model, created or found
    GET    /preview/models/ID/checkpoints        its newest step
    POST   /preview/training-jobs                a job, with the trajectory groups
    GET    /preview/training-jobs/ID/events      what happened to it
    DELETE /preview/models/ID/checkpoints        old steps

The model is served at the same address, each step under `wandb-artifact:///ENTITY/PROJECT/NAME:stepN`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from pydantic import Field, SecretStr

from reinforge.errors import BackendError
from reinforge.protocols.answers import Entry, Page
from reinforge.protocols.art.client import AFTER_STEP, ARTClient, Serving, SubmissionLost, average_metrics
from reinforge.protocols.art.config import ARTBackendConfig
from reinforge.protocols.service import HostedJob
from reinforge.rollout.models.openai_answers import Answer, ErrorText, Name, describe_json, parse_answer
from reinforge.rollout.models.openai_http import OpenAIEndpoint, RetryableError, UnexpectedAnswer
from reinforge.types.job import TrainingStatusEnum

MODELS = "/preview/models"
JOBS = "/preview/training-jobs"
MAX_PAGES = 1000
"""Pages of one list; a service with more has most likely lost count of them."""
STARTED, STEP, ENDED, FAILED = "training_started", "gradient_step", "training_ended", "training_failed"


class ARTModelAnswer(Entry):
    """A model."""

    entity: Name
    project: Name
    name: Name


class ARTJobAnswer(Entry):
    """A training job that was accepted."""


class CheckpointAnswer(Entry):
    """A checkpoint."""

    step: int = Field(ge=0)


class EventData(Answer):
    """What an event says besides numbers."""

    error_message: ErrorText = None


class EventAnswer(Entry):
    """One event of a job; kinds that are not known are ignored."""

    type: Name
    data: dict[str, Any] | None = None


class ARTTrainingService(ARTClient):
    """One model at the training service.

    Args:
        endpoint: The connection.
        backend: The model.
        key: The key, which also opens the inference endpoint.
        settle_s: Seconds to wait for the checkpoint of a job that has ended.
    """

    def __init__(
        self, endpoint: OpenAIEndpoint, backend: ARTBackendConfig, key: SecretStr | None, settle_s: float = 600.0
    ):
        super().__init__(endpoint, settle_s)
        self.backend, self.key = backend, key
        self._model: ARTModelAnswer | None = None
        self._events: dict[str, list[EventAnswer]] = {}

    async def connect(self) -> Serving:
        """Creates the model, or finds the existing one, and returns where it is served.

        Raises:
            BackendError: The service does not answer, or refuses.
        """
        body = {
            "entity": self.backend.entity,
            "project": self.backend.project,
            "name": self.backend.name,
            "base_model": self.backend.base_model,
            "return_existing": True,  # so this may be repeated
        }
        fix = "check the trainer adapter's backend: base_url, entity, project, name and base_model"
        answer = await self.endpoint.retry(lambda: self.request("POST", MODELS, fix=fix, body=body))
        self._model = self._parse(ARTModelAnswer, answer, MODELS, "a model")
        return Serving(self.endpoint.url, self.key)

    async def check_access(self) -> None:
        """Checks that the service answers.

        Raises:
            BackendError: It does not.
        """
        await self.endpoint.retry(self.get_step)

    async def get_step(self) -> int:
        """Returns the step of the newest checkpoint; 0 where there is none."""
        path = f"{MODELS}/{quote(self._require_model().id, safe='')}/checkpoints"
        answer = await self.request("GET", path, query={"limit": "1", "order": "desc"})
        page = self._parse(Page[CheckpointAnswer], answer, path, "a list of checkpoints")
        return max((entry.step for entry in page.data or []), default=0)

    async def find_step_after(self, step: int) -> int | None:
        """Returns the first step after one; None: there is none yet."""
        later = [found for found in await self._list_steps() if found > step]
        return min(later, default=None)

    async def start_job(self, step: int, groups: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
        """Starts a job and returns its id; a request is never repeated here, since the service has no key for it.

        Raises:
            SubmissionLost: There was no answer, or not one with an id: the job may have been started.
            RetryableError: The service did not take the job now.
            BackendError: It refuses the job.
        """
        body = {"model_id": self._require_model().id, "trajectory_groups": groups, "experimental_config": settings}
        fix = "check the trainer adapter's training"
        try:
            return self._parse(ARTJobAnswer, await self.request("POST", JOBS, fix=fix, body=body), JOBS, "a job").id
        except RetryableError as error:
            if error.was_refused:
                raise
            raise SubmissionLost(str(error)) from None
        except UnexpectedAnswer as error:
            raise SubmissionLost(str(error)) from None

    async def retrieve_job(self, id_: str) -> HostedJob:
        """Returns a job as its events tell."""
        if id_.startswith(AFTER_STEP):
            return await self.retrieve_by_step(id_)
        events = self._events.setdefault(id_, [])
        await self._fetch_events(id_, events)
        metrics = average_metrics([event.data or {} for event in events if event.type == STEP])
        kinds = {event.type: event for event in events}
        if FAILED in kinds:
            found = EventData.model_validate(kinds[FAILED].data or {}).error_message
            return self.make_job(id_, TrainingStatusEnum.FAILED, error=found or "training_failed", metrics=metrics)
        if ENDED in kinds:
            base = self._base_steps.get(id_)
            step = await (self.get_step() if base is None else self.find_step_after(base))
            if step is None:  # the checkpoint is listed a little later than the event
                return self.wait_for_step(id_, "the job has ended", metrics)
            return self.make_job(id_, TrainingStatusEnum.COMPLETED, step=step, metrics=metrics)
        running = TrainingStatusEnum.RUNNING if STARTED in kinds else TrainingStatusEnum.PENDING
        return self.make_job(id_, running, metrics=metrics)

    async def keep_steps(self, steps: Sequence[int]) -> None:
        """Deletes all checkpoints but these and the newest.

        Raises:
            BackendError: The service could not delete them.
        """
        path = f"{MODELS}/{quote(self._require_model().id, safe='')}/checkpoints"

        async def delete() -> None:
            known = await self._list_steps()
            old = [step for step in known if step not in steps and step != max(known)]
            if old:
                await self.request("DELETE", path, body={"steps": old})

        await self.endpoint.retry(delete)

    def name_step(self, step: int) -> str:
        """Returns the name under which the weights of one step are served."""
        model = self._require_model()
        return f"wandb-artifact:///{model.entity}/{model.project}/{model.name}:step{step}"

    async def _list_steps(self) -> list[int]:
        path = f"{MODELS}/{quote(self._require_model().id, safe='')}/checkpoints"
        entries = await self._list(path, Page[CheckpointAnswer], {"limit": "100", "order": "desc"}, "checkpoints")
        return [entry.step for entry in entries]

    async def _fetch_events(self, id_: str, events: list[EventAnswer]) -> None:
        """Adds the events that are not known yet."""
        path = f"{JOBS}/{quote(id_, safe='')}/events"
        query = {"after": events[-1].id} if events else {}
        known = {event.id for event in events}
        found = await self._list(path, Page[EventAnswer], query, "events")
        events += [event for event in found if event.id not in known]

    async def _list(self, path: str, kind: Any, query: Mapping[str, str], what: str) -> list[Any]:
        """Returns the entries of every page.

        Raises:
            UnexpectedAnswer: A page is odd, or the list does not end.
        """
        entries: list[Any] = []
        query, seen = dict(query), set[str]()
        while True:
            answer = await self.request("GET", path, query=query)
            page = self._parse(kind, answer, path, f"a list of {what}")
            found = page.data or []
            entries += found
            if not page.has_more or not found:
                return entries
            last = found[-1].id
            if last in seen or len(seen) >= MAX_PAGES:
                raise UnexpectedAnswer(f"{self.endpoint.url}{path}: the list does not end; check backend.base_url")
            seen.add(last)
            query["after"] = last

    def _parse(self, kind: Any, answer: Any, path: str, what: str) -> Any:
        try:
            return parse_answer(kind, answer, f"{self.endpoint.url}{path}", what)
        except UnexpectedAnswer as error:
            raise UnexpectedAnswer(f"{self.endpoint.redact(str(error))}; check backend.base_url") from None

    def _require_model(self) -> ARTModelAnswer:
        if self._model is None:
            raise BackendError(
                f"{self.endpoint.url}: the model {describe_json(self.backend.name)} is not registered yet"
            )
        return self._model
