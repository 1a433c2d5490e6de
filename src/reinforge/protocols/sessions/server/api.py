"""The routes of sessions: runs elsewhere that sample and train here (`trainer_adapters._type: http`).

`protocols.sessions.wire` lists them. A session has its own engine, made of a model that the server's owner
allows. It ends when its client says so, when nothing was heard of the client for a long time, or, after a shorter
time, when another one needs its slot. What it has saved stays.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, TypeAdapter, ValidationError

from reinforge.dialects.chat_call import BadRequest
from reinforge.errors import BackendError, ContextOverflow, InvalidCall, ReinforgeError
from reinforge.files import make_private_folder
from reinforge.limits import get_limits
from reinforge.protocols.sessions import wire
from reinforge.protocols.sessions.server.session import TrainingSession, read_settings
from reinforge.rollout.http.access import read_body
from reinforge.rollout.http.exchange import check_body, read_beside
from reinforge.rollout.isolation.worker_protocol import dump_error
from reinforge.serving.loading import BaseModels, TrainingHost, find_bases
from reinforge.serving.routes import (
    LIMITS,
    READER,
    ApiError,
    Feature,
    abortable,
    hide_paths,
    read_bytes,
    refuse_invalid,
    write_json,
)
from reinforge.types.request import TokenLogprobs

logger = logging.getLogger(__name__)

MAX_WAIT_S = 30.0  # longest that one request waits for a job
B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How much sessions take."""

    max_sessions: int = 4  # most at a time; each holds a copy of its model
    lease_s: float = 60.0  # seconds without a request after which a session makes room for another one
    idle_s: float = 1800.0  # seconds without a request after which a session ends anyway
    max_job_bytes: int = 1 << 28


def _answering(
    handler: Callable[[SessionsApi, web.Request], Awaitable[wire.SessionAnswer]],
) -> Callable[[SessionsApi, web.Request], Awaitable[web.Response]]:
    @wraps(handler)
    async def answer(api: SessionsApi, request: web.Request) -> web.Response:
        try:
            found = await handler(api, request)
            if isinstance(found, wire.StatusAnswer) and found.status is not None and found.status.message:
                named = {"message": hide_paths(found.status.message)}
                found = wire.StatusAnswer(status=found.status.model_copy(update=named))
        except BadRequest:
            raise
        except ValidationError as error:
            raise refuse_invalid(error) from None
        except (ReinforgeError, ContextOverflow, InvalidCall, ValueError) as error:
            if isinstance(error, BackendError):
                logger.warning("a call of a session failed: %s", error)
            raised = dump_error(error)
            found = wire.SessionAnswer(raised={**raised, "text": hide_paths(raised["text"])})
        return web.Response(text=found.model_dump_json(), content_type="application/json")

    return answer


