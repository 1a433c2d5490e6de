"""The server: one aiohttp application of features, behind one guard.

async with ServeApp(models, [FineTuningApi(...)], port=8000) as app:
    print(app.address)          http://127.0.0.1:8000
    await asyncio.Event().wait()
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from reinforge.dialects.chat_call import BadRequest
from reinforge.engine.garbage_collection import limit_garbage_collection
from reinforge.errors import ConfigError, Problem, ReinforgeError
from reinforge.rollout.http.access import HEADERS, LOOPBACK
from reinforge.rollout.http.exchange import SHORT_BODY, describe_failure
from reinforge.serving.access import RequestGuard
from reinforge.serving.chat import ChatApi, ChatKeeper
from reinforge.serving.metrics import MetricsApi
from reinforge.serving.models import ServedModels
from reinforge.serving.reader import BodyReader
from reinforge.serving.routes import (
    LIMITS,
    READER,
    ApiError,
    Feature,
    Handler,
    ServerLimits,
    build_client_error,
    is_abortable,
    write_json,
)

logger = logging.getLogger(__name__)
_http_logger = logging.getLogger(f"{__name__}.http")
_http_logger.addFilter(
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | ConnectionError))
)
LINGER_S = 2.0  # seconds for which the rest of a refused body is read, so that the client sees the response
SHUTDOWN_S = 3.0
"""Seconds that requests in flight have to end when the server stops; then streams and sampling are cut off."""
ABORTED_S = 1.0  # seconds that requests which were cut off have to clean up
TRIM_S = 30.0  # seconds between two times at which freed memory is returned to the system
REQUEST_ID = "x-request-id"
CLIENT_CLOSED = 499  # counted for requests whose client disconnected before the response


STATIC = {"chat.html": "text/html", "chat.js": "text/javascript", "chat.css": "text/css"}
"""The chat page: one HTML file, one script and one style sheet, which load nothing from other hosts."""


class Pages(Feature):
    """The chat page at `/`, and `/healthz`, the one route that needs no key."""

    def __init__(self, *, has_chat: bool, takes_feedback: bool):
        self._has_chat, self._takes_feedback = has_chat, takes_feedback

    def routes(self) -> list[web.RouteDef]:
        page = [web.get("/", self.show_file), web.get("/static/{file:chat.(js|css)}", self.show_file)]
        return [web.get("/healthz", self.show_health), *(page if self._has_chat else ())]

    async def show_health(self, request: web.Request) -> web.Response:
        """Says that the server answers; without a key it names no model."""
        return write_json({"status": "ok"})

    async def show_file(self, request: web.Request) -> web.Response:
        name = request.match_info.get("file", "chat.html")
        text = files("reinforge.serving").joinpath("static", name).read_text(encoding="utf-8")
        if self._takes_feedback:
            text = text.replace("<body>", "<body data-feedback>")
        return web.Response(text=text, headers={**HEADERS, "Content-Type": f"{STATIC[name]}; charset=utf-8"})


class ServeApp:
    """Serves models and features; an async context manager.

    Args:
        models: What chats are answered with; features add to it while the server runs.
        host: The address to listen on; others than the loopback need a token.
        port: The TCP port; 0: the operating system chooses.
        token: The key that every request must carry; None or empty: none is needed.
        chat: What answers the routes of models; None: the served models, and there is a chat page.
        key_header: The header with the key, where `Authorization` has another one.
        keeper: Keeps the chats of the served models; the chat page then takes feedback.
    """

    def __init__(
        self,
        models: ServedModels,
        features: Sequence[Feature] = (),
        *,
        chat: Feature | None = None,
        key_header: str | None = None,
        keeper: ChatKeeper | None = None,
        host: str = LOOPBACK,
        port: int = 0,
        token: str | None = None,
        limits: ServerLimits | None = None,
        allowed_hosts: Iterable[str] = (),
        allowed_origins: Iterable[str] = (),
    ):
        self.models, self.host, self.port = models, host, port
        self.limits = limits or ServerLimits()
        self._metrics = MetricsApi(models)
        self._reader, self._waiting_bytes = BodyReader(), 0
        for feature in (chat, *features):
            if feature is not None:
                feature.register_metrics(self._metrics.registry)
        self._features: list[Feature] = [
            chat or ChatApi(models, self.limits, keeper),
            Pages(has_chat=chat is None, takes_feedback=keeper is not None),
            self._metrics,
            *features,
        ]
        self._guard = RequestGuard(host, token, allowed_hosts, allowed_origins, key_header)
        self._runner: web.AppRunner | None = None
        self._listener: socket.socket | None = None
        self._started: list[Feature] = []
        self._running: set[asyncio.Task[web.StreamResponse]] = set()
        self._abortable: dict[asyncio.Future[None], asyncio.Task[Any]] = {}
        self._trimming: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """The URL of the server, without `/v1`; for a server on every address, that of the loopback."""
        host = LOOPBACK if self.host in ("0.0.0.0", "::", "") else self.host.strip("[]")
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def __aenter__(self) -> ServeApp:
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _start(self) -> None:
        for feature in self._features:
            self._started.append(feature)
            await feature.start()
        app = web.Application(middlewares=[self._handle])
        app[LIMITS], app[READER] = self.limits, self._reader
        for feature in self._features:
            app.add_routes(feature.routes())
        app.on_response_prepare.extend((_add_headers, self._guard.share))
        app.on_shutdown.append(self._end_requests)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_http_logger,
            shutdown_timeout=ABORTED_S,
            keepalive_timeout=self.limits.idle_timeout_s,
            lingering_time=LINGER_S,
            handler_cancellation=True,
        )
        await self._runner.setup()
        self.listen()
        assert self._listener is not None
        self._guard.open(self.port)
        await web.SockSite(self._runner, self._listener, backlog=1024).start()
        self._trimming = asyncio.create_task(self._return_memory())

    def listen(self) -> None:
        """Takes the port; entering the context does so as well. Clients that connect wait until the server starts."""
        if self._listener is not None:
            return
        host = self.host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, self.port), family=family, backlog=1024)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            message = f"cannot listen on {host}:{self.port}: {reason}"
            raise ConfigError(Problem("--port", message, "choose another port, or 0 for any free one")) from None
        self.port = self._listener.getsockname()[1]

    async def __aexit__(self, *exc_info: object) -> None:
        if self._trimming is not None:
            self._trimming.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._listener is not None:
            self._listener.close()
        if self._running:
            await asyncio.wait(self._running)
        started, self._started = self._started, []
        closing = [self._reader.close(), *(feature.close() for feature in started)]
        closed = await asyncio.gather(*closing, return_exceptions=True)
        for error in closed:
            if isinstance(error, BaseException):
                raise error

    async def _end_requests(self, app: web.Application) -> None:
        """Waits for the requests in flight when the server stops, and cuts off those that may be after a while."""
        in_flight: set[asyncio.Future[Any]] = {*self._abortable, *self._running}
        if in_flight:
            await asyncio.wait(in_flight, timeout=SHUTDOWN_S)
        for task in self._abortable.values():
            task.cancel()

    @web.middleware
    async def _handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Guards every route, counts its requests, and answers every failure in the form of the API that was called."""
        started_s, status = time.perf_counter(), CLIENT_CLOSED
        try:
            response = await self._answer(request, handler)
            status = response.status
            return response
        finally:
            self._metrics.count(request, status, started_s)

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if (traded := self._guard.trade_key(request)) is not None:
                return traded
            if (allowed := self._guard.answer_preflight(request)) is not None:
                return allowed
            self._guard.check(request)
            with self._hold_body(request):
                if is_abortable(request.match_info.handler):
                    return await self._run_abortable(request, handler)
                return await self._run_to_its_end(request, handler)
        except web.HTTPException as error:
            return _write_error(request, _describe_status(request, error))
        except Exception as error:
            if isinstance(error, ConnectionError) and not isinstance(error, ReinforgeError):
                raise  # the client disconnected
            return _write_error(request, describe_failure(error, f"{request.method} {request.path[:200]}"))

    @contextmanager
    def _hold_body(self, request: web.Request) -> Iterator[None]:
        """Counts the bytes of a request's body while it is answered; one of unknown length as the longest."""
        length = request.content_length if request.content_length is not None else self.limits.max_body_bytes
        length = min(length, self.limits.max_training_bytes) if request.can_read_body else 0
        if length > SHORT_BODY and self._waiting_bytes + length > self.limits.max_waiting_bytes:
            message = "the server holds as many bytes of requests as it may; try again later"
            headers = {"retry-after": str(self.limits.retry_after_s)}
            raise ApiError(503, message, code="server_overloaded", headers=headers)
        self._waiting_bytes += length
        try:
            yield
        finally:
            self._waiting_bytes -= length

    async def _run_abortable(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Runs a handler that ends with its client's connection, or soon after the server is stopped."""
        ended, task = asyncio.get_running_loop().create_future(), asyncio.current_task()
        assert task is not None  # a handler runs in a task
        self._abortable[ended] = task
        try:
            return await handler(request)
        finally:
            del self._abortable[ended]
            ended.set_result(None)

    async def _run_to_its_end(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Runs a handler that its client's hanging up does not cancel, so that nothing is left half done."""

        async def run() -> web.StreamResponse:
            return await handler(request)

        task = asyncio.ensure_future(run())
        self._running.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    async def _return_memory(self) -> None:
        """Returns memory to the system: replies of many lengths leave a large KV cache, and holes in glibc's heap."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
        with limit_garbage_collection():  # models and code are skipped, so that looking for garbage takes milliseconds
            while True:
                await asyncio.sleep(TRIM_S)
                for model in self.models:
                    model.policy.release_memory()
                await self._reader.rest()
                gc.collect()  # the error of a refused request holds its body until then
                if trim is not None:
                    await asyncio.to_thread(trim, 0)

    def _forget(self, task: asyncio.Task[web.StreamResponse]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # its client may have disconnected, so nothing else retrieves its exception


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.setdefault(REQUEST_ID, f"req_{secrets.token_hex(12)}")
    response.headers["server"] = "reinforge"
    response.headers.setdefault("x-content-type-options", "nosniff")


def _describe_status(request: web.Request, error: web.HTTPException) -> ApiError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.path[:200]} takes {allowed}, found {request.method}"
        return ApiError(405, message, code="method_not_allowed", headers={"allow": allowed})
    if isinstance(error, web.HTTPNotFound):
        return ApiError(404, f"there is no {request.method} {request.path[:200]} here", code="not_found")
    return ApiError(error.status, error.reason)


def _write_error(request: web.Request, error: BadRequest) -> web.Response:
    body, headers = build_client_error(request.path, error), dict[str, str]()
    if isinstance(error, ApiError):
        headers = error.headers
        if error.status == 409:  # the official clients would send the same request again
            headers = {"x-should-retry": "false", **headers}
    response = write_json(body, error.status, headers)
    if request.can_read_body and not request.content.is_eof():
        response.force_close()  # the rest of the body is not read
    return response
