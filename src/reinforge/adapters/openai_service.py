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
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from reinforge.errors import BackendError
from reinforge.rollout.openai_http import OpenAIEndpoint, RequestRejected, RetryableError, extract_error_message
from reinforge.types.job import TrainingStatusEnum, parse_job_status

logger = logging.getLogger(__name__)

JOBS = "/fine_tuning/jobs"
JOB_KEY = "reinforge_job"
"""Metadata key of the hash that identifies a job."""
JOBS_PER_PAGE = 100


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
    """

    id: str
    raw_status: str
    status: TrainingStatusEnum
    fine_tuned_model: str | None
    error: str | None
    trained_tokens: int | None
    metadata: Mapping[str, str]

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
        await self.endpoint.retry(lambda: self._request_json("GET", JOBS, query={"limit": "1"}))

    async def upload_once(self, content: bytes) -> str:
        """Returns the id of the file with this content, and uploads it if the service does not have it.

        Raises:
            BackendError: The upload failed.
        """
        name = f"reinforge-{hashlib.sha256(content).hexdigest()}.jsonl"

        async def find_or_upload() -> str:
            async for file in self._iterate_pages("/files", {"purpose": "fine-tune", "limit": "10000"}):
                if file.get("filename") == name and file.get("bytes") == len(content) and file.get("status") != "error":
                    return str(file["id"])
            sent = await self._request_json("POST", "/files", file=(name, content, {"purpose": "fine-tune"}))
            return str(sent["id"])

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
                job = self._parse_job(entry)
                if job.metadata.get(JOB_KEY) == key and not job.ended_without_model:
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

    async def _iterate_pages(self, path: str, query: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
        """Yields the entries of every page, newest first."""
        after: dict[str, str] = {}
        while True:
            page = await self._request_json("GET", path, query={**query, **after})
            entries = page.get("data") or []
            for entry in entries:
                yield entry
            if not page.get("has_more") or not entries:
                return
            after = {"after": str(entries[-1]["id"])}

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

    def _parse_job(self, entry: Mapping[str, Any]) -> HostedJob:
        try:
            id_, raw_status = str(entry["id"]), str(entry["status"])
        except KeyError as missing:
            message = f"expected a fine-tuning job, found an object without {missing}"
            raise BackendError(f"{self.endpoint.url}{JOBS}: {message}; check base_url") from None
        tokens, error = entry.get("trained_tokens"), entry.get("error") or {}
        error_text = ": ".join(str(error[key]) for key in ("code", "message") if error.get(key))
        try:
            status = parse_job_status(raw_status)
        except BackendError as unknown:
            raise BackendError(f"{self.endpoint.url}{JOBS}/{id_}: {unknown}") from None
        return HostedJob(
            id=id_,
            raw_status=raw_status,
            status=status,
            fine_tuned_model=entry.get("fine_tuned_model"),
            error=self.endpoint.redact(error_text) or None,
            trained_tokens=tokens if isinstance(tokens, int) else None,
            metadata=entry.get("metadata") or {},
        )


def _find_fix(status: int, method: str, path: str) -> str | None:
    """Returns what the user can do about a rejected request; None if the service's own message has to suffice."""
    if status in KEY_REJECTED:
        return "check the trainer adapter's api_key, or OPENAI_API_KEY"
    if status == NOT_FOUND and path in (JOBS, "/files"):
        return "check base_url: this service may have no fine-tuning API"
    if status == NOT_FOUND:
        return "the job may have been deleted, or created with the key of another account"
    if method == "POST" and path == JOBS:
        return "check the trainer adapter's base_model, suffix and hyperparameters"
    return None
