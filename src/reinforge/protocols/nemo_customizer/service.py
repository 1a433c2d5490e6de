"""Client of NeMo Customizer, its entity store and its data store: each dataset and each job is created once.

A dataset's name ends with a hash of its content, so runs never overwrite each other's data. A job's name is a hash that
identifies it: before a job is created, the service is searched for that name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import quote

from pydantic import BeforeValidator, Field

from reinforge.errors import BackendUnavailable, ConfigError, Problem
from reinforge.limits import get_limits
from reinforge.protocols.service import NOT_FOUND, Entry, HostedJob, HostedService
from reinforge.rollout.models.openai_answers import Answer, Name
from reinforge.rollout.models.openai_http import OpenAIEndpoint, RequestRejected
from reinforge.types.job import TrainingStatusEnum, parse_job_status

logger = logging.getLogger(__name__)

JOBS = "/v1/customization/jobs"
PAGE_SIZE = 100


class CustomizationJobAnswer(Entry):
    name: str | None = None
    output_model: str | None = None
    status: str | None = None


class Pagination(Answer):
    total_pages: int = 1


class CustomizationPage(Answer):
    data: list[CustomizationJobAnswer] | None = None
    pagination: Annotated[Pagination, BeforeValidator(lambda value: value or {})] = Field(default_factory=Pagination)


class CustomizationStatusAnswer(Answer):
    """The status of a job; the share done is absent until training starts."""

    status: Name
    percentage_done: float | None = None


class NeMoCustomizerService(HostedService):
    """The services of one namespace, with its token, which may be empty."""

    url_setting = "entity_host"

    def __init__(self, endpoint: OpenAIEndpoint, datastore: str, token: str, namespace: str):
        super().__init__(endpoint)
        self.datastore, self.token, self.namespace = datastore, token, namespace
        self._models: dict[str, str | None] = {}

    async def check_access(self) -> None:
        await self.endpoint.retry(lambda: self._list_page(1, size=1))

    async def ensure_namespace(self) -> None:
        await self._create_once("/v1/namespaces", quote(self.namespace, safe=""), {"id": self.namespace})

    async def upload_once(self, name: str, files: Mapping[str, bytes]) -> None:
        """Uploads a dataset and registers it; uploading the same content again changes nothing."""
        repo = f"{self.namespace}/{name}"
        await asyncio.to_thread(self._upload, repo, files)
        body = {"name": name, "namespace": self.namespace, "files_url": f"hf://datasets/{repo}"}
        await self._create_once("/v1/datasets", f"{quote(self.namespace, safe='')}/{quote(name, safe='')}", body)

    async def _create_once(self, path: str, name: str, body: Mapping[str, Any]) -> None:
        async def find_or_create() -> None:
            try:
                await self.request("GET", f"{path}/{name}")
            except RequestRejected as error:
                if error.status != NOT_FOUND:
                    raise
                await self.request("POST", path, body=body)

        await self.endpoint.retry(find_or_create)

    def _upload(self, repo: str, files: Mapping[str, bytes]) -> None:
        try:
            from huggingface_hub import CommitOperationAdd, HfApi
        except ImportError:
            fix = "install it: pip install huggingface_hub"
            raise ConfigError(Problem("", "the NeMo data store needs the package huggingface_hub", fix)) from None
        api = HfApi(endpoint=f"{self.datastore}/v1/hf", token=self.token or False)
        added = [CommitOperationAdd(path_in_repo=path, path_or_fileobj=content) for path, content in files.items()]
        try:
            api.create_repo(repo, repo_type="dataset", exist_ok=True)
            api.create_commit(repo, added, repo_type="dataset", commit_message="reinforge")
        except Exception as error:  # noqa: BLE001  of whichever HTTP client huggingface_hub uses
            text = str(error).replace(self.token, "***") if self.token else str(error)
            raise BackendUnavailable(f"{self.datastore}: uploading {repo} failed: {text}") from None

    async def create_job_once(self, name: str, body: Mapping[str, Any]) -> HostedJob:
        """Returns the job with a name, and creates it unless one exists that has not failed or been cancelled."""

        async def find_or_create() -> HostedJob:
            number, pages = 1, 1
            while number <= min(pages, get_limits().list_pages):
                page = await self._list_page(number)
                for entry in page.data or []:
                    if entry.name != name:
                        continue
                    job = await self.retrieve_job(self._note(entry))
                    if not job.ended_without_model:
                        logger.info("found the customization job %s (%s); not creating another", job.id, job.raw_status)
                        return job
                number, pages = number + 1, page.pagination.total_pages
            job_body = {**body, "name": name}
            entry = await self.ask(CustomizationJobAnswer, "a customization job", "POST", JOBS, body=job_body)
            self._note(entry)
            return self._make_job(entry.id, entry.status or "created")

        return await self.endpoint.retry(find_or_create)

    async def retrieve_job(self, id_: str) -> HostedJob:
        path = f"{JOBS}/{quote(id_, safe='')}"
        answer = await self.ask(CustomizationStatusAnswer, "a status", "GET", f"{path}/status")
        if parse_job_status(answer.status) is TrainingStatusEnum.COMPLETED and not self._models.get(id_):
            self._note(await self.ask(CustomizationJobAnswer, "a job", "GET", path))
        return self._make_job(id_, answer.status, answer.percentage_done)

    async def cancel(self, id_: str) -> HostedJob:
        async def cancel() -> HostedJob:
            await self.request("POST", f"{JOBS}/{quote(id_, safe='')}/cancel")
            return await self.retrieve_job(id_)

        return await self.cancel_unless_ended(id_, cancel)

    async def _list_page(self, number: int, size: int = PAGE_SIZE) -> CustomizationPage:
        query = {"page": str(number), "page_size": str(size), "sort": "-created_at"}
        return await self.ask(CustomizationPage, "a list of jobs", "GET", JOBS, query=query)

    def _note(self, entry: CustomizationJobAnswer) -> str:
        self._models[entry.id] = entry.output_model
        return entry.id

    def _make_job(self, id_: str, raw_status: str, share: float | None = None) -> HostedJob:
        status = parse_job_status(raw_status)
        failed = f"the job ended with status {raw_status}" if status is TrainingStatusEnum.FAILED else None
        metrics = {} if share is None else {"percentage_done": share}
        return HostedJob(id_, raw_status, status, self._models.get(id_), failed, metrics=metrics)
