"""What a part of the server offers: routes, and work that begins and ends with the server."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web
from pydantic import ValidationError

from reinforge.dialects.chat_call import BadRequest
from reinforge.limits import get_limits
from reinforge.rollout.http.access import read_body
from reinforge.rollout.http.exchange import build_error_body, decode_body, encode_body, read_beside
from reinforge.serving.reader import BodyReader


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of a server.

    Attributes:
        body_timeout_s: Seconds in which a request's body must have arrived.
        idle_timeout_s: Seconds after which a connection without a whole request line and headers is closed.
        write_timeout_s: Seconds after which a client that does not read its stream is disconnected.
        max_in_flight: Maximum model calls that are answered or wait at a time; further ones get 429, except those of a
            client that has less than an equal share of them, up to twice as many.
        max_tokens: Maximum tokens of one reply, whatever the request says; None: up to the context limit.
        retry_after_s: Least seconds in the `Retry-After` of a refusal.
    """

    max_body_bytes: int = field(default_factory=lambda: get_limits().request_bytes)
    max_waiting_bytes: int = field(default_factory=lambda: get_limits().waiting_bytes)
    max_settings_bytes: int = field(default_factory=lambda: get_limits().settings_bytes)
    max_training_bytes: int = field(default_factory=lambda: get_limits().training_bytes)
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 60.0
    max_in_flight: int = 512
    max_choices: int = 128
    max_tokens: int | None = None
    retry_after_s: int = 1


def read_session(headers: Mapping[str, str]) -> str:
    """Returns the session that a request names in its headers, before one in its body; empty: none."""
    return next((headers[name][:200] for name in ("x-conversation-id", "x-session-id") if headers.get(name)), "")


class ApiError(BadRequest):
    """A request that is refused, or that failed; the server writes it in OpenAI's form.

    Example: `raise ApiError(404, "there is no file 'file-1'", param="file_id", code="file_not_found")`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message, param, status=status, code=code)
        self.headers = dict(headers or {})


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T", bound=Callable[..., Any])
LIMITS = web.AppKey("limits", ServerLimits)
READER = web.AppKey("reader", BodyReader)
RETRY_COUNT = "x-stainless-retry-count"
"""The header with which the official clients, and those made from them, say that they send a request again."""
_ABORTABLE = "is_abortable"


class Feature:
    """A part of the server. Its routes are behind the server's guard: key, Host and Origin.

    A handler raises `ApiError`, which the client gets in OpenAI's form; other exceptions become errors as well. It runs
    to its end even if its client disconnects, unless it is marked with `abortable`.
    """

    def routes(self) -> list[web.RouteDef]:
        """Returns its routes, such as `web.get("/v1/files", self.list_files)`; called after `start`."""
        raise NotImplementedError

    def register_metrics(self, registry: Any) -> None:
        """Adds its metrics to those of the server, a `prometheus_client.CollectorRegistry`."""

    async def start(self) -> None:
        """Begins its work; called once, before the first request."""

    async def close(self) -> None:
        """Ends its work; called once, after the last request."""


def abortable(handler: T) -> T:
    """Marks a handler that is cancelled when its client disconnects."""
    setattr(handler, _ABORTABLE, True)
    return handler


def is_abortable(handler: object) -> bool:
    return bool(getattr(handler, _ABORTABLE, False))


def count_retries(request: web.Request) -> int:
    """Returns how often the client has sent this request before; 0: never, or the client does not say."""
    text = request.headers.get(RETRY_COUNT, "")
    return int(text) if re.fullmatch(r"\d{1,6}", text) else 0


async def read_bytes(request: web.Request, *, trains: bool = False, only_settings: bool = False) -> bytes:
    """Returns a request's body; `trains`: it has tokens or trajectories to train on, and may be longer."""
    limits = request.config_dict[LIMITS]
    most = limits.max_training_bytes if trains else limits.max_body_bytes
    most = min(most, limits.max_settings_bytes) if only_settings else most
    return await read_body(request, max_bytes=most, timeout_s=limits.body_timeout_s)


async def read_json(request: web.Request, *, trains: bool = False) -> dict[str, Any]:
    """Returns the object in a request's JSON body, within the server's limits; no body is an empty object.

    Args:
        trains: It has trajectories to train on; else it has settings only, since it is read in this process.
    """
    most = get_limits().training_values if trains else None
    body = await read_bytes(request, trains=trains, only_settings=not trains)
    return await read_beside(lambda text: decode_object(text, most), body)


def decode_object(body: bytes, most: int | None = None) -> dict[str, Any]:
    value = decode_body(body, most) if body.strip() else {}
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, found {type(value).__name__}")
    return value


def write_json(value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=encode_body(value), status=status, content_type="application/json", headers=headers)


def refuse_invalid(
    error: ValidationError, param: str | None = None, names: Mapping[str, str] | None = None
) -> ApiError:
    """Returns the refusal of a body by its first problem: `policy.lora.r: Input should be ...`.

    Args:
        param: The field of the request that was validated; None: the whole body.
    """
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, found["loc"]))
    where = (names or {}).get(where, where)
    text = ": ".join(part for part in (param, where, found["msg"]) if part)
    return ApiError(422, text if param or where else f"the body: {text}", param=param or where or None)


def read_page_query(request: web.Request, *, usual: int, most: int) -> tuple[str | None, int]:
    text = request.query.get("limit", str(usual))
    limit = int(text) if re.fullmatch(r"\d{1,9}", text) else 0
    if not 1 <= limit <= most:
        raise ApiError(400, f"limit must be from 1 to {most}, found {text[:40]!r}", param="limit")
    return request.query.get("after") or None, limit


def write_page(data: list[dict[str, Any]], has_more: bool) -> web.Response:
    """Returns a page of a list in OpenAI's form."""
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return write_json({"object": "list", "data": data, "has_more": has_more, **ends})


_PATH = re.compile(r"""(?<![\w.~-])/([^\s/'"`:;,()<>\[\]{}]+)(?:/[^\s/'"`:;,()<>\[\]{}]+)+/?""")
"""A path of at least two names that begins at the root; the first in the group."""


def hide_paths(text: str) -> str:
    """Returns a message for clients: of a path of this machine it has the last name only.

    Example: "cannot read /home/me/base/config.json" -> "cannot read config.json".
    """
    roots = frozenset(os.listdir("/"))  # `/v1/files` is not a path of this machine
    return _PATH.sub(lambda path: path[0].rstrip("/").rpartition("/")[2] if path[1] in roots else path[0], text)


def build_client_error(path: str, error: BadRequest) -> dict[str, Any]:
    """Returns the body of an error, in the form of the API whose path was called."""
    error.message = hide_paths(error.message)
    return build_error_body(path, error)


def make_id(prefix: str) -> str:
    """Returns an unused id: the prefix and 24 hexadecimal digits."""
    return f"{prefix}-{secrets.token_hex(12)}"
