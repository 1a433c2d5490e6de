"""Client of OpenAI's fine-tuning API: each file is uploaded once and each job created once, even after a crash.

A file's name contains the SHA-256 of its content, so an existing copy is reused. A job's metadata contains a hash that
identifies it. Before a job is created, the service is searched for that hash, so a lost response, or a process that
died before it stored the job's id, does not lead to a second job.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from reinforge.errors import BackendError
from reinforge.protocols.service import KEY_REJECTED, NOT_FOUND, Entry, HostedJob, HostedService, Page
from reinforge.rollout.models.openai_answers import Count, ErrorText, Name, describe_json
from reinforge.types.job import JOB_STATUS, parse_job_status

logger = logging.getLogger(__name__)

FILES = "/files"
JOBS = "/fine_tuning/jobs"
JOB_KEY = "reinforge_job"  # metadata key of the hash that identifies a job
JOBS_PER_PAGE = 100


class FileAnswer(Entry):
    filename: str | None = None
    bytes: int | None = None
    status: str | None = None


class JobAnswer(Entry):
    status: Name
    fine_tuned_model: str | None = None
    error: ErrorText = None
    trained_tokens: Count = None
    metadata: dict[str, Any] | None = None


class FineTuningService(HostedService):
    def find_fix(self, status: int, method: str, path: str) -> str | None:
        if status in KEY_REJECTED:
            return "check the trainer adapter's api_key, or OPENAI_API_KEY"
        if status == NOT_FOUND and path in (JOBS, FILES):
            return "check base_url: this service may have no fine-tuning API"
        if status == NOT_FOUND:
            return "the job may have been deleted, or created with the key of another account"
        if method == "POST" and path == JOBS:
            return "check the trainer adapter's base_model, suffix and hyperparameters"
        return None

    async def check_access(self) -> None:
        query = {"limit": "1"}
        await self.endpoint.retry(lambda: self.ask(Page[Entry], "a list of jobs", "GET", JOBS, query=query))

    async def upload_once(self, content: bytes) -> str:
        """Returns the id of the file with this content, and uploads it if the service does not have it."""
        name = f"reinforge-{hashlib.sha256(content).hexdigest()}.jsonl"

        async def find_or_upload() -> str:
            async for file in self.iterate_pages(FILES, Page[FileAnswer], {"purpose": "fine-tune", "limit": "10000"}):
                if file.filename == name and file.bytes == len(content) and file.status != "error":
                    return file.id
            form = (name, content, {"purpose": "fine-tune"})
            return (await self.ask(FileAnswer, "a file", "POST", FILES, file=form)).id

        return await self.endpoint.retry(find_or_upload)

    async def create_job_once(self, key: str, body: Mapping[str, Any]) -> HostedJob:
        """Returns the job with a key, and creates it unless one exists that has not failed or been cancelled."""

        async def find_or_create() -> HostedJob:
            query = {"limit": str(JOBS_PER_PAGE), f"metadata[{JOB_KEY}]": key}
            async for entry in self.iterate_pages(JOBS, Page[JobAnswer], query):
                if (entry.metadata or {}).get(JOB_KEY) != key:
                    continue  # a job of another program, whose status may be unknown here
                job = self._read_job(entry)
                if not job.ended_without_model:
                    logger.info("found the fine-tuning job %s (%s); not creating another", job.id, job.raw_status)
                    return job
            created = await self._ask_job("POST", JOBS, body=body)
            if created.metadata.get(JOB_KEY) != key:
                logger.warning(
                    "%s does not store the metadata of jobs: if a response is lost, the job may be created twice",
                    self.endpoint.url,
                )
            return created

        return await self.endpoint.retry(find_or_create)

    async def retrieve_job(self, id_: str) -> HostedJob:
        return await self._ask_job("GET", f"{JOBS}/{quote(id_, safe='')}")

    async def cancel(self, id_: str) -> HostedJob:
        path = f"{JOBS}/{quote(id_, safe='')}/cancel"
        return await self.cancel_unless_ended(id_, lambda: self._ask_job("POST", path))

    async def _ask_job(self, method: str, path: str, **arguments: Any) -> HostedJob:
        return self._read_job(await self.ask(JobAnswer, "a fine-tuning job", method, path, **arguments))

    def _read_job(self, answer: JobAnswer) -> HostedJob:
        try:
            status = parse_job_status(answer.status)
        except BackendError:
            what = f"unknown job status {describe_json(answer.status)}; known: {', '.join(JOB_STATUS)}"
            text = self.endpoint.redact(f"{self.endpoint.url}{JOBS}/{describe_json(answer.id)[1:-1]}: {what}")
            raise BackendError(text) from None
        return HostedJob(
            id=answer.id,
            raw_status=answer.status,
            status=status,
            fine_tuned_model=answer.fine_tuned_model or None,
            error=self.endpoint.redact(answer.error or "") or None,
            trained_tokens=answer.trained_tokens,
            metadata=answer.metadata or {},
        )
