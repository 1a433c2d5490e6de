"""Client of OpenAI's fine-tuning API: each file is uploaded once and each job created once, even after a crash.

A file's name contains the SHA-256 of its content, so an existing copy is reused. A job's metadata contains a hash that
identifies it. Before a job is created, the service is searched for that hash, so a lost response, or a process that
died before it stored the job's id, does not lead to a second job.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from reinforge.errors import BackendError
from reinforge.protocols.answers import Entry, FileAnswer, JobAnswer, Page
from reinforge.rollout.models.openai_answers import A, describe_json, parse_answer
from reinforge.rollout.models.openai_http import (
    OpenAIEndpoint,
    RequestRejected,
    RetryableError,
    UnexpectedAnswer,
    extract_error_message,
)
from reinforge.types.job import JOB_STATUS, TrainingStatusEnum, parse_job_status

logger = logging.getLogger(__name__)

FILES = "/files"
JOBS = "/fine_tuning/jobs"
PAGES: dict[str, type[Page[Any]]] = {FILES: Page[FileAnswer], JOBS: Page[JobAnswer]}
JOB_KEY = "reinforge_job"
"""Metadata key of the hash that identifies a job."""
JOBS_PER_PAGE = 100
MAX_PAGES = 1000
"""Pages of one list; a service with more has most likely lost count of them."""

KEY_REJECTED = (401, 403)
NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class HostedJob:
    """A fine-tuning job as the service reports it.

    Attributes:
        id: The job's id at the service.
        raw_status: The status in the service's own term, such as "validating_files".
        status: The same as a `TrainingStatusEnum`.
        fine_tuned_model: The name of the new model, or None.
        error: The service's error code and message, or None.
        trained_tokens: Tokens trained, or None.
        metadata: The metadata that the job was created with.
        metrics: Further facts for the job's record, such as the number of optimizer steps.
    """

    id: str
    raw_status: str
    status: TrainingStatusEnum
    fine_tuned_model: str | None
    error: str | None
    trained_tokens: int | None
    metadata: Mapping[str, Any]
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ended_without_model(self) -> bool:
        """True if the job failed or was cancelled."""
        return self.status in (TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED)


class FineTuningService:
    """The fine-tuning API of one endpoint.

    Args:
        endpoint: The connection.
    """

    def __init__(self, endpoint: OpenAIEndpoint):
        self.endpoint = endpoint

    async def check_access(self) -> None:
        """Checks that the service answers and accepts the key.

        Raises:
            BackendError: It does not; the message includes the service's.
        """

        async def check() -> None:
            page = await self._request_json("GET", JOBS, query={"limit": "1"})
            self._parse(Page[Entry], page, JOBS, "a list of jobs")

        await self.endpoint.retry(check)

    async def upload_once(self, content: bytes) -> str:
        """Returns the id of the file with this content, and uploads it if the service does not have it.

        Raises:
            BackendError: The upload failed.
        """
        name = f"reinforge-{hashlib.sha256(content).hexdigest()}.jsonl"

        async def find_or_upload() -> str:
            async for file in self._iterate_pages(FILES, {"purpose": "fine-tune", "limit": "10000"}):
                if file.filename == name and file.bytes == len(content) and file.status != "error":
                    return str(file.id)
            sent = await self._request_json("POST", FILES, file=(name, content, {"purpose": "fine-tune"}))
            return self._parse(FileAnswer, sent, FILES, "a file").id

        return await self.endpoint.retry(find_or_upload)

    async def create_job_once(self, key: str, body: Mapping[str, Any]) -> HostedJob:
        """Returns the job with a key, and creates it unless one exists that has not failed or been cancelled.

        Args:
            key: The hash that identifies the job.
            body: The request that creates the job; its metadata contains the key.

        Raises:
            BackendError: The job could not be created.
        """

        async def find_or_create() -> HostedJob:
            async for entry in self._iterate_pages(JOBS, {"limit": str(JOBS_PER_PAGE), f"metadata[{JOB_KEY}]": key}):
                if (entry.metadata or {}).get(JOB_KEY) != key:
                    continue  # a job of another program, whose status may be unknown here
                job = self._read_job(entry)
                if not job.ended_without_model:
                    logger.info("found the fine-tuning job %s (%s); not creating another", job.id, job.raw_status)
                    return job
            created = self._parse_job(await self._request_json("POST", JOBS, body=body))
            if created.metadata.get(JOB_KEY) != key:
                logger.warning(
                    "%s does not store the metadata of jobs: if a response is lost, the job may be created twice",
                    self.endpoint.url,
                )
            return created

        return await self.endpoint.retry(find_or_create)

    async def retrieve_job(self, id_: str) -> HostedJob:
        """Returns a job from a single request without retries.

        Raises:
            RetryableError: The request failed in a way that may be temporary.
            BackendError: The service has no such job, or reports an unknown status.
        """
        return self._parse_job(await self._request_json("GET", f"{JOBS}/{quote(id_, safe='')}"))

    async def cancel(self, id_: str) -> HostedJob:
        """Cancels a job and returns it; the job may have ended before.

        Raises:
            BackendError: The job could not be cancelled.
        """
        path = f"{JOBS}/{quote(id_, safe='')}"

        async def cancel() -> HostedJob:
            try:
                return self._parse_job(await self._request_json("POST", f"{path}/cancel"))
            except RequestRejected:
                job = self._parse_job(await self._request_json("GET", path))
                if job.status.is_terminal:
                    return job
                raise

        return await self.endpoint.retry(cancel)

    async def _iterate_pages(self, path: str, query: Mapping[str, str]) -> AsyncIterator[Any]:
        """Yields the entries of every page, newest first, as the models that `PAGES` names.

        Raises:
            UnexpectedAnswer: A page is odd, leads to itself or to an earlier one, or there are over `MAX_PAGES`.
        """
        after: dict[str, str] = {}
        seen: set[str] = set()
        while True:
            answer = await self._request_json("GET", path, query={**query, **after})
            page = self._parse(PAGES[path], answer, path, "a page of a list")
            entries = page.data or []
            for entry in entries:
                yield entry
            if not page.has_more or not entries:
                return
            last = entries[-1].id
            if last in seen:
                raise self._make_endless_error(path, f"the page after {last} was sent twice")
            if len(seen) >= MAX_PAGES:
                raise self._make_endless_error(path, f"there are over {MAX_PAGES} pages")
            seen.add(last)
            after = {"after": last}

    def _make_endless_error(self, path: str, what: str) -> UnexpectedAnswer:
        problem = self.endpoint.redact(f"{what}, and has_more is still true")
        return UnexpectedAnswer(f"{self.endpoint.url}{path}: the list does not end: {problem}; check base_url")

    async def _request_json(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        """Returns the JSON object in the response to one request; anything else may be a proxy's and is retryable."""
        try:
            text = await self.endpoint.send(method, path, **arguments)
        except RequestRejected as error:
            fix = _find_fix(error.status, method, path)
            if fix is None:
                raise
            raise RequestRejected(f"{error}; {fix}", error.status) from None
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            shown = self.endpoint.redact(extract_error_message(text))
            raise RetryableError(f"{self.endpoint.url}{path}: expected a JSON object, found: {shown}")
        return answer

    def _parse(self, kind: type[A], answer: Any, path: str, what: str) -> A:
        try:
            return parse_answer(kind, answer, f"{self.endpoint.url}{path}", what)
        except UnexpectedAnswer as error:
            raise UnexpectedAnswer(f"{self.endpoint.redact(str(error))}; check base_url") from None

    def _parse_job(self, answer: Any) -> HostedJob:
        return self._read_job(self._parse(JobAnswer, answer, JOBS, "a fine-tuning job"))

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


def _find_fix(status: int, method: str, path: str) -> str | None:
    """Returns what the user can do about a rejected request; None if the service's own message has to suffice."""
    if status in KEY_REJECTED:
        return "check the trainer adapter's api_key, or OPENAI_API_KEY"
    if status == NOT_FOUND and path in (JOBS, FILES):
        return "check base_url: this service may have no fine-tuning API"
    if status == NOT_FOUND:
        return "the job may have been deleted, or created with the key of another account"
    if method == "POST" and path == JOBS:
        return "check the trainer adapter's base_model, suffix and hyperparameters"
    return None
