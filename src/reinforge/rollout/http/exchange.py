"""Requests and responses of the HTTP interfaces to models, for episodes and servers of models.

    POST .../v1/chat/completions   find_dialect -> dialect.read_request(decode_body(body)) -> dialect.write_answer

Every failure becomes a response in the form of the API that was called, since a client that gets an exception from its
transport hides its message.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from typing import Any, Protocol, TypeVar, cast

from pydantic_core import to_json

from reinforge.bounded import TooDeepError, TooManyError, check_values, load_json
from reinforge.dialects.chat_call import BadRequest, ChatCall, EventWriter, ReplyHead
from reinforge.errors import (
    BackendError,
    BackendUnavailable,
    ChatTemplateError,
    ConfigError,
    ContextOverflow,
    MessagesRejected,
    did_you_mean,
)
from reinforge.limits import get_limits
from reinforge.rollout.handle.arguments import HONORED, KNOWN, MAX_NAME_CHARS, MAX_NAMES, UNUSED
from reinforge.safe_text import redact_secrets

logger = logging.getLogger(__name__)

ROUTES = {
    "chat/completions": "reinforge.dialects.openai_chat",
    "completions": "reinforge.dialects.completions",
    "responses": "reinforge.dialects.responses",
    "messages": "reinforge.dialects.anthropic",
}
"""End of the path -> the module of its dialect."""
GEMINI = "reinforge.dialects.gemini"
EMBEDS = (":embedContent", ":batchEmbedContents")
_MODEL_PATH = re.compile(r".*/models/(.+):(generateContent|streamGenerateContent|countTokens|\w*[eE]mbedContents?)")
COUNTS = {
    "/messages/count_tokens": ("/messages", "input_tokens"),
    ":countTokens": (":generateContent", "totalTokens"),
}
"""End of a path that counts the tokens of a call -> that of the call, and the field of the answer."""
T = TypeVar("T")
_USED = KNOWN - UNUSED
SHORT_BODY = 1 << 16  # bytes that are read in less than a few milliseconds
_READER = ThreadPoolExecutor(1, "read-body")
NO_RETRY = {"x-should-retry": "false"}  # tells the official clients not to send a failed request again
EVENT_STREAM = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
"""Headers of a streamed response."""


class Dialect(Protocol):
    """A module of `reinforge.dialects` that speaks one API."""

    def read_request(self, body: Mapping[str, Any], *, omits_content: bool = False) -> ChatCall:
        """Returns the call that a body asks for.

        Args:
            omits_content: Images and files become notes in brackets; without it they are refused.
        """

    def write_answer(self, completion: Mapping[str, Any], call: ChatCall) -> dict[str, Any]:
        """Returns the body of the response."""

    def open_events(self, call: ChatCall, head: ReplyHead | None = None) -> EventWriter:
        """Returns what writes the events of a reply; `head` is known of one that is still being sampled."""


@dataclass(frozen=True, slots=True)
class EndpointRequest:
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class EndpointResponse:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes | Iterator[bytes]  # its pieces, of which none waits for anything


def find_dialect(path: str) -> Dialect | None:
    """Returns the dialect of a path, without a slash at its end; None: no dialect has it."""
    if (named := _MODEL_PATH.fullmatch(path)) is not None:
        return _load_dialect(GEMINI) if named[2].endswith("enerateContent") else None
    parts = path.rsplit("/", 2)
    module = ROUTES.get("/".join(parts[-2:])) or ROUTES.get(parts[-1])
    return None if module is None else _load_dialect(module)


@cache
def _load_dialect(module: str) -> Dialect:
    return cast(Dialect, importlib.import_module(module))


def split_count(path: str) -> tuple[str, str]:
    """Returns the path of the call whose tokens a request counts, and the field of the answer; empty: it is a call."""
    for end, (call, field_name) in COUNTS.items():
        if path.endswith(end):
            return path.removesuffix(end) + call, field_name
    return path, ""


def complete_body(path: str, body: Any) -> Any:
    """Returns a body with what its path says: Gemini's names the model, and Anthropic counts without a length."""
    if not isinstance(body, dict):
        return body
    if path.endswith("/count_tokens"):
        return {"max_tokens": 1, **body}
    if (named := _MODEL_PATH.fullmatch(path)) is not None:
        return {**body, "model": named[1], "stream": named[2].startswith("stream")}
    return body


