"""What a part of the server offers: routes, and work that begins and ends with the server."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

from aiohttp import web

from reinforge.rollout.http.access import read_body
from reinforge.rollout.http.exchange import decode_body, encode_body
from reinforge.serving.api_error import ApiError
from reinforge.serving.limits import ServerLimits

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T", bound=Callable[..., Any])
LIMITS = web.AppKey("limits", ServerLimits)
RETRY_COUNT = "x-stainless-retry-count"
"""The header with which the official clients, and those made from them, say that they send a request again."""
_ABORTABLE = "is_abortable"


class Feature(Protocol):
    """A part of the server. Its routes are behind the server's guard: key, Host and Origin.

    A handler raises `ApiError`, which the client gets in OpenAI's form; other exceptions become errors as well. It runs
    to its end even if its client hangs up, unless it is marked with `abortable`.
    """

    def routes(self) -> list[web.RouteDef]:
        """Returns its routes, such as `web.get("/v1/files", self.list_files)`."""

    async def start(self) -> None:
        """Begins its work; called once, before the first request."""

    async def close(self) -> None:
        """Ends its work; called once, after the last request."""


def abortable(handler: T) -> T:
    """Marks a handler that is cancelled when its client hangs up."""
    setattr(handler, _ABORTABLE, True)
    return handler


def is_abortable(handler: object) -> bool:
    """True if a handler is cancelled when its client hangs up."""
    return bool(getattr(handler, _ABORTABLE, False))


def count_retries(request: web.Request) -> int:
    """Returns how often the client has sent this request before; 0: never, or the client does not say."""
    text = request.headers.get(RETRY_COUNT, "")
    return int(text) if re.fullmatch(r"\d{1,6}", text) else 0


async def read_bytes(request: web.Request) -> bytes:
    """Returns the whole body of a request, within the server's limits.

    Raises:
        BadRequest: It is too long or too slow.
    """
    limits = request.config_dict[LIMITS]
    return await read_body(request, max_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s)


async def read_json(request: web.Request) -> dict[str, Any]:
    """Returns the object in a request's JSON body, within the server's limits; no body is an empty object.

    Raises:
        BadRequest: It is too long, too slow, or no JSON object.
    """
    body = await read_bytes(request)
    value = decode_body(body) if body.strip() else {}
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, found {type(value).__name__}")
    return value


def write_json(value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Returns a response with a JSON body."""
    return web.Response(body=encode_body(value), status=status, content_type="application/json", headers=headers)
