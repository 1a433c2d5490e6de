"""A session at a server of `_type: http`: each call is retried, and has its effect once."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from reinforge.errors import BackendError, BackendUnavailable
from reinforge.protocols.sessions.config import HttpAdapterConfig
from reinforge.protocols.sessions.wire import (
    SESSIONS,
    OpenSession,
    RestoreCall,
    SaveCall,
    SentJob,
    SessionAnswer,
    SessionDescription,
    WeightsAnswer,
)
from reinforge.rollout.isolation.worker_protocol import load_error
from reinforge.rollout.models.openai_http import OpenAIEndpoint, RequestRejected, RetryableError

logger = logging.getLogger(__name__)

A = TypeVar("A", bound=BaseModel)
NOT_FOUND = 404
KEY_REJECTED = (401, 403)
HEARTBEATS = 4
"""Signs of life within the time after which a server may end a session."""


class HttpSession:
    """One session.

    Args:
        config: How to reach the server.

    Attributes:
        description: What the server says about the session's policy; None: it is not open.
    """

    def __init__(self, config: HttpAdapterConfig):
        self._endpoint = OpenAIEndpoint(config.endpoint, config.url, config.api_key)
        self.description: SessionDescription | None = None
        self._beating: asyncio.Task[None] | None = None

    async def open(self, **settings: Any) -> SessionDescription:
        """Opens the session.

        Args:
            settings: Those of `OpenSession`, but for its key.

        Raises:
            BackendError: The server does not answer, or refuses.
        """
        asked = OpenSession(key=secrets.token_hex(16), **settings)
        self.description = await self._call(SessionDescription, "POST", "", asked)
        self._beating = asyncio.create_task(self._beat())
        return self.description

    @property
    def id(self) -> str:
        """The session's id.

        Raises:
            BackendError: It is not open.
        """
        if self.description is None:
            raise BackendError("the http adapter is not initialized; call initialize() first")
        return self.description.id

    @property
    def model(self) -> str:
        """The server's name of the model that it began with."""
        return "" if self.description is None else self.description.model_name

    async def _beat(self) -> None:
        """Shows the server that the client is there."""
        assert self.description is not None
        while True:
            await asyncio.sleep(self.description.lease_s / HEARTBEATS)
            try:
                await self._endpoint.send("GET", f"{SESSIONS}/{self.id}")
            except (RetryableError, BackendError) as error:
                logger.debug("the server did not answer a sign of life: %s", error)

    async def ask(self, kind: type[A], method: str, path: str, call: BaseModel | None = None, **query: str) -> A:
        """Returns the answer to one call of the session.

        Args:
            kind: Class of the answer.
            method: GET, POST or PUT.
            path: Below the session's.
            call: The body.
            query: Query parameters.

        Raises:
            BackendUnavailable: The server does not answer, or has ended the session.
            BackendError: It refuses.
            Exception: What the call raised at the server.
        """
        answer = await self._call(kind, method, f"/{self.id}/{path}", call, query)
        if isinstance(answer, SessionAnswer) and answer.raised is not None:
            raise load_error(answer.raised)
        return answer

    async def submit(self, kind: type[A], job: SentJob) -> A:
        """Returns the answer to a job, which is started once for each key."""
        return await self.ask(kind, "POST", "jobs", job)

    async def save(self, version: int, keep: list[str] | None) -> str:
        """Returns the name of the current weights, which the server keeps."""
        name = secrets.token_hex(16)
        await self.ask(WeightsAnswer, "PUT", f"saves/{name}", SaveCall(version=version, keep=keep))
        return f"{self.id}/{name}"

    async def restore(self, saved: str, version: int) -> WeightsAnswer:
        """Loads weights by their name and serves them as a version."""
        session, _, save = saved.partition("/")
        return await self.ask(
            WeightsAnswer, "POST", "restore", RestoreCall(session=session, save=save, version=version)
        )

    async def close(self) -> None:
        """Ends the session; what it has saved stays at the server."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
            self._beating = None
        if self.description is not None:
            try:
                await self._endpoint.send("DELETE", f"{SESSIONS}/{self.id}")
            except (RetryableError, BackendError) as error:
                logger.warning("the session %s could not be ended, so it ends by itself: %s", self.id, error)
            self.description = None
        await self._endpoint.close()

    async def _call(
        self, kind: type[A], method: str, path: str, call: BaseModel | None, query: Mapping[str, str] | None = None
    ) -> A:
        body = None if call is None else call.model_dump(mode="json")
        where = f"{SESSIONS}{path}"
        try:
            text = await self._endpoint.call(method, where, body=body, query=query or None)
        except RequestRejected as error:
            raise _explain(error, is_open=bool(path)) from None
        try:
            return kind.model_validate_json(text)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)[0]
            problem = f"{'.'.join(map(str, found['loc']))}: {found['msg']}"
            raise BackendError(f"{self._endpoint.url}{where}: unexpected answer: {problem}; check url") from None


def _explain(error: RequestRejected, *, is_open: bool) -> BackendError:
    """Returns a refusal with what the user can do about it."""
    if error.status in KEY_REJECTED:
        return BackendError(f"{error}; check the trainer adapter's api_key")
    if error.status == NOT_FOUND and is_open and "session_not_found" in str(error):
        return BackendUnavailable(f"{error}; resume the run, which opens a new one")
    if error.status == NOT_FOUND and not is_open and "model_not_found" not in str(error):
        return BackendError(f"{error}; check url: the server must be a `reinforge serve --sessions`")
    return error