class SessionsApi(Feature):
    def __init__(self, bases: BaseModels, folder: Path, *, device: str = "auto", limits: SessionLimits | None = None):
        self._bases, self._folder, self._device = bases, folder, device
        self._limits = limits or SessionLimits()
        self._sessions: dict[str, TrainingSession] = {}
        self._by_key: dict[str, str] = {}
        self._opening = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    def routes(self) -> list[web.RouteDef]:
        one = f"{wire.SESSIONS}/{{id}}"
        return [
            web.post(wire.SESSIONS, self.open),
            web.get(one, self.show),
            web.delete(one, self.end),
            web.post(f"{one}/sample", self.sample),
            web.post(f"{one}/score", self.score),
            web.post(f"{one}/encode", self.encode),
            web.post(f"{one}/jobs", self.submit),
            web.get(f"{one}/jobs", self.show_job),
            web.post(f"{one}/publish", self.publish),
            web.get(f"{one}/fingerprint", self.show_fingerprint),
            web.put(f"{one}/saves/{{save:{wire.KEY_PATTERN[1:-1]}}}", self.save),
            web.post(f"{one}/restore", self.restore),
        ]

    async def start(self) -> None:
        make_private_folder(self._folder)
        self._watching = asyncio.create_task(self._end_idle())

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for session in list(self._sessions.values()):
            await self._end(session)

    async def _end_idle(self) -> None:
        while True:
            await asyncio.sleep(min(60.0, self._limits.idle_s))
            async with self._opening:
                for session in self._list_silent(self._limits.idle_s):
                    logger.info("closing the session %s, since its client is gone", session.id)
                    await self._end(session)

    def _list_silent(self, seconds: float) -> list[TrainingSession]:
        latest = time.monotonic() - seconds
        silent = [each for each in self._sessions.values() if each.seen_s <= latest]
        return sorted(silent, key=lambda each: each.seen_s)

    async def open(self, request: web.Request) -> web.Response:
        try:
            opened = await _read(wire.OpenSession, request)
        except ValidationError as error:
            raise refuse_invalid(error) from None
        async with self._opening:
            session = self._sessions.get(self._by_key.get(opened.key, ""))
            if session is None:
                session = await self._open(opened)
            elif session.opened != opened:
                raise ApiError(422, "a session of this key was opened with other settings", param="key")
            session.seen_s = time.monotonic()
        return write_json({**session.describe(), "lease_s": self._limits.lease_s})

    async def _open(self, opened: wire.OpenSession) -> TrainingSession:
        config = read_settings(opened, self._bases, self._device)
        await self._make_room()
        id_ = secrets.token_hex(16)
        session = TrainingSession(id_, self._folder / id_, opened, config)
        try:
            await session.start()
        except ReinforgeError as error:
            raise ApiError(422, str(error)) from error
        self._sessions[id_] = session
        self._by_key[opened.key] = id_
        return session

    async def _make_room(self) -> None:
        limits = self._limits
        silent = self._list_silent(limits.lease_s)
        while len(self._sessions) >= limits.max_sessions and silent:
            session = silent.pop(0)
            logger.info("the session %s, whose client is silent, makes room for another one", session.id)
            await self._end(session)
        if len(self._sessions) >= limits.max_sessions:
            first = min(each.seen_s for each in self._sessions.values())
            wait_s = max(1, int(first + limits.lease_s - time.monotonic()) + 1)
            message = f"{limits.max_sessions} sessions are open, which is the maximum"
            raise ApiError(429, message, code="too_many_sessions", headers={"retry-after": str(wait_s)})

    async def show(self, request: web.Request) -> web.Response:
        return write_json({**self._find(request).describe(), "lease_s": self._limits.lease_s})

    async def end(self, request: web.Request) -> web.Response:
        """Ends a session; one that has ended already is not an error."""
        if (session := self._sessions.get(request.match_info["id"])) is not None:
            await self._end(session)
        return write_json({"ended": True})

    async def _end(self, session: TrainingSession) -> None:
        self._sessions.pop(session.id, None)
        self._by_key.pop(session.opened.key, None)
        try:
            await session.close()
        except ReinforgeError as error:  # its folder could not be removed; other sessions keep running
            logger.warning("the session %s was not closed cleanly: %s", session.id, error)

    def _find(self, request: web.Request) -> TrainingSession:
        id_ = request.match_info["id"]
        if (session := self._sessions.get(id_)) is None:
            message = f"there is no session {id_[:64]!r}; it may have expired without requests, or with the server"
            raise ApiError(404, message, code="session_not_found")
        session.seen_s = time.monotonic()
        return session

    @abortable
    @_answering
    async def sample(self, request: web.Request) -> wire.SessionAnswer:
        session, call = self._find(request), await _read(wire.SampleCall, request)
        session.check_request(call.request)
        return wire.SampleAnswer(reply=await session.policy.sample(call.request))

    @abortable
    @_answering
    async def score(self, request: web.Request) -> wire.SessionAnswer:
        session, call = self._find(request), await _read(wire.ScoreCall, request, trains=True)
        rows = await session.policy.score(call.token_ids)
        return wire.ScoreAnswer(logprobs=[[float(value) for value in row] for row in rows])

    @abortable
    @_answering
    async def encode(self, request: web.Request) -> wire.SessionAnswer:
        session, call = self._find(request), await _read(wire.EncodeCall, request)
        tokens = await session.policy.encode(call.request, call.reply)
        assert isinstance(tokens, TokenLogprobs)  # the engine has them
        return wire.EncodeAnswer(tokens=tokens)

    @_answering
    async def submit(self, request: web.Request) -> wire.SessionAnswer:
        session, limits = self._find(request), request.config_dict[LIMITS]
        body = await read_body(request, max_bytes=self._limits.max_job_bytes, timeout_s=limits.body_timeout_s)
        collection, content = await read_beside(session.read_job, check_body(body, get_limits().training_values))
        return wire.StatusAnswer(status=await session.submit(collection, content))

    @abortable
    @_answering
    async def show_job(self, request: web.Request) -> wire.SessionAnswer:
        session, query = self._find(request), request.query
        try:
            wait_s = min(MAX_WAIT_S, max(0.0, float(query.get("wait_s", "0"))))
        except ValueError:
            raise ApiError(422, "wait_s: expected a number of seconds", param="wait_s") from None
        try:
            return wire.StatusAnswer(status=await session.wait(query.get("job_key", ""), wait_s))
        finally:
            session.seen_s = time.monotonic()

    @_answering
    async def publish(self, request: web.Request) -> wire.SessionAnswer:
        session, call = self._find(request), await _read(wire.PublishCall, request)
        await session.publish(call.version)
        return await _describe_weights(session)

    @_answering
    async def show_fingerprint(self, request: web.Request) -> wire.SessionAnswer:
        return await _describe_weights(self._find(request))

    @_answering
    async def save(self, request: web.Request) -> wire.SessionAnswer:
        session, call = self._find(request), await _read(wire.SaveCall, request)
        await session.save(request.match_info["save"], call, lambda id_: self._folder / id_)
        return await _describe_weights(session)

    @_answering
    async def restore(self, request: web.Request) -> wire.SessionAnswer:
        session, call = self._find(request), await _read(wire.RestoreCall, request)
        await session.restore(call, self._folder / call.session)
        return await _describe_weights(session)


async def _describe_weights(session: TrainingSession) -> wire.WeightsAnswer:
    return wire.WeightsAnswer(version=session.policy.version, fingerprint=await session.policy.fingerprint())


async def _read(kind: type[B], request: web.Request, *, trains: bool = False) -> B:
    most = get_limits().training_values if trains else get_limits().request_values
    body = await read_bytes(request, trains=trains)
    await request.config_dict[READER].read(check_call, body, kind.__name__, most, kind=TypeAdapter[None](None))
    return await read_beside(kind.model_validate_json, body)


def check_call(body: bytes, kind: str, most: int) -> None:
    """Raises the refusal of a body; there may be a problem with each of its values."""
    try:
        getattr(wire, kind).model_validate_json(check_body(body, most))
    except ValidationError as error:
        raise refuse_invalid(error) from None


async def make_sessions(host: TrainingHost) -> SessionsApi:
    options, folder = host.options, host.options.data_dir.absolute() / "sessions"
    limits = SessionLimits(max_sessions=options.max_models)
    return SessionsApi(await find_bases(options), folder, device=options.device, limits=limits)
