"""The `openai` client and `httpx` clients whose requests never leave the process: the running episode answers them.

    client = context.openai()             in a workflow, for this episode
    client = reinforge.current_openai()   anywhere, once; see `reinforge.rollout.context`

An agent keeps its own code: whatever `base_url` or host it uses, its model calls are recorded token by token. Time
limits of the client do not count; the run ends an episode that takes too long.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from reinforge.dialects.chat_call import BadRequest
from reinforge.errors import CaptureError, ConfigError, Problem
from reinforge.rollout.http.endpoint import EpisodeEndpoint
from reinforge.rollout.http.exchange import EndpointRequest, EndpointResponse, build_error_response

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

FindEndpoint = Callable[[], EpisodeEndpoint]  # returns what answers a request, when it is sent
BASE_URL = "http://episode/v1"
API_KEY = "episode"
LIBRARIES = ("httpx2", "httpx")
"""Libraries of HTTP clients with the same interface: the `openai` package uses httpx up to version 2, then httpx2."""


def build_openai(find: FindEndpoint, options: Mapping[str, Any]) -> OpenAI:
    """Returns a client of the `openai` package whose requests are answered by what `find` returns."""
    openai = _import_openai()
    client = build_http_client(find, _find_library_of(openai), {})
    return openai.OpenAI(**_add_defaults(options), http_client=client)


def build_async_openai(find: FindEndpoint, options: Mapping[str, Any]) -> AsyncOpenAI:
    openai = _import_openai()
    client = build_async_http_client(find, _find_library_of(openai), {})
    return openai.AsyncOpenAI(**_add_defaults(options), http_client=client)


def _add_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"base_url": BASE_URL, "api_key": API_KEY, "max_retries": 0, **options}


def build_http_client(find: FindEndpoint, library: str | None, options: Mapping[str, Any]) -> Any:
    """Returns a client of an HTTP library whose requests are answered by what `find` returns."""
    module = find_library(library)
    classes = build_classes(module)
    return classes.client(**options, transport=classes.transport(find))


def build_async_http_client(find: FindEndpoint, library: str | None, options: Mapping[str, Any]) -> Any:
    module = find_library(library)
    classes = build_classes(module)
    return classes.async_client(**options, transport=classes.async_transport(find))


def _import_openai() -> Any:
    if importlib.util.find_spec("openai") is None:
        raise ConfigError(
            Problem("", "the `openai` package is not installed, so there is no client to create", "pip install openai")
        )
    return importlib.import_module("openai")


def _find_library_of(openai: Any) -> str:
    """Returns the HTTP library of the installed `openai` package, which its own default client is built on."""
    roots = {each.__module__.partition(".")[0] for each in openai.DefaultHttpxClient.__mro__}
    return next((library for library in LIBRARIES if library in roots), "httpx")


def find_library(name: str | None = None) -> Any:
    if name is None:
        if importlib.util.find_spec("openai") is not None:
            name = _find_library_of(importlib.import_module("openai"))
        else:
            name = next((each for each in LIBRARIES if importlib.util.find_spec(each) is not None), "httpx")
    elif name not in LIBRARIES:
        raise ConfigError(Problem("", f"there is no HTTP library {name!r}", f"use {' or '.join(LIBRARIES)}"))
    if importlib.util.find_spec(name) is None:
        message = f"the `{name}` package is not installed, so there is no client to create"
        raise ConfigError(Problem("", message, f"pip install {name}"))
    return importlib.import_module(name)


class ClientClasses(NamedTuple):
    transport: Callable[[FindEndpoint], Any]
    async_transport: Callable[[FindEndpoint], Any]
    client: Callable[..., Any]
    async_client: Callable[..., Any]


@cache
def build_classes(library: Any) -> ClientClasses:
    """Returns the classes of an HTTP library, made on first use.

    Closing a client does nothing, since there is no connection: frameworks close the one that they were given after
    each call.
    """

    def build_response(answer: EndpointResponse, body: bytes, request: Any) -> Any:
        """Returns a response that has been read; from a stream and encoded headers it is made in 5 / 6 of the time."""
        headers = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
        headers.append((b"content-length", b"%d" % len(body)))
        response = library.Response(answer.status, headers=headers, stream=library.ByteStream(body), request=request)
        response.read()
        return response

    class EpisodeTransport(library.BaseTransport):
        def __init__(self, find: FindEndpoint):
            self.find = find

        def handle_request(self, request: Any) -> Any:
            asked = _read_request(request, request.read())
            try:
                answer = self.find().answer_blocking(asked)
            except CaptureError as error:  # the caller runs in no episode
                answer = _refuse(asked, error)
            body = answer.body
            if isinstance(body, bytes):
                return build_response(answer, body, request)
            return library.Response(answer.status, headers=answer.headers, content=body, request=request)

    class AsyncEpisodeTransport(library.AsyncBaseTransport):
        def __init__(self, find: FindEndpoint):
            self.find = find

        async def handle_async_request(self, request: Any) -> Any:
            asked = _read_request(request, await request.aread())
            try:
                answer = await self.find().answer(asked)
            except CaptureError as error:
                answer = _refuse(asked, error)
            body = answer.body
            if isinstance(body, bytes):
                return build_response(answer, body, request)
            return library.Response(answer.status, headers=answer.headers, content=_iterate(body), request=request)

    class EpisodeClient(library.Client):
        def close(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

        def __enter__(self) -> Self:
            return self

    class AsyncEpisodeClient(library.AsyncClient):
        async def aclose(self) -> None: ...

        async def __aexit__(self, *error: object) -> None: ...

        async def __aenter__(self) -> Self:
            return self

    return ClientClasses(EpisodeTransport, AsyncEpisodeTransport, EpisodeClient, AsyncEpisodeClient)


def _refuse(request: EndpointRequest, error: CaptureError) -> EndpointResponse:
    return build_error_response(request, BadRequest(str(error), code="no_episode"))


async def _iterate(pieces: Any) -> Any:
    for piece in pieces:
        yield piece


def _read_request(request: Any, body: bytes) -> EndpointRequest:
    headers = {"user-agent": request.headers.get("user-agent", "")}  # the only one that is read
    return EndpointRequest(request.method, request.url.path, headers, body)
