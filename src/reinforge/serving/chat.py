"""Chats with the served models, in the dialects of OpenAI and Anthropic.

POST /v1/chat/completions   /v1/completions   /v1/responses   /v1/messages
GET  /v1/models             /v1/models/{name}
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from reinforge.dialects.chat_call import BadRequest, ChatCall, ReplyHead, encode_event
from reinforge.errors import ReinforgeError
from reinforge.rollout.capture import derive_call_seed, sample_choices
from reinforge.rollout.handle.arguments import CallArguments, read_arguments
from reinforge.rollout.handle.chat import build_request, read_num_choices
from reinforge.rollout.handle.completion import ChatCompletion, build_completion
from reinforge.rollout.http.exchange import (
    EVENT_STREAM,
    ROUTES,
    Dialect,
    build_error_body,
    describe_failure,
    find_dialect,
    read_beside,
)
from reinforge.serving.models import ServedModel, ServedModels
from reinforge.serving.routes import (
    ApiError,
    Feature,
    ServerLimits,
    abortable,
    decode_object,
    read_bytes,
    write_json,
)
from reinforge.types.episode import ModelCall
from reinforge.types.request import ModelReply, ModelRequest, ReplyDelta


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call that has been checked and can be sampled.

    Attributes:
        started_s: When it came, in seconds since the epoch.
    """

    call_id: str
    request: ModelRequest
    num_choices: int
    started_s: float


class ModelCaller:
    """Makes the calls of one request."""

    def __init__(self, models: ServedModels, model: ServedModel, limits: ServerLimits, prefix: str = ""):
        self._models, self._model, self._limits, self._prefix = models, model, limits, prefix

    def prepare(self, messages: Sequence[Any] | None, arguments: CallArguments) -> PreparedCall:
        n, limits = read_num_choices(arguments), self._limits
        if n > limits.max_choices:
            raise arguments.bad("n", f"must be at most {limits.max_choices} on this server, found {n}")
        seed = arguments.get("seed")
        request = build_request(messages, arguments, sampling=None, seed=secrets.randbits(63) if seed is None else seed)
        asked = request.sampling.max_tokens
        if limits.max_tokens is not None and asked is None:
            request = replace(request, sampling=replace(request.sampling, max_tokens=limits.max_tokens))
        elif limits.max_tokens is not None and asked is not None and asked > limits.max_tokens:
            name = "max_completion_tokens" if "max_completion_tokens" in arguments.given else "max_tokens"
            raise arguments.bad(name, f"must be at most {limits.max_tokens} on this server, found {asked}")
        return PreparedCall(f"{self._prefix}{secrets.token_hex(12)}", request, n, time.time())

    async def complete(self, call: PreparedCall) -> ChatCompletion:
        with self._model.use():
            return self.finish(call, await sample_choices(self._model.llm, call.request, call.num_choices))

    def finish(self, call: PreparedCall, replies: Sequence[ModelReply]) -> ChatCompletion:
        reply, *others = replies
        name = self._model.name
        made = ModelCall(
            call.call_id, name, name, call.request, reply, (), call.started_s, time.time(), others=tuple(others)
        )
        self._models.report(made, self._model)
        completion, versions = build_completion(made), [each.version for each in replies]
        for choice, version in zip(completion.choices, versions, strict=True):
            choice["model_version"] = version
        completion["model_version"] = versions[0] if len(set(versions)) == 1 else None
        return completion


Part = tuple[int, ReplyDelta | ModelReply]
PIECES_AT_ONCE = 64
"""Events of a finished reply that are written before other requests get their turn."""


class ReplyStream:
    """The response to one call whose client reads the reply while it is sampled."""

    def __init__(self, request: web.Request, dialect: Dialect, call: ChatCall, limits: ServerLimits):
        self._request, self._dialect, self._call, self._limits = request, dialect, call, limits
        self._response: web.StreamResponse | None = None

    async def send(self, caller: ModelCaller, prepared: PreparedCall, model: ServedModel) -> web.StreamResponse:
        """Samples and sends the replies; what fails before the first token is the caller's to tell."""
        try:
            with model.use():
                await self._send(caller, prepared, model)
        except Exception as error:
            has_hung_up = isinstance(error, ConnectionError) and not isinstance(error, ReinforgeError)
            if self._response is None or has_hung_up:
                raise
            await self._send_error(describe_failure(error, self._request.path))
        assert self._response is not None
        await self._response.write_eof()
        return self._response

    async def _send(self, caller: ModelCaller, prepared: PreparedCall, model: ServedModel) -> None:
        replies, writer = dict[int, ModelReply](), None
        async with aclosing(iterate_parts(model, prepared.request, prepared.num_choices)) as parts:
            async for index, part in parts:
                if isinstance(part, ModelReply):
                    replies[index] = part
                    continue
                if writer is None:
                    head = _build_head(prepared, part, model.name)
                    writer = self._dialect.open_events(self._call, head)
                await self._write(writer.write(part))
        completion = caller.finish(prepared, [replies[index] for index in range(prepared.num_choices)])
        await self._write_all((writer or self._dialect.open_events(self._call)).finish(completion))

    async def _write_all(self, events: Iterator[bytes]) -> None:
        pieces = bytearray()
        for number, event in enumerate(events, 1):
            pieces += event
            if number % PIECES_AT_ONCE == 0:
                await asyncio.sleep(0)
        await self._write(bytes(pieces))

    async def _write(self, events: bytes) -> None:
        """Sends events; the response begins with the first ones."""
        if not events:
            return
        if self._response is None:
            response = web.StreamResponse(headers=EVENT_STREAM)
            await response.prepare(self._request)
            self._response = response
        try:
            async with asyncio.timeout(self._limits.write_timeout_s):
                await self._response.write(events)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client does not read its stream") from None

    async def _send_error(self, error: BadRequest) -> None:
        body = build_error_body(self._request.path, error)
        await self._write(encode_event(body, "error" if "/messages" in self._request.path else None))


