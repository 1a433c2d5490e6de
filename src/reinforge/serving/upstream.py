"""Passes requests to a large model's server and its answers back, and lets a recorder see both.

    POST /v1/chat/completions  ->  POST UPSTREAM/chat/completions      bytes, status, headers and streams unchanged

The upstream is named when the server starts, never by a request. The client's key goes to it and is not stored. What
the upstream sends is passed on as it comes: an error, a refusal with `Retry-After`, a stream that is cut.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp
import yarl
from aiohttp import web
from multidict import CIMultiDict

from reinforge.rollout.models.openai_http import SafeResolver
from reinforge.serving.metrics import Counts
from reinforge.serving.recording import RecordedCall, Recorder
from reinforge.serving.routes import LIMITS, ApiError, Feature, abortable, read_bytes

logger = logging.getLogger(__name__)
KEY_HEADER = "x-reinforge-key"
"""The server's own key, since `Authorization` has that of the upstream."""
ROUTE = "x-reinforge-route"
"""Who answers, or is to answer: `local` or `upstream`."""
CONNECT_S, SILENT_S = 10.0, 600.0
"""Seconds for a connection to the upstream, and without a byte of it, after which the request fails."""
FETCHED_BYTES = 1 << 23
"""Longest answer that is kept in memory."""
FREE_BYTES = 1 << 15
"""A piece below it, half of what asyncio buffers before it pauses, is written without a wait if nothing is buffered."""
_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding")
) | {"upgrade", "proxy-connection"}
_OWN = frozenset({"host", "content-length", "expect", "accept-encoding", "cookie", KEY_HEADER, ROUTE})
"""Headers of a request that are ours, or that the connection to the upstream has of its own."""
_DECODED = frozenset({"gzip", "deflate", "br", "zstd"})
"""Compressions of a request that are undone when its body is read."""


class UpstreamApi(Feature):
    """Everything below `/v1/`.

    Args:
        url: What a client's base URL would be without this server: `https://api.example.com/v1`, or without a path,
            as Anthropic's clients write it.
    """

    def __init__(self, url: str, recorder: Recorder | None = None):
        self._url, self.recorder = url.rstrip("/"), recorder
        self._has_path = bool(yarl.URL(self._url).path.strip("/"))
        self._session: aiohttp.ClientSession | None = None

    def routes(self) -> list[web.RouteDef]:
        return [web.route("*", "/v1/{path:.*}", self.forward)]

    async def start(self) -> None:
        if self.recorder is not None:
            self.recorder.start()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0, resolver=SafeResolver()),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Content-Type", "Accept"),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.close)

    def register_metrics(self, registry: Any) -> None:
        if self.recorder is not None:
            counts = self.recorder.counts
            registry.register(Counts("reinforge_records", "Calls by what became of their record", ("outcome",), counts))

    @abortable
    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Answers with what the upstream answers; the request to it ends if the client disconnects."""
        body = await read_bytes(request)
        if ".." in request.path.split("/"):
            raise ApiError(404, "the upstream has no such path", code="not_found")
        with self.record(request, body) as call:
            async with await self.open(request, body) as answer:
                return await self.pass_on(request, answer, call)

    @contextmanager
    def record(self, request: web.Request, body: bytes) -> Iterator[RecordedCall | None]:
        recorder, call = self.recorder, None
        if recorder is not None and request.method == "POST":
            call = recorder.begin(request.path.removeprefix("/v1/"), request.headers, body)
        problem = "cut"
        try:
            yield call
            problem = ""
        finally:
            if recorder is not None and call is not None:
                recorder.finish(call, problem)

    async def open(self, request: web.Request, body: bytes) -> aiohttp.ClientResponse:
        assert self._session is not None  # the server has started
        target = request.rel_url.raw_path_qs
        url = yarl.URL(self._url + (target.removeprefix("/v1") if self._has_path else target), encoded=True)
        try:
            return await self._session.request(
                request.method,
                url,
                data=body if body or request.can_read_body else None,
                headers=_build_headers(request.headers),
                allow_redirects=False,
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.debug("the upstream did not answer: %s", error)
            message = f"the upstream of this server does not answer ({type(error).__name__})"
            raise ApiError(502, message, code="upstream_unavailable") from None

    async def fetch(self, request: web.Request, body: bytes) -> tuple[bytes, str]:
        """Returns an answer that no client waits for, and its content type; raises an error if it is not whole."""
        with self.record(request, body) as call:
            async with asyncio.timeout(SILENT_S), await self.open(request, body) as answer:
                kind, found = answer.headers.get("content-type", "").lower(), bytearray()
                if call is not None:
                    call.status, call.content_type = answer.status, kind
                async for piece in answer.content.iter_any():
                    found += piece
                    if len(found) > FETCHED_BYTES:
                        raise ValueError(f"the answer has more than {FETCHED_BYTES} bytes")
                if call is not None and self.recorder is not None:
                    self.recorder.add(call, bytes(found))
                answer.raise_for_status()
                return bytes(found), kind

    async def pass_on(
        self,
        request: web.Request,
        answer: aiohttp.ClientResponse,
        call: RecordedCall | None,
        further: Mapping[str, str] | None = None,
    ) -> web.StreamResponse:
        """Sends an answer of the upstream to the client.

        Args:
            further: Headers to add.
        """
        headers = _pick(answer.headers, _HOP_BY_HOP)
        headers.update(further or {})
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
        if call is not None:
            call.status, call.content_type = answer.status, answer.headers.get("content-type", "").lower()
        await response.prepare(request)
        limit_s = request.config_dict[LIMITS].write_timeout_s
        try:
            async for piece in answer.content.iter_any():
                if call is not None and self.recorder is not None:
                    self.recorder.add(call, piece)
                if len(piece) < FREE_BYTES and not _count_waiting(request):
                    await response.write(piece)  # cannot wait, and a timer for each piece costs CPU
                    continue
                async with asyncio.timeout(limit_s):
                    await response.write(piece)
        except (aiohttp.ClientError, TimeoutError) as error:
            if request.transport is not None:
                request.transport.close()  # what was sent is sent; the client sees that the rest is missing
            raise ConnectionResetError("the answer of the upstream is cut, or the client does not read it") from error
        await response.write_eof()
        return response


def _count_waiting(request: web.Request) -> int:
    return 0 if request.transport is None else request.transport.get_write_buffer_size()


def _build_headers(given: Mapping[str, str]) -> CIMultiDict[str]:
    headers = _pick(given, _HOP_BY_HOP | _OWN)
    if headers.get("content-encoding", "").lower() in _DECODED:
        del headers["content-encoding"]
    headers["accept-encoding"] = "identity"  # what the recorder can read
    return headers


def _pick(headers: Mapping[str, str], left_out: frozenset[str]) -> CIMultiDict[str]:
    """Returns the headers that are passed on: not those of one connection, which `Connection` may name as well."""
    named = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in left_out | named)
