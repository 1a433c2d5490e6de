"""A stand-in for an OpenAI-compatible endpoint, over real HTTP on the loopback, with scripted faults."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, Self

from aiohttp import web
from aiohttp.test_utils import TestServer

Step = Callable[[web.Request, dict[str, Any]], Any]


def says(text: str | None = "hello", choices: Sequence[str] = (), **message: Any) -> Step:
    """Returns a step that answers with a chat completion; keywords add to its first message."""

    def step(request: web.Request, body: dict[str, Any]) -> web.Response:
        messages = [{"content": text, **message}, *({"content": other} for other in choices)]
        listed = [
            {"index": index, "finish_reason": "stop", "message": {"role": "assistant", **each}}
            for index, each in enumerate(messages)
        ]
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        return web.json_response({"id": "c", "object": "chat.completion", "choices": listed, "usage": usage})

    return step


def fails(status: int, text: str = "", **headers: str) -> Step:
    """Returns a step that answers with an error; underscores in header names become dashes."""
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    body = text or json.dumps({"error": {"message": f"broken {status}", "type": "x", "code": None}})
    return lambda request, _: web.Response(status=status, text=body, headers=named)


def page(status: int = 200) -> Step:
    text = "<html><body><h1>Bad gateway</h1></body></html>"
    return lambda request, _: web.Response(status=status, text=text, content_type="text/html")


async def cut(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Sends half a response, then drops the connection."""
    response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    assert request.transport is not None
    request.transport.abort()
    return response


def slow(seconds: float) -> Step:
    async def step(request: web.Request, body: dict[str, Any]) -> web.Response:
        await asyncio.sleep(seconds)
        return web.json_response({})

    return step


class OpenAIServer:
    """Answers with the steps of its script in order, then repeats the last one.

    Attributes:
        bodies: The body of each request.
        headers: The headers of each request.
        times: When each request arrived, in the event loop's seconds.
    """

    def __init__(self, *script: Step):
        self.script = list(script)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        app = web.Application(client_max_size=1 << 26)
        for path in ("/v1/chat/completions", "/v1/completions"):
            app.router.add_post(path, self._answer)
        self._server = TestServer(app)

    async def __aenter__(self) -> Self:
        await self._server.start_server()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._server.close()

    @property
    def url(self) -> str:
        return str(self._server.make_url("/v1"))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        step = self.script[min(len(self.bodies), len(self.script) - 1)]
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.times.append(asyncio.get_running_loop().time())
        answer = step(request, body)
        return await answer if asyncio.iscoroutine(answer) else answer
