"""What the stand-ins for other people's services share: a thread of their own, scripted faults, errors and a key.

    with OpenAIService() as service:
        service.faults["create"] = [lost_response]   faults for the next calls of a kind, one each

A fault is a step of tests/openai_server.py that replaces the response, or `after(step)`: the call takes effect, then
the step responds. A service runs in its own thread, so other processes and event loops can use it too.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Self

from aiohttp import web

from tests.loop_thread import LoopThread
from tests.openai_server import cut

Handler = Callable[[web.Request, dict[str, Any]], Any]
Route = tuple[str, str, str, Callable[[web.Request], Awaitable[Any]]]
"""Method, path, kind of call and handler."""


class ApiError(Exception):
    """An error of a service."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class after:
    """The call takes effect, then `step` responds."""

    def __init__(self, step: Handler):
        self.step = step


async def no_response(request: web.Request, body: dict[str, Any]) -> web.Response:
    """Never responds."""
    await asyncio.sleep(3600)
    raise AssertionError


lost_response = after(cut)
"""The call takes effect, but its response does not arrive."""


class StandIn:
    """A service over real HTTP on the loopback, from its entry as a context manager on.

    Attributes:
        address: `http://127.0.0.1:PORT`.
        calls: Number of calls of each kind.
        seconds, ends: Duration of the next jobs, and how they end, one each; later ones succeed.
        faults: Kind of call -> faults of the next calls.
    """

    def __init__(self) -> None:
        self.address = ""
        self.calls: Counter[str] = Counter()
        self.seconds = 0.05
        self.ends: list[str] = []
        self.faults: dict[str, list[Any]] = {}
        self._numbers = itertools.count(1)
        self._thread = LoopThread()

    def routes(self) -> Iterable[Route]:
        raise NotImplementedError

    def check_key(self, kind: str, request: web.Request) -> None:
        """Raises an `ApiError` if the request has not the key that calls of this kind need."""

    def format_error(self, error: ApiError) -> dict[str, Any]:
        return {"detail": str(error)}

    def __enter__(self) -> Self:
        self._thread.__enter__()
        self._thread.call(self._start())
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._thread.call(self._stop())
        self._thread.__exit__(*exc_info)

    def build_app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        for method, path, kind, handler in self.routes():
            app.router.add_route(method, path, self._route(kind, handler))
        return app

    async def _start(self) -> None:
        self._runner = web.AppRunner(self.build_app(), shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.address = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._runner.cleanup()

    def _route(self, kind: str, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
        """Returns a handler that counts the call, injects its fault and checks the key."""

        async def answer(request: web.Request) -> web.StreamResponse:
            self.calls[kind] += 1
            planned = self.faults.get(kind) or []
            fault = planned.pop(0) if planned else None
            headers = {"x-request-id": "req-1"}
            try:
                if fault is not None and not isinstance(fault, after):
                    return await _await_if_needed(fault(request, {}))
                self.check_key(kind, request)
                result = await handler(request)
                if fault is not None:
                    return await _await_if_needed(fault.step(request, {}))
            except ApiError as error:
                return web.json_response(self.format_error(error), status=error.status, headers=headers)
            return result if isinstance(result, web.StreamResponse) else web.json_response(result, headers=headers)

        return answer


async def _await_if_needed(answer: Any) -> Any:
    return await answer if asyncio.iscoroutine(answer) else answer
