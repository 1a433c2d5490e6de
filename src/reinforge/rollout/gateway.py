"""A server on the loopback through which programs of any language reach the models of their episode.

    async with Gateway() as gateway:
        with gateway.attach(context.endpoint) as access:
            ...                     OPENAI_BASE_URL=http://127.0.0.1:PORT/episodes/ID/v1, OPENAI_API_KEY=KEY

    /episodes/ID/v1/chat/completions   with the episode's key
    /v1/chat/completions               the key alone says which episode
    /episodes/ID/mcp, /mcp             the episode's environment as an MCP server, if there is one

Every request carries the key of its episode, so that a program reaches no other episode's models, and a page in a
browser reaches none. The server reads HTTP; what a request means is `EpisodeEndpoint`'s.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import socket
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_request import BaseRequest

from reinforge.bounded import encode_any
from reinforge.dialects.chat_call import BadRequest
from reinforge.errors import CaptureError
from reinforge.limits import get_limits
from reinforge.rollout.http.access import LOOPBACK, read_body, read_key
from reinforge.rollout.http.endpoint import EpisodeEndpoint, build_ended
from reinforge.rollout.http.exchange import EndpointRequest, EndpointResponse, build_error_response
from reinforge.rollout.http.gateway_access import GatewayAccess

_http_logger = logging.getLogger(f"{__name__}.http")
_http_logger.addFilter(
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | ConnectionError))
)
"""Bytes that are not HTTP get a 400, and clients may disconnect; a traceback would tell the user nothing."""
T = TypeVar("T")
BODY_TIMEOUT_S = 60.0  # seconds in which a request's body must have arrived
IDLE_TIMEOUT_S = 75.0  # seconds after which a connection without a whole request line and headers is closed
LINGER_S = 2.0  # seconds for which the rest of a refused body is read, so that the client sees the response
MAX_ENDED = 10_000  # most ended episodes whose clients are still told that the episode has ended
_PATH = re.compile(r"/episodes/(?P<id>[a-z0-9]{1,64})(?P<path>/.*)", re.DOTALL)
_METHODS = "GET, HEAD, OPTIONS, POST"
_UNREAD = {"connection": "close"}


class Gateway:
    def __init__(self, *, max_body_bytes: int | None = None, body_timeout_s: float = BODY_TIMEOUT_S):
        self._max_body_bytes, self._body_timeout_s = max_body_bytes or get_limits().request_bytes, body_timeout_s
        self.port = 0
        self._accesses: dict[str, GatewayAccess] = {}
        self._keys: dict[bytes, GatewayAccess] = {}
        self._ended: OrderedDict[str, bytes] = OrderedDict()
        self._ended_keys: set[bytes] = set()
        self._closing: set[GatewayAccess] = set()
        self._server: web.Server | None = None
        self._listener: asyncio.Server | None = None
        self._hosts: frozenset[str] = frozenset()

    async def __aenter__(self) -> Gateway:
        loop = asyncio.get_running_loop()
        self._server = web.Server(
            self._handle,
            request_factory=self._build_request,
            access_log=None,
            logger=_http_logger,
            keepalive_timeout=IDLE_TIMEOUT_S,
            lingering_time=LINGER_S,
        )
        listener = socket.create_server((LOOPBACK, 0), backlog=1024)
        self._listener = await loop.create_server(self._server, sock=listener)
        self.port = listener.getsockname()[1]
        self._hosts = frozenset({f"{LOOPBACK}:{self.port}", f"localhost:{self.port}"})
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for access in list(self._accesses.values()):
            access.close()
        if self._listener is not None:
            self._listener.close()
        for access in list(self._closing):
            await access.wait_closed()
        if self._server is not None:
            self._server.pre_shutdown()
            await self._server.shutdown(LINGER_S)

    @property
    def origin(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def attach(self, endpoint: EpisodeEndpoint) -> GatewayAccess:
        access = GatewayAccess(endpoint, self.origin, self._detach)
        self._accesses[access.episode_id] = self._keys[_hash_key(access.api_key)] = access
        return access

    def _detach(self, access: GatewayAccess) -> None:
        key = _hash_key(access.api_key)
        del self._accesses[access.episode_id], self._keys[key]
        self._ended[access.episode_id] = key
        self._ended_keys.add(key)
        self._closing = {each for each in self._closing if each.num_in_flight} | {access}
        while len(self._ended) > MAX_ENDED:
            _, oldest = self._ended.popitem(last=False)
            self._ended_keys.remove(oldest)

    def _build_request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> BaseRequest:
        loop = asyncio.get_running_loop()
        return BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=self._max_body_bytes)

    async def _handle(self, request: BaseRequest) -> web.StreamResponse:
        try:
            return await self._answer(request)
        except BadRequest as error:
            described = EndpointRequest(request.method, request.path)
            return _write(build_error_response(described, error), _UNREAD if request.can_read_body else {})

    async def _answer(self, request: BaseRequest) -> web.StreamResponse:
        self._check_origin(request)
        if request.method == "OPTIONS":
            return web.Response(status=204, headers={"allow": _METHODS})
        access, path = self._find_access(request)
        async with access.slots:
            access.check_open()
            method = "GET" if request.method == "HEAD" else request.method
            body = await read_body(
                request, max_bytes=self._max_body_bytes, timeout_s=self._body_timeout_s, expects=True
            )
            _check_connected(request)
            response, reply = await access.answer(EndpointRequest(method, path, request.headers, body))
            written = _write(response)
            await written.prepare(request)
            await written.write_eof()
            reply.is_delivered = True
            return written

    def _check_origin(self, request: BaseRequest) -> None:
        """Refuses what a page in a browser can send: another host's name for this server, or an origin."""
        if request.headers.get("host", "").lower() not in self._hosts:
            names = ", ".join(sorted(self._hosts))
            raise BadRequest(f"the Host header must be one of {names}", status=403, code="forbidden_host")
        origin = request.headers.get("origin")
        if origin is not None and origin.lower().removeprefix("http://") not in self._hosts:
            raise BadRequest("requests from web pages are refused", status=403, code="forbidden_origin")

    def _find_access(self, request: BaseRequest) -> tuple[GatewayAccess, str]:
        """Returns the episode's access and the path behind it."""
        key, path = read_key(request.headers) or request.query.get("key", ""), request.path
        hashed = _hash_key(key)
        if (found := _PATH.fullmatch(path)) is not None:
            path, episode_id = found["path"], found["id"]
            access, ended = self._accesses.get(episode_id), self._ended.get(episode_id)
            if access is None and ended is None:
                raise BadRequest(f"there is no episode {episode_id!r} here", status=404, code="episode_not_found")
            has_ended = ended is not None and hmac.compare_digest(ended, hashed)
        else:
            access, has_ended = self._keys.get(hashed), hashed in self._ended_keys
        if has_ended:
            raise build_ended()
        if access is None or not access.accepts(key):
            message = "the API key is wrong or missing; send the episode's: `Authorization: Bearer KEY` or `x-api-key`"
            raise BadRequest(message, status=401, code="invalid_api_key")
        return access, path


