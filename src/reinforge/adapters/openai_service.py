"""OpenAI's fine-tuning service: files and jobs, each made once however often it is asked for.

A file's name holds the SHA-256 of its content, so an equal one that is there is used again. A job's metadata holds a
hash of what it is, and before one is made the service is asked for it: a reply that was lost, or a process that died
before it could note the id, does not make a second one.
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
from reinforge.rollout.openai_http import OpenAIEndpoint, Refused, TryAgain, what_is_said
from reinforge.types.job import TrainingStatusEnum, job_status

logger = logging.getLogger(__name__)

JOBS = "/fine_tuning/jobs"
JOB_KEY = "reinforge_job"
"""Key of the metadata that finds a job again."""
PAGE = 100


@dataclass(frozen=True, slots=True)
class HostedJob:
    """A job as the service tells it.

    Attributes:
        id: The service's name of it.
        word: Its status, in the service's word.
        status: The same in ours.
        fine_tuned_model: What it made, or None.
        error: The service's code and message, or None.
        trained_tokens: Tokens trained, or None.
        metadata: What it was made with.
    """

    id: str
    word: str
    status: TrainingStatusEnum
    fine_tuned_model: str | None
    error: str | None
    trained_tokens: int | None
    metadata: Mapping[str, str]

    @property
    def is_lost(self) -> bool:
        """True if nothing will come of it any more."""
        return self.status in (TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED)


class FineTuningService:
    """The service behind an endpoint.

    Args:
        endpoint: Its connections.
    """

    def __init__(self, endpoint: OpenAIEndpoint):
        self.endpoint = endpoint

    async def check(self) -> None:
        """Makes sure that the service answers and takes the key.

        Raises:
            BackendError: It does not, with what it says.
        """
        await self.endpoint.retried(lambda: self._answer("GET", JOBS, query={"limit": "1"}))

    async def file_of(self, content: bytes) -> str:
        """Returns the id of the file with this content; it is sent only if it is not there.

        Raises:
            BackendError: It cannot be sent.
        """
        name = f"reinforge-{hashlib.sha256(content).hexdigest()}.jsonl"

        async def find_or_send() -> str:
            async for file in self._pages("/files", {"purpose": "fine-tune", "limit": "10000"}):
                if file.get("filename") == name and file.get("bytes") == len(content) and file.get("status") != "error":
                    return str(file["id"])
            sent = await self._answer("POST", "/files", file=(name, content, {"purpose": "fine-tune"}))
            return str(sent["id"])

        return await self.endpoint.retried(find_or_send)

    async def job_of(self, key: str, body: Mapping[str, Any]) -> HostedJob:
        """Returns the job of a key; it is made only if the service has none of which anything can come.

        Args:
            key: Hash of what the job is.
            body: What it is made by; its metadata holds the key.

        Raises:
            BackendError: It cannot be made.
        """

        async def find_or_make() -> HostedJob:
            async for told in self._pages(JOBS, {"limit": str(PAGE), f"metadata[{JOB_KEY}]": key}):
                found = self._job(told)
                if found.metadata.get(JOB_KEY) == key and not found.is_lost:
                    logger.info("the service has the job %s (%s) already; it is used", found.id, found.word)
                    return found
            made = self._job(await self._answer("POST", JOBS, body=body))
            if made.metadata.get(JOB_KEY) != key:
                logger.warning(
                    "%s keeps no metadata of jobs: should its answer be lost, a job may be made twice",
                    self.endpoint.url,
                )
            return made

        return await self.endpoint.retried(find_or_make)

    async def look_at(self, id_: str) -> HostedJob:
        """Returns a job by one call, which is not tried again.

        Raises:
            TryAgain: No usable answer.
            BackendError: The service knows no such job, or says a status that nobody knows.
        """
        return self._job(await self._answer("GET", f"{JOBS}/{quote(id_, safe='')}"))

    async def cancel(self, id_: str) -> HostedJob:
        """Cancels a job and returns how it ended: it may have been done before.

        Raises:
            BackendError: It could not be cancelled.
        """
        path = f"{JOBS}/{quote(id_, safe='')}"

        async def cancel() -> HostedJob:
            try:
                return self._job(await self._answer("POST", f"{path}/cancel"))
            except Refused:
                found = self._job(await self._answer("GET", path))
                if found.status.is_terminal:
                    return found
                raise

        return await self.endpoint.retried(cancel)

    async def _pages(self, path: str, query: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
        """Yields the entries of every page, the newest first."""
        after: dict[str, str] = {}
        while True:
            page = await self._answer("GET", path, query={**query, **after})
            entries = page.get("data") or []
            for entry in entries:
                yield entry
            if not page.get("has_more") or not entries:
                return
            after = {"after": str(entries[-1]["id"])}

    async def _answer(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        """Returns the JSON object that one call answers; anything else is what a proxy says, and may pass."""
        text = await self.endpoint.once(method, path, **arguments)
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            said = self.endpoint.clean(what_is_said(text))
            raise TryAgain(f"{self.endpoint.url}{path}: the answer is no JSON object: {said}")
        return answer

    def _job(self, told: Mapping[str, Any]) -> HostedJob:
        try:
            id_, word = str(told["id"]), str(told["status"])
        except KeyError as missing:
            raise BackendError(f"{self.endpoint.url}{JOBS}: the answer is no job: it has no {missing}") from None
        tokens, error = told.get("trained_tokens"), told.get("error") or {}
        said = ": ".join(str(error[key]) for key in ("code", "message") if error.get(key))
        return HostedJob(
            id=id_,
            word=word,
            status=job_status(word),
            fine_tuned_model=told.get("fine_tuned_model"),
            error=self.endpoint.clean(said) or None,
            trained_tokens=tokens if isinstance(tokens, int) else None,
            metadata=told.get("metadata") or {},
        )
