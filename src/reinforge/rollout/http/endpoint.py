"""Answers the HTTP requests of one episode: the APIs of OpenAI, Anthropic and Gemini in front of its model handles.

    client -> request -> dialect.read_request -> llm.chat.completions.create -> dialect.write_answer -> response

The clients in this process and the gateway both end here. Every failure becomes a response in the form of the API that
was called, since a client that gets an exception from its transport hides its message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import CancelledError as FutureCancelled
from typing import Any

from reinforge.dialects.chat_call import BadRequest, ChatCall
from reinforge.errors import CaptureError, did_you_mean
from reinforge.limits import get_limits
from reinforge.rollout.capture import Capture
from reinforge.rollout.http import exchange
from reinforge.rollout.http.routes import LLMRoutes

logger = logging.getLogger(__name__)

NAMES_SHOWN = 20  # maximum names of models in a message
REFUSED = (400, 404, 413, 422)  # statuses of a call that is the client's fault


BLOCKING = (
    "a blocking client in an `async def` workflow would hold up the run's event loop, in which the model answers: use "
    "the async client (context.async_openai(), context.async_http_client()), or call it in a thread: "
    "await asyncio.to_thread(...), or write the workflow as a plain `def`"
)


class EpisodeEndpoint:
    """The models of one episode behind HTTP.

    Args:
        capture: What the episode has recorded, which also notes refused calls and ignored fields.
        routes: Which entry answers which request; None: requests name it.

    Attributes:
        loop: The event loop in which `handle` must be called; `answer` and `answer_blocking` work elsewhere too.
        answer_environment: What answers `/mcp`, where programs play the episode's environment; None: it has none.
    """

    def __init__(
        self,
        find_llm: Callable[[str], Any],
        default: str,
        entries: Mapping[str, str],
        capture: Capture,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        routes: LLMRoutes | None = None,
    ):
        self._find_llm, self.default, self.entries = find_llm, default, dict(entries)
        self.loop = asyncio.get_running_loop() if loop is None else loop
        self._capture = capture
        self.answer_environment: Callable[[exchange.EndpointRequest], Awaitable[exchange.EndpointResponse]] | None = (
            None
        )
        self._responses: dict[str, list[Any]] = {}
        self._routes = routes or LLMRoutes(answers_any=len(self.entries) < 2)

    @property
    def is_closed(self) -> bool:
        return self._capture.closed

    async def handle(self, request: exchange.EndpointRequest) -> exchange.EndpointResponse:
        """Answers a request, in the event loop of the handles."""
        try:
            return await self._route(request)
        except Exception as error:  # noqa: BLE001  whatever fails is told to the client
            has_ended = isinstance(error, CaptureError) and self.is_closed
            described = build_ended() if has_ended else exchange.describe_failure(error)
            is_call = request.method.upper() == "POST" and exchange.find_dialect(request.path.rstrip("/")) is not None
            if is_call and described.status in REFUSED and described.code != "context_length_exceeded":
                self._capture.refuse(f"{request.path} {described.status}: {described.message}")
            elif described.status == 404:  # not a model call, so the episode may be sound without it
                self._warn_once("404", "%s %s: %s", request.method, request.path, described.message)
            return exchange.build_error_response(request, described)

    async def answer(self, request: exchange.EndpointRequest) -> exchange.EndpointResponse:
        if asyncio.get_running_loop() is self.loop:
            return await self.handle(request)
        if (work := self._start(request)) is None:
            return exchange.build_error_response(request, build_ended())
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return exchange.build_error_response(request, build_ended())

    def answer_blocking(self, request: exchange.EndpointRequest) -> exchange.EndpointResponse:
        """Answers a request, and blocks the calling thread meanwhile; from any thread but that of the event loop."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self.loop:
            return exchange.build_error_response(request, BadRequest(BLOCKING, code="blocking_call"))
        if (work := self._start(request)) is None:
            return exchange.build_error_response(request, build_ended())
        try:
            return work.result()
        except FutureCancelled:  # the run is over
            return exchange.build_error_response(request, build_ended())

    def _start(self, request: exchange.EndpointRequest) -> Any:
        work = self.handle(request)
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:
            work.close()
            return None

    async def _route(self, request: exchange.EndpointRequest) -> exchange.EndpointResponse:
        path = request.path.rstrip("/")
        if path == "/mcp" and self.answer_environment is not None and not self.is_closed:
            return await self.answer_environment(request)
        called, counted = exchange.split_count(path)
        dialect, embeds = exchange.find_dialect(called), path.endswith("/embeddings")
        if path.endswith(exchange.EMBEDS):
            message = "embeddings are answered in OpenAI's form alone: POST .../v1/embeddings"
            raise BadRequest(message, status=404, code="not_found")
        if dialect is None and (path.endswith("/models") or "/models/" in path):
            exchange.check_method(request, "GET")
            return exchange.respond(self._describe_models(path.partition("/models/")[2]))
        if dialect is None and not embeds:
            raise BadRequest(
                f"there is no {request.method} {request.path} here: this client reaches the model of an episode; "
                f"it answers POST .../{', .../'.join(exchange.ROUTES)}, .../models/NAME:generateContent and "
                "GET .../models",
                status=404,
                code="not_found",
            )
        exchange.check_method(request, "POST")
        if self.is_closed:
            raise build_ended()
        if dialect is None:
            return exchange.respond(await self._embed(await exchange.read_beside(exchange.decode_body, request.body)))
        call = await exchange.read_beside(lambda body: self._read(dialect, path, body), request.body)
        named = [*call.ignored, *(f"the tool {kind}, which its vendor runs" for kind in call.dropped)]
        if named:
            self._capture.ignore(named, request.headers.get("user-agent", ""))
        llm = self._find_llm(self._choose_entry(call))
        if counted:
            if (count := await llm.answer_beside("count", call.arguments)) is not None:
                return exchange.respond({counted: count})
            message = f"{llm.model_name} is not in this process, so its tokens cannot be counted"
            raise BadRequest(f"{message}; the usage of its replies has them", status=404, code="not_found")
        completion = await llm.chat.completions.create(**call.arguments)
        if call.model:  # clients compare it with what they asked for
            completion = {**completion, "model": call.model}
        if dialect is exchange.find_dialect("responses"):
            self._store(call, dialect.write_answer(completion, call))
        if call.stream:
            return exchange.EndpointResponse(
                200, dict(exchange.EVENT_STREAM), dialect.open_events(call).finish(completion)
            )
        return exchange.respond(dialect.write_answer(completion, call))

    async def _embed(self, body: Any) -> Any:
        """Returns the answer of an entry that has embeddings; this is not a model call, and is not recorded."""
        name = body.get("model") if isinstance(body, dict) else None
        named = [entry for entry in self._routes.embedders if name in (entry, self.entries[entry])]
        if len(found := named[:1] or self._routes.embedders) != 1:
            message = "embeddings come from an entry of llms of `_type: openai`: "
            message += f"name one of {', '.join(found)} as the model" if found else "add one for this model"
            raise BadRequest(message, "model", status=404, code="model_not_found")
        return await self._find_llm(found[0]).answer_beside("embed", body)

    def _read(self, dialect: exchange.Dialect, path: str, content: bytes) -> ChatCall:
        body = exchange.complete_body(path, exchange.decode_body(content))
        if isinstance(body, dict) and (previous := body.get("previous_response_id")):
            if previous not in self._responses:
                message = f"this episode has no response {str(previous)[:60]!r}; send the whole conversation in input"
                raise BadRequest(f"previous_response_id: {message}", "previous_response_id")
            body = {**body, "previous_response_id": None, "input": [*self._responses[previous], *list_items(body)]}
        return exchange.read_request(dialect, body, omits_content=self._capture.omits_content)

    def _store(self, call: ChatCall, answer: Mapping[str, Any]) -> None:
        """Keeps a response with its conversation, which later requests may name instead of sending it."""
        body = call.options["body"]
        if body.get("store") is not False:
            self._responses[answer["id"]] = [*list_items(body), *answer["output"]]
            while len(self._responses) > get_limits().kept_replies:
                del self._responses[next(iter(self._responses))]

    def _choose_entry(self, call: ChatCall) -> str:
        """Returns the entry of `llms` that answers: the first whose `match` holds, or else by the requested name.

        Example: entries {"agent": "tiny"}: "agent", "tiny" and (with a warning) "gpt-4o" -> "agent".
        """
        model = call.model
        if (matched := self._routes.find(call)) is not None:
            return matched
        if not model or model in self.entries:
            return model or self.default
        if named := [entry for entry, name in self.entries.items() if name == model]:
            return self.default if self.default in named else named[0]
        names = list(dict.fromkeys([*self.entries, *self.entries.values()]))
        is_misspelled = len(self.entries) > 1 and did_you_mean(model, list(self.entries))
        if is_misspelled or not self._routes.answers_any:
            listed = ", ".join(names[:NAMES_SHOWN])
            fix = "" if is_misspelled else "; `workflow.llm` names the entry that answers any other name"
            raise BadRequest(
                f"the model {model!r} does not exist{did_you_mean(model, names)}; llms has: {listed}{fix}",
                "model",
                status=404,
                code="model_not_found",
            )
        text = "the agent's client asks for the model %r, which llms does not have; %s (%s) answers instead"
        self._warn_once(model, text, model, self.default, self.entries.get(self.default))
        return self.default

    def _warn_once(self, subject: str, text: str, *values: object) -> None:
        if subject not in self._capture.told:
            self._capture.told.add(subject)
            logger.warning(text, *values)

    def _describe_models(self, name: str) -> dict[str, Any]:
        if name:
            self._choose_entry(ChatCall({}, name))  # every name that calls accept is a model
            return exchange.describe_model(name)
        names = dict.fromkeys([*self.entries, *self.entries.values()])
        return {"object": "list", "data": [exchange.describe_model(each) for each in names]}


def list_items(body: Mapping[str, Any]) -> list[Any]:
    """Returns the input of a request of the Responses API as items."""
    found = body.get("input") or []
    return [{"role": "user", "content": found}] if isinstance(found, str) else list(found)


def build_ended() -> BadRequest:
    return BadRequest("the episode has ended; its clients can no longer be used", status=410, code="episode_ended")