class EpisodeGateway:
    """A gateway of one episode's own: `async with`, or `with` in a plain workflow."""

    def __init__(self, endpoint: EpisodeEndpoint):
        self._endpoint, self._gateway = endpoint, Gateway()

    async def __aenter__(self) -> GatewayAccess:
        await self._gateway.__aenter__()
        return self._gateway.attach(self._endpoint)

    async def __aexit__(self, *exc_info: object) -> None:
        await self._gateway.__aexit__()

    def __enter__(self) -> GatewayAccess:
        return self._run(self.__aenter__())

    def __exit__(self, *exc_info: object) -> None:
        self._run(self.__aexit__())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the event loop of the episode, from the thread of a plain workflow."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._endpoint.loop:
            work.close()
            raise CaptureError("context.gateway(): an `async def` workflow uses it with `async with`")
        return asyncio.run_coroutine_threadsafe(work, self._endpoint.loop).result()


def _check_connected(request: BaseRequest) -> None:
    """Raises where the client disconnected while its request waited, so that nothing is sampled for it."""
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError("the client disconnected")


def _hash_key(key: str) -> bytes:
    """Returns a hash of a key, so that finding it in a dict tells nothing of the key by its time."""
    return hashlib.sha256(encode_any(key)).digest()


def _write(response: EndpointResponse, headers: dict[str, str] | None = None) -> web.Response:
    assert isinstance(response.body, bytes)  # a access joins the pieces
    named = {**response.headers, "server": "reinforge", **(headers or {})}
    return web.Response(status=response.status, headers=named, body=response.body)