async def iterate_parts(model: ServedModel, request: ModelRequest, n: int) -> AsyncGenerator[Part, None]:
    """Yields the pieces of n replies as they come, each reply after its pieces; closing it stops sampling.

    The first reply uses the request's seed; the others use seeds derived from it, as `sample_choices` does.
    """
    if n == 1:
        async with aclosing(model.llm.stream(request)) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    queue, seed = asyncio.Queue[Part | None](), request.sampling.seed

    async def run(index: int) -> None:
        own = seed if not index or seed is None else derive_call_seed(seed, index)
        own_request = replace(request, sampling=replace(request.sampling, seed=own))
        async with aclosing(model.llm.stream(own_request, index)) as pieces:
            async for piece in pieces:
                queue.put_nowait((index, piece))

    tasks = [asyncio.ensure_future(run(index)) for index in range(n)]
    for task in tasks:
        task.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        num_running = n
        while num_running:
            part = await queue.get()
            if part is not None:
                yield part
                continue
            num_running -= 1
            for task in tasks:
                if task.done():
                    task.result()  # raises what failed
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _build_head(prepared: PreparedCall, delta: ReplyDelta, model: str) -> ReplyHead:
    tokens = delta.tokens
    return ReplyHead(
        prepared.call_id,
        model,
        int(prepared.started_s),
        () if tokens is None else tokens.prompt_token_ids,
        None if tokens is None else tokens.policy_version,
    )


_PREFIXES = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}
_REFUSED = {
    "/v1/embeddings": "the models here write text and have no embeddings; use a server with an embedding model",
    "/v1/messages/count_tokens": "tokens are not counted in advance; the usage of a reply has the count of its prompt",
}


class ChatApi(Feature):
    def __init__(self, models: ServedModels, limits: ServerLimits):
        self._models, self._limits = models, limits
        self.num_in_flight = 0

    def routes(self) -> list[web.RouteDef]:
        return [
            *(web.post(f"/v1/{path}", self.answer) for path in ROUTES),
            *(web.post(path, self.refuse) for path in _REFUSED),
            web.get("/v1/models", self.list_models),
            web.get("/v1/models/{name:.+}", self.show_model),
        ]

    @abortable
    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answers one call; sampling stops if the client disconnects."""
        dialect = find_dialect(request.path)
        assert dialect is not None  # the routes are those of the dialects
        body = await read_bytes(request)
        with self._admit():
            call = await read_beside(lambda text: dialect.read_request(decode_object(text)), body)
            model = self._models.find(call.model)
            caller = ModelCaller(self._models, model, self._limits, _PREFIXES.get(request.path, ""))
            messages, others = call.arguments.get("messages"), {**call.arguments, "messages": None}
            prepared = await read_beside(lambda _: caller.prepare(messages, read_arguments(others)), body)
            if call.stream:
                return await ReplyStream(request, dialect, call, self._limits).send(caller, prepared, model)
            return write_json(dialect.write_answer(await caller.complete(prepared), call))

    @contextmanager
    def _admit(self) -> Iterator[None]:
        """Counts a call while it is in flight."""
        limits = self._limits
        if self.num_in_flight >= limits.max_in_flight:
            message = f"the server is answering {self.num_in_flight} requests, which is its limit; try again later"
            headers = {"retry-after": str(limits.retry_after_s)}
            raise ApiError(429, message, code="rate_limit_exceeded", headers=headers)
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1

    async def refuse(self, request: web.Request) -> web.StreamResponse:
        raise ApiError(404, f"{request.path}: {_REFUSED[request.path]}", code="not_supported")

    async def list_models(self, request: web.Request) -> web.StreamResponse:
        return write_json({"object": "list", "data": [model.describe() for model in self._models]})

    async def show_model(self, request: web.Request) -> web.StreamResponse:
        return write_json(self._models.find(request.match_info["name"]).describe())
