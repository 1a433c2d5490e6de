"""A session at a server of `_type: http`: each call is retried, and has its effect once."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from reinforge.adapters.described_policy import DescribedPolicy
from reinforge.config.schema import TrainerAdapterConfig
from reinforge.errors import BackendError, BackendUnavailable
from reinforge.protocols.service import KEY_REJECTED, NOT_FOUND
from reinforge.protocols.sessions import wire
from reinforge.rollout.isolation.worker_protocol import load_error
from reinforge.rollout.models.endpoint_config import EndpointConfig, validate_key, validate_url
from reinforge.rollout.models.openai_http import OpenAIEndpoint, RequestRejected, RetryableError
from reinforge.types.request import Message, ModelReply, ModelRequest, TokenLogprobs
from reinforge.types.sample import FloatArray

logger = logging.getLogger(__name__)

A = TypeVar("A", bound=BaseModel)
HEARTBEATS = 4  # heartbeats within the time after which a server may end a session


class HttpSession:
    """One session.

    Attributes:
        description: What the server says about the session's policy; None: it is not open.
    """

    def __init__(self, config: HttpAdapterConfig):
        self._endpoint = OpenAIEndpoint(config.endpoint, config.url, config.api_key)
        self.description: wire.SessionDescription | None = None
        self._beating: asyncio.Task[None] | None = None

    async def open(self, **settings: Any) -> wire.SessionDescription:
        asked = wire.OpenSession(key=secrets.token_hex(16), **settings)
        self.description = await self._call(wire.SessionDescription, "POST", "", asked)
        self._beating = asyncio.create_task(self._beat())
        return self.description

    @property
    def id(self) -> str:
        if self.description is None:
            raise BackendError("the http adapter is not initialized; call initialize() first")
        return self.description.id

    @property
    def model(self) -> str:
        return "" if self.description is None else self.description.model_name

    async def _beat(self) -> None:
        assert self.description is not None
        while True:
            await asyncio.sleep(self.description.lease_s / HEARTBEATS)
            try:
                await self._endpoint.send("GET", f"{wire.SESSIONS}/{self.id}")
            except (RetryableError, BackendError) as error:
                logger.debug("the server did not answer a heartbeat: %s", error)

    async def ask(self, kind: type[A], method: str, path: str, call: BaseModel | None = None, **query: str) -> A:
        answer = await self._call(kind, method, f"/{self.id}/{path}", call, query)
        if isinstance(answer, wire.SessionAnswer) and answer.raised is not None:
            raise load_error(answer.raised)
        return answer

    async def submit(self, kind: type[A], job: wire.SentJob) -> A:
        return await self.ask(kind, "POST", "jobs", job)

    async def save(self, version: int, keep: list[str] | None) -> str:
        name = secrets.token_hex(16)
        await self.ask(wire.WeightsAnswer, "PUT", f"saves/{name}", wire.SaveCall(version=version, keep=keep))
        return f"{self.id}/{name}"

    async def restore(self, saved: str, version: int) -> wire.WeightsAnswer:
        session, _, save = saved.partition("/")
        return await self.ask(
            wire.WeightsAnswer, "POST", "restore", wire.RestoreCall(session=session, save=save, version=version)
        )

    async def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
            self._beating = None
        if self.description is not None:
            try:
                await self._endpoint.send("DELETE", f"{wire.SESSIONS}/{self.id}")
            except (RetryableError, BackendError) as error:
                logger.warning("the session %s could not be closed, so it will expire: %s", self.id, error)
            self.description = None
        await self._endpoint.close()

    async def _call(
        self, kind: type[A], method: str, path: str, call: BaseModel | None, query: Mapping[str, str] | None = None
    ) -> A:
        body = None if call is None else call.model_dump(mode="json")
        where = f"{wire.SESSIONS}{path}"
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
    if error.status in KEY_REJECTED:
        return BackendError(f"{error}; check the trainer adapter's api_key")
    if error.status == NOT_FOUND and is_open and "session_not_found" in str(error):
        return BackendUnavailable(f"{error}; resume the run, which opens a new one")
    if error.status == NOT_FOUND and not is_open and "model_not_found" not in str(error):
        return BackendError(f"{error}; check url: the server must be a `reinforge serve --sessions`")
    return error


class HttpAdapterConfig(TrainerAdapterConfig, name="http"):
    """Samples and trains on a `reinforge serve --sessions` elsewhere, which has the model."""

    model_config = ConfigDict(hide_input_in_errors=True)  # a key with a line break must not end up in a message
    key_aliases: ClassVar[dict[str, str]] = {"base_url": "url"}

    url: str = Field(description="URL of the server, such as http://gpu1:8000. `base_url` is also accepted.")
    api_key: SecretStr | None = Field(
        default=None, description="Key of the server. Write ${VAR}, not the key itself; null: no key is sent."
    )
    base_model: str | None = Field(
        default=None,
        min_length=1,
        description="The server's name of the model to train; null: finetuning.policy.model.",
    )
    timeout_s: float = Field(default=600.0, gt=0, description="Time limit of one attempt at a request in seconds.")
    max_retries: int = Field(default=4, ge=0, description="Retries after 408, 409, 429, 5xx and lost connections.")
    max_connections: int = Field(default=64, ge=1, description="Maximum number of concurrent requests.")

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        return validate_url(url).removesuffix("/v1")

    @field_validator("api_key")
    @classmethod
    def _check_key(cls, key: SecretStr | None) -> SecretStr | None:
        return None if key is None else validate_key(key)

    @property
    def endpoint(self) -> EndpointConfig:
        return EndpointConfig(
            timeout_s=self.timeout_s, max_retries=self.max_retries, max_connections=self.max_connections
        )


class HttpPolicy(DescribedPolicy):
    def __init__(self, session: HttpSession, description: wire.SessionDescription):
        super().__init__(description, description.version)
        self._session = session

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Samples one reply; if the response is lost, another one is sampled."""
        answer = await self._session.ask(wire.SampleAnswer, "POST", "sample", wire.SampleCall(request=request))
        if answer.reply is None:
            raise BackendError("the server answered without a reply")
        return self.note_version(answer.reply)

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        call = wire.ScoreCall(token_ids=[list(map(int, row)) for row in token_ids])
        answer = await self._session.ask(wire.ScoreAnswer, "POST", "score", call)
        return [np.asarray(row, np.float32) for row in answer.logprobs]

    async def encode(self, request: ModelRequest, reply: Message) -> TokenLogprobs:
        answer = await self._session.ask(
            wire.EncodeAnswer, "POST", "encode", wire.EncodeCall(request=request, reply=reply)
        )
        if answer.tokens is None:
            raise BackendError("the server answered without tokens")
        return answer.tokens

    async def publish(self, version: int) -> None:
        answer = await self._session.ask(wire.WeightsAnswer, "POST", "publish", wire.PublishCall(version=version))
        self._version = answer.version

    async def fingerprint(self) -> str:
        return (await self._session.ask(wire.WeightsAnswer, "GET", "fingerprint")).fingerprint

    def follow(self, version: int) -> None:
        self._version = version
