"""What the clients of all training services have in common: JSON answers, lists of many pages, and jobs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BeforeValidator, ConfigDict

from reinforge.bounded import load_json
from reinforge.limits import get_limits
from reinforge.rollout.models.openai_answers import A, Answer, Name, parse_answer
from reinforge.rollout.models.openai_http import (
    OpenAIEndpoint,
    RequestRejected,
    RetryableError,
    UnexpectedAnswer,
    extract_error_message,
)
from reinforge.types.job import TrainingStatusEnum

KEY_REJECTED = (401, 403)
NOT_FOUND = 404


class Entry(Answer):
    """What every entry of a list has; the id of a page's last entry leads to the next page. It may be a number."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    id: Name


E = TypeVar("E", bound=Entry)


class Page(Answer, Generic[E]):
    """One page of a list, newest entry first; some services send null for an empty list."""

    data: list[E] | None
    has_more: Annotated[bool, BeforeValidator(lambda value: False if value is None else value)] = False


@dataclass(frozen=True, slots=True)
class HostedJob:
    """A fine-tuning job as the service reports it."""

    id: str
    raw_status: str  # the status in the service's own term, such as "validating_files"
    status: TrainingStatusEnum
    fine_tuned_model: str | None = None
    error: str | None = None  # the service's error code and message
    trained_tokens: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)  # what the job was created with
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Further facts for the job's record, such as the number of optimizer steps."""

    @property
    def ended_without_model(self) -> bool:
        return self.status in (TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED)


class HostedService(ABC):
    """A training service."""

    url_setting = "base_url"

    def __init__(self, endpoint: OpenAIEndpoint):
        self.endpoint = endpoint

    @abstractmethod
    async def check_access(self) -> None:
        """Raises `BackendError` if the service does not answer, or rejects the key."""

    @abstractmethod
    async def retrieve_job(self, id_: str) -> HostedJob:
        """Returns a job from one attempt; a `RetryableError` may be temporary, another `BackendError` is final."""

    @abstractmethod
    async def cancel(self, id_: str) -> HostedJob:
        """Cancels a job and returns it, or one that has ended before; raises `BackendError` if it cannot."""

    async def cancel_unless_ended(self, id_: str, cancel: Callable[[], Awaitable[HostedJob]]) -> HostedJob:
        """Returns what `cancel` returns, or, if the service refuses because the job has ended, the job."""

        async def cancel_or_find() -> HostedJob:
            try:
                return await cancel()
            except RequestRejected:
                job = await self.retrieve_job(id_)
                if job.status.is_terminal:
                    return job
                raise

        return await self.endpoint.retry(cancel_or_find)

    def find_fix(self, status: int, method: str, path: str) -> str | None:
        """Returns what the user can do about a rejected request; None: the service's own message has to suffice."""
        return None

    async def request(self, method: str, path: str, **arguments: Any) -> Any:
        """Returns the JSON of the response to one request, None for an empty one; arguments as for the endpoint.

        A `RetryableError` may be temporary; a `RequestRejected` has the service's refusal, with `find_fix`.
        """
        try:
            text = await self.endpoint.send(method, path, **arguments)
        except RequestRejected as error:
            fix = self.find_fix(error.status, method, path)
            raise RequestRejected(f"{error}; {fix}" if fix else str(error), error.status) from None
        try:
            return load_json(text) if text.strip() else None
        except ValueError:
            shown = self.endpoint.redact(extract_error_message(text))
            raise RetryableError(f"{self.endpoint.url}{path}: expected JSON, found: {shown}") from None

    async def ask(self, kind: type[A], what: str, method: str, path: str, **arguments: Any) -> A:
        """Returns the response to one request as its typed model; an `UnexpectedAnswer` if it has another shape."""
        answer = await self.request(method, path, **arguments)
        try:
            return parse_answer(kind, answer, f"{self.endpoint.url}{path}", what)
        except UnexpectedAnswer as error:
            raise UnexpectedAnswer(f"{self.endpoint.redact(str(error))}; check {self.url_setting}") from None

    async def iterate_pages(self, path: str, kind: type[Page[E]], query: Mapping[str, str]) -> AsyncIterator[E]:
        """Yields the entries of every page; an `UnexpectedAnswer` if one is odd, sent again, or above `list_pages`."""
        after: dict[str, str] = {}
        seen: set[str] = set()
        while True:
            page = await self.ask(kind, "a page of a list", "GET", path, query={**query, **after})
            entries = page.data or []
            for entry in entries:
                yield entry
            if not page.has_more or not entries:
                return
            last = entries[-1].id
            most = get_limits().list_pages
            if last in seen or len(seen) >= most:
                what = f"the page after {last} was sent twice" if last in seen else f"there are over {most} pages"
                text = f"the list does not end: {what}, and has_more is still true; check {self.url_setting}"
                raise UnexpectedAnswer(self.endpoint.redact(f"{self.endpoint.url}{path}: {text}"))
            seen.add(last)
            after = {"after": last}

    async def close(self) -> None:
        await self.endpoint.close()
