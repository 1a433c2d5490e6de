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
from typing import Any, ClassVar
from urllib.parse import quote

from pydantic import Field, SecretStr

from reinforge.errors import BackendError
from reinforge.protocols.art.client import ARTClient, Serving, SubmissionLost, average_metrics
from reinforge.protocols.art.config import AFTER_STEP, ARTTrainerAdapterConfig
from reinforge.protocols.service import Entry, HostedJob, Page
from reinforge.rollout.models.openai_answers import Answer, ErrorText, Name, describe_json
from reinforge.rollout.models.openai_http import RetryableError, UnexpectedAnswer
from reinforge.types.job import TrainingStatusEnum

MODELS = "/preview/models"
JOBS = "/preview/training-jobs"
STARTED, STEP, ENDED, FAILED = "training_started", "gradient_step", "training_ended", "training_failed"


class ARTModelAnswer(Entry):
    entity: Name
    project: Name
    name: Name


class CheckpointAnswer(Entry):
    step: int = Field(ge=0)


class EventData(Answer):
    error_message: ErrorText = None


class EventAnswer(Entry):
    """One event of a job; kinds that are not known are ignored."""

    type: Name
    data: dict[str, Any] | None = None


class ARTTrainingService(ARTClient):
    fixes: ClassVar[dict[str, str]] = {
        MODELS: "check the trainer adapter's backend: base_url, entity, project, name and base_model",
        JOBS: "check the trainer adapter's training",
    }

    def __init__(self, config: ARTTrainerAdapterConfig):
        self.key = SecretStr(config.backend.api_key)
        super().__init__(config, self.key)
        self._model: ARTModelAnswer | None = None
        self._events: dict[str, list[EventAnswer]] = {}

    async def connect(self) -> Serving:
        body = {
            "entity": self.backend.entity,
            "project": self.backend.project,
            "name": self.backend.name,
            "base_model": self.backend.base_model,
            "return_existing": True,  # so this may be repeated
        }
        self._model = await self.endpoint.retry(lambda: self.ask(ARTModelAnswer, "a model", "POST", MODELS, body=body))
        return Serving(self.endpoint.url, self.key)

    async def check_access(self) -> None:
        await self.endpoint.retry(self.get_step)

    async def get_step(self) -> int:
        query = {"limit": "1", "order": "desc"}
        page = await self.ask(Page[CheckpointAnswer], "a list of checkpoints", "GET", self._checkpoints, query=query)
        return max((entry.step for entry in page.data or []), default=0)

    async def find_step_after(self, step: int) -> int | None:
        later = [found for found in await self._list_steps() if found > step]
        return min(later, default=None)

    async def start_job(self, step: int, groups: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
        """Starts a job and returns its id; a request is never repeated here, since the service has no key for it."""
        body = {"model_id": self._require_model().id, "trajectory_groups": groups, "experimental_config": settings}
        try:
            return (await self.ask(Entry, "a job", "POST", JOBS, body=body)).id
        except RetryableError as error:
            if error.was_refused:
                raise
            raise SubmissionLost(str(error)) from None
        except UnexpectedAnswer as error:
            raise SubmissionLost(str(error)) from None

    async def retrieve_job(self, id_: str) -> HostedJob:
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
        async def delete() -> None:
            known = await self._list_steps()
            old = [step for step in known if step not in steps and step != max(known)]
            if old:
                await self.request("DELETE", self._checkpoints, body={"steps": old})

        await self.endpoint.retry(delete)

    def name_step(self, step: int) -> str:
        model = self._require_model()
        return f"wandb-artifact:///{model.entity}/{model.project}/{model.name}:step{step}"

    @property
    def _checkpoints(self) -> str:
        return f"{MODELS}/{quote(self._require_model().id, safe='')}/checkpoints"

    async def _list_steps(self) -> list[int]:
        pages = self.iterate_pages(self._checkpoints, Page[CheckpointAnswer], {"limit": "100", "order": "desc"})
        return [entry.step async for entry in pages]

    async def _fetch_events(self, id_: str, events: list[EventAnswer]) -> None:
        query = {"after": events[-1].id} if events else {}
        known = {event.id for event in events}
        found = self.iterate_pages(f"{JOBS}/{quote(id_, safe='')}/events", Page[EventAnswer], query)
        events += [event async for event in found if event.id not in known]

    def _require_model(self) -> ARTModelAnswer:
        if self._model is None:
            raise BackendError(
                f"{self.endpoint.url}: the model {describe_json(self.backend.name)} is not registered yet"
            )
        return self._model