def read_request(dialect: Dialect, body: Mapping[str, Any], *, omits_content: bool = False) -> ChatCall:
    """Returns the call that a body asks for, without the arguments that no model here knows: they change no token."""
    call = dialect.read_request(body, omits_content=omits_content)
    if unused := [name for name, value in call.arguments.items() if value and name not in _USED]:
        shown = [f"{name[:MAX_NAME_CHARS]}{_hint(name)}" for name in unused[:MAX_NAMES]]
        known = {name: value for name, value in call.arguments.items() if name in KNOWN}
        call = replace(call, arguments=known, ignored=(*call.ignored, *shown))
    return call


def _hint(name: str) -> str:
    """Returns what was probably meant by an argument that nothing knows."""
    found = "" if name in KNOWN else did_you_mean(name, sorted(HONORED)).removeprefix(", ")
    return f" ({found})" if found else ""


def build_error_response(request: EndpointRequest, error: BadRequest) -> EndpointResponse:
    """Returns a failure in the form of the API that was called, which no client should try again."""
    response = respond(build_error_body(request.path, error))
    return EndpointResponse(error.status, {**response.headers, **NO_RETRY}, response.body)


def build_error_body(path: str, error: BadRequest) -> dict[str, Any]:
    module = ROUTES["messages" if "/messages" in path else "chat/completions"]
    module = GEMINI if _MODEL_PATH.fullmatch(path) else module
    body: dict[str, Any] = importlib.import_module(module).write_error(error)
    return body


def describe_model(name: str, created_s: int = 0) -> dict[str, Any]:
    """Returns a model in OpenAI's and in Anthropic's form, which have different fields."""
    anthropics = {"type": "model", "display_name": name, "lifecycle": "active"}
    created_at = datetime.fromtimestamp(created_s, UTC).isoformat()
    openais = {"id": name, "object": "model", "created": created_s, "owned_by": "reinforge"}
    return {**openais, **anthropics, "created_at": created_at}


def respond(body: Mapping[str, Any]) -> EndpointResponse:
    return EndpointResponse(200, {"content-type": "application/json"}, encode_body(body))


def encode_body(body: Mapping[str, Any]) -> bytes:
    try:
        return to_json(body)  # four times as fast as `json`
    except ValueError:  # half a surrogate, which JSON can hold as an escape only
        return json.dumps(body).encode()


def check_method(request: EndpointRequest, allowed: str) -> None:
    if request.method.upper() != allowed:
        raise BadRequest(
            f"{request.path} takes {allowed}, found {request.method}", status=405, code="method_not_allowed"
        )


async def read_beside(read: Callable[[bytes], T], body: bytes) -> T:
    """Returns what `read` makes of a body; long ones are read in a thread, one after the other."""
    if len(body) <= SHORT_BODY:
        return read(body)
    return await asyncio.get_running_loop().run_in_executor(_READER, read, body)


def check_body(body: bytes, most: int | None = None) -> bytes:
    """Refuses a body of too many JSON values before any of them is built; None: `request_values`."""
    try:
        check_values(body, most or get_limits().request_values)
    except TooManyError as error:
        raise BadRequest(f"the body has {error}", status=413, code="request_too_large") from None
    return body


def decode_body(body: bytes, most: int | None = None) -> Any:
    try:
        return load_json(check_body(body, most))
    except TooDeepError:
        raise BadRequest("the body is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None


def describe_failure(error: Exception, what: str = "a model call of an agent") -> BadRequest:
    """Returns what a client is told of an exception; a failure that is not the fault of the request is logged too."""
    if (found := find_failure(error)).code == "internal_error":
        logger.warning("%s failed: %s: %s", what, type(error).__name__, redact_secrets(str(error)), exc_info=error)
    return found


def find_failure(error: Exception) -> BadRequest:
    if isinstance(error, BadRequest):
        return error
    text = redact_secrets(str(error))
    if isinstance(error, ContextOverflow):
        return BadRequest(text, "messages", code="context_length_exceeded")
    if isinstance(error, MessagesRejected):
        return BadRequest(text, "messages")
    if isinstance(error, BackendUnavailable | ConnectionError | TimeoutError):
        return BadRequest(text or type(error).__name__, status=503, code="backend_unavailable")
    if isinstance(error, BackendError):
        return BadRequest(text, status=502, code="backend_error")
    is_setup = isinstance(error, ConfigError) and not isinstance(error, ChatTemplateError)
    if isinstance(error, TypeError | ValueError) and not is_setup:
        return BadRequest(text, getattr(error, "param", None))
    return BadRequest(f"{type(error).__name__}: {text}", status=500, code="internal_error")
