"""Chats with the served models, in the dialects of OpenAI and Anthropic.

POST /v1/chat/completions   /v1/completions   /v1/responses   /v1/messages   /v1/messages/count_tokens
GET  /v1/models             /v1/models/{name}
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from aiohttp import web
from pydantic import TypeAdapter

from reinforge.dialects.chat_call import BadRequest, ChatCall, ReplyHead, encode_event
from reinforge.errors import ReinforgeError
from reinforge.rollout.capture import derive_call_seed, sample_choices
from reinforge.rollout.handle.arguments import CallArguments, read_arguments
from reinforge.rollout.handle.chat import build_request, read_num_choices
from reinforge.rollout.handle.completion import ChatCompletion, build_completion
from reinforge.rollout.http.access import read_key
from reinforge.rollout.http.exchange import (
    EVENT_STREAM,
    ROUTES,
    Dialect,
    describe_failure,
    find_dialect,
    find_failure,
    read_request,
)
from reinforge.serving.models import ServedModel, ServedModels
from reinforge.serving.routes import (
    READER,
    ApiError,
    Feature,
    ServerLimits,
    abortable,
    build_client_error,
    decode_object,
    read_bytes,
    read_session,
    write_json,
    write_page,
)
from reinforge.types.episode import ModelCall
from reinforge.types.request import CLIENT, ModelReply, ModelRequest, ReplyDelta

COMPLETIONS, MESSAGES, COUNT = "/v1/completions", "/v1/messages", "/count_tokens"
MAX_RETRY_S = 60  # longest `Retry-After`: beyond it, the official clients choose their own time
_PREFIXES = {"/v1/chat/completions": "chatcmpl-", COMPLETIONS: "cmpl-"}


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call that has been checked and can be sampled.

    Attributes:
        requests: One; or one for each prompt of a text completion, whose choices follow each other.
        num_choices: Replies to each of them.
        started_s: When it came, in seconds since the epoch.
        conversation: The session, else the user, that its body names, see `find_names`; empty: neither.
    """

    call_id: str
    requests: tuple[ModelRequest, ...]
    num_choices: int
    started_s: float
    conversation: str = ""

    @property
    def num_replies(self) -> int:
        return len(self.requests) * self.num_choices


def read_call(body: bytes, path: str, max_choices: int, max_tokens: int | None) -> tuple[ChatCall, PreparedCall]:
    """Returns the call that a body asks for, without its arguments, and what is sampled for it."""
    asked = decode_object(body)
    if path.endswith(COUNT):
        path, asked = path.removesuffix(COUNT), {**asked, "max_tokens": 1}
    prompts = asked.get("prompt") if path == COMPLETIONS else None  # a list of token ids is one prompt
    if not isinstance(prompts, list) or not all(isinstance(each, str | list) for each in prompts):
        prompts = []
    bodies = [{**asked, "prompt": each} for each in prompts[: max_choices + 1]] or [asked]
    calls = [read_request(get_dialect(path), each) for each in bodies]
    read = [(call.arguments.get("messages"), read_arguments({**call.arguments, "messages": None})) for call in calls]
    requests = tuple(_build(*each, max_choices, max_tokens) for each in read)
    call_id = f"{_PREFIXES.get(path, '')}{secrets.token_hex(12)}"
    prepared = PreparedCall(
        call_id, requests, read_num_choices(read[0][1]), time.time(), next(filter(None, find_names(asked)), "")
    )
    if prepared.num_replies > max_choices:
        raise ApiError(400, f"more than {max_choices} replies to the prompts of one call", param="prompt")
    return replace(calls[0], arguments={}), prepared


def find_names(asked: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the session and the user that a request's body names; empty: it does not.

    They are `metadata.session_id`, and OpenAI's `user` or `safety_identifier` or Anthropic's `metadata.user_id`.
    """
    metadata = asked.get("metadata")
    named = metadata if isinstance(metadata, Mapping) else {}
    users = asked.get("user"), asked.get("safety_identifier"), named.get("user_id")
    found = [str(each) if isinstance(each, str | int) else "" for each in (named.get("session_id"), *users)]
    return found[0], next(filter(None, found[1:]), "")


READ_CALL = TypeAdapter(tuple[ChatCall, PreparedCall])


def _build(
    messages: Sequence[Any] | None, arguments: CallArguments, max_choices: int, max_tokens: int | None
) -> ModelRequest:
    n = read_num_choices(arguments)
    if n > max_choices:
        raise arguments.bad("n", f"must be at most {max_choices} on this server, found {n}")
    seed = arguments.get("seed")
    request = build_request(messages, arguments, sampling=None, seed=secrets.randbits(63) if seed is None else seed)
    asked = request.sampling.max_tokens
    if max_tokens is not None and asked is None:
        request = replace(request, sampling=replace(request.sampling, max_tokens=max_tokens))
    elif max_tokens is not None and asked is not None and asked > max_tokens:
        name = "max_completion_tokens" if "max_completion_tokens" in arguments.given else "max_tokens"
        raise arguments.bad(name, f"must be at most {max_tokens} on this server, found {asked}")
    return request


Keep = Callable[[Mapping[str, Any], Sequence[ModelReply]], None]
"""Takes the JSON body of an answer that is whole, and its replies; of a call that failed, its model and no replies."""


class ChatKeeper(Protocol):
    """Keeps chats; what goes wrong there must not reach the client."""

    def open(self, request: web.Request, body: bytes) -> AbstractContextManager[Keep | None]:
        """Yields what takes the answer to a request; None: the request is not kept."""


class ModelCaller:
    """Makes the calls of one request.

    Args:
        keep: Called with a finished completion and its replies, or with None and none if the call failed.
    """

    def __init__(
        self,
        models: ServedModels,
        model: ServedModel,
        keep: Callable[[ChatCompletion | None, Sequence[ModelReply]], None] | None = None,
    ):
        self._models, self._model, self._keep = models, model, keep

    async def complete(self, call: PreparedCall) -> ChatCompletion:
        try:
            replies = await self.sample(call)
        except Exception as error:
            self.fail(error)
            raise
        return self.finish(call, replies)

    def fail(self, error: Exception) -> None:
        """Keeps that the call failed, unless the request was the reason."""
        if self._keep is not None and find_failure(error).status >= 500:
            self._keep(None, ())

    async def sample(self, *calls: PreparedCall) -> list[ModelReply]:
        """Returns the replies to all requests of calls, in one batch."""
        with self._model.use():
            tasks = [
                asyncio.ensure_future(sample_choices(self._model.llm, request, call.num_choices))
                for call in calls
                for request in call.requests
            ]
            try:
                found = await asyncio.gather(*tasks)
            finally:
                for task in tasks:  # if one failed, the others are not needed
                    task.cancel()
        return [reply for replies in found for reply in replies]

    def finish(self, call: PreparedCall, replies: Sequence[ModelReply]) -> ChatCompletion:
        """Returns all replies as one completion, with the tokens of all prompts in its usage."""
        completions, n = list[ChatCompletion](), call.num_choices
        for place, request in enumerate(call.requests):
            completions.append(self._report(call, request, replies[place * n : (place + 1) * n]))
        completion = completions[0]
        for other in completions[1:]:
            completion.choices.extend(other.choices)
            completion.usage.update({name: count + other.usage[name] for name, count in completion.usage.items()})
        for index, (choice, reply) in enumerate(zip(completion.choices, replies, strict=True)):
            choice.update(index=index, model_version=reply.version)
        versions = {reply.version for reply in replies}
        completion["model_version"] = versions.pop() if len(versions) == 1 else None
        if self._keep is not None:
            self._keep(completion, replies)
        return completion

    def _report(self, call: PreparedCall, request: ModelRequest, replies: Sequence[ModelReply]) -> ChatCompletion:
        name, others = self._model.name, tuple(replies[1:])
        made = ModelCall(call.call_id, name, name, request, replies[0], (), call.started_s, time.time(), others=others)
        self._models.report(made, self._model)
        return build_completion(made)


Part = tuple[int, ReplyDelta | ModelReply]
PIECES_AT_ONCE = 64  # events of a finished reply that are written before other requests get their turn


class ReplyStream:
    """The response to one call whose client reads the reply while it is sampled."""

    def __init__(self, request: web.Request, dialect: Dialect, call: ChatCall, limits: ServerLimits):
        self._request, self._dialect, self._call, self._limits = request, dialect, call, limits
        self._response: web.StreamResponse | None = None
        self._headers: Mapping[str, str] = {}

    async def send(self, caller: ModelCaller, prepared: PreparedCall, model: ServedModel) -> web.StreamResponse:
        """Samples and sends the replies; what fails before the first token is the caller's to tell."""
        try:
            with model.use():
                await self._send(caller, prepared, model)
        except Exception as error:
            has_hung_up = isinstance(error, ConnectionError) and not isinstance(error, ReinforgeError)
            if not has_hung_up:
                caller.fail(error)
            if self._response is None or has_hung_up:
                raise
            await self._send_error(describe_failure(error, self._request.path))
        assert self._response is not None
        await self._response.write_eof()
        return self._response

    async def send_whole(self, completion: ChatCompletion, headers: Mapping[str, str]) -> web.StreamResponse:
        """Sends a finished completion as a stream."""
        self._headers = headers
        await self._write_all(self._dialect.open_events(self._call).finish(completion))
        assert self._response is not None
        await self._response.write_eof()
        return self._response

    async def _send(self, caller: ModelCaller, prepared: PreparedCall, model: ServedModel) -> None:
        replies, writer = dict[int, ModelReply](), None
        async with aclosing(iterate_parts(model, prepared.requests, prepared.num_choices)) as parts:
            async for index, part in parts:
                if isinstance(part, ModelReply):
                    replies[index] = part
                    continue
                if writer is None:
                    head = _build_head(prepared, part, model.name)
                    writer = self._dialect.open_events(self._call, head)
                await self._write(writer.write(part))
        completion = caller.finish(prepared, [replies[index] for index in range(prepared.num_replies)])
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
            response = web.StreamResponse(headers={**EVENT_STREAM, **self._headers})
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
        body = build_client_error(self._request.path, error)
        await self._write(encode_event(body, "error" if "/messages" in self._request.path else None))


async def iterate_parts(model: ServedModel, requests: Sequence[ModelRequest], n: int) -> AsyncGenerator[Part, None]:
    """Yields the pieces of n replies to each request as they come, each reply after its pieces.

    The first reply uses the request's seed; the others use seeds derived from it, as `sample_choices` does. Closing it
    stops sampling.
    """
    if n == len(requests) == 1:
        async with aclosing(model.llm.stream(requests[0])) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    queue = asyncio.Queue[Part | None]()

    async def run(index: int) -> None:
        request, number = requests[index // n], index % n
        seed = request.sampling.seed
        own = seed if not number or seed is None else derive_call_seed(seed, number)
        own_request = replace(request, sampling=replace(request.sampling, seed=own))
        async with aclosing(model.llm.stream(own_request, index)) as pieces:
            async for piece in pieces:
                queue.put_nowait((index, piece))

    tasks = [asyncio.ensure_future(run(index)) for index in range(n * len(requests))]
    for task in tasks:
        task.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        num_running = len(tasks)
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


_NO_EMBEDDINGS = "the models here write text and have no embeddings; use a server with an embedding model"


def get_dialect(path: str) -> Dialect:
    dialect = find_dialect(path)
    assert dialect is not None  # the routes are those of the dialects
    return dialect


class ChatApi(Feature):
    def __init__(self, models: ServedModels, limits: ServerLimits, keeper: ChatKeeper | None = None):
        self._models, self._limits, self._keeper = models, limits, keeper
        self.num_in_flight, self._by_client = 0, Counter[int]()
        self._call_s = 0.0  # how long a call takes, the newest counting most

    def routes(self) -> list[web.RouteDef]:
        return [
            *(web.post(f"/v1/{path}", self.answer) for path in ROUTES),
            web.post(f"{MESSAGES}{COUNT}", self.answer),
            web.post("/v1/embeddings", self.refuse),
            web.get("/v1/models", self.list_models),
            web.get("/v1/models/{name:.+}", self.show_model),
        ]

    @abortable
    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answers one call, or counts its tokens for Anthropic's clients; sampling stops if the client disconnects."""
        body = await read_bytes(request)
        with self._admit(request), self._open_keeper(request, body) as keep:
            call, prepared = await self._read(request, body)
            model = self._models.find(call.model, read_session(request.headers) or prepared.conversation)
            if request.path.endswith(COUNT):  # it is computed, and one token is sampled and dropped
                with model.use():
                    return write_json(
                        {"input_tokens": (await model.llm.sample(prepared.requests[0])).num_prompt_tokens}
                    )
            dialect = get_dialect(request.path)

            def keep_answer(completion: ChatCompletion | None, replies: Sequence[ModelReply]) -> None:
                if keep is not None:
                    answer = None if completion is None else dialect.write_answer(completion, call)
                    keep(answer or {"model": model.name}, replies)

            caller = ModelCaller(self._models, model, keep_answer)
            if call.stream:
                return await ReplyStream(request, dialect, call, self._limits).send(caller, prepared, model)
            return write_json(dialect.write_answer(await caller.complete(prepared), call))

    def _open_keeper(self, request: web.Request, body: bytes) -> AbstractContextManager[Keep | None]:
        return nullcontext() if self._keeper is None else self._keeper.open(request, body)

    async def _read(self, request: web.Request, body: bytes) -> tuple[ChatCall, PreparedCall]:
        arguments = request.path, self._limits.max_choices, self._limits.max_tokens
        read: tuple[ChatCall, PreparedCall]
        read = await request.config_dict[READER].read(read_call, body, *arguments, kind=READ_CALL)
        return read

    @contextmanager
    def _admit(self, request: web.Request) -> Iterator[None]:
        """Counts a call while it is in flight; above the limit, only clients with less than an equal share get in."""
        CLIENT.set(client := hash((request.remote, read_key(request.headers))))
        most, own = self._limits.max_in_flight, self._by_client[client]
        share = most // (len(self._by_client) + (own == 0))
        if self.num_in_flight >= most and (own >= share or self.num_in_flight >= 2 * most):
            raise self._refuse_call()
        started_s = time.monotonic()
        self.num_in_flight += 1
        self._by_client[client] += 1
        try:
            yield
            seconds = time.monotonic() - started_s
            self._call_s += (seconds - self._call_s) / (10 if self._call_s else 1)
        finally:
            self.num_in_flight -= 1
            self._by_client[client] -= 1
            if not self._by_client[client]:
                del self._by_client[client]

    def _refuse_call(self) -> ApiError:
        """Returns the refusal of a call, with the time after which those that wait now will have begun."""
        place = 1 + max((model.policy.count_waiting() for model in self._models), default=0)
        wait_s = math.ceil(place * self._call_s / self.num_in_flight)
        wait_s = min(max(wait_s, self._limits.retry_after_s), MAX_RETRY_S)
        message = (
            f"the server is answering {self.num_in_flight} requests, which is its limit; yours would have place "
            f"{place} in the queue: try again in {wait_s} s"
        )
        headers = {"retry-after": str(wait_s), "x-queue-position": str(place)}
        return ApiError(429, message, code="rate_limit_exceeded", headers=headers)

    async def refuse(self, request: web.Request) -> web.StreamResponse:
        raise ApiError(404, f"{request.path}: {_NO_EMBEDDINGS}", code="not_supported")

    async def list_models(self, request: web.Request) -> web.StreamResponse:
        return write_page(self._models.describe(), has_more=False)

    async def show_model(self, request: web.Request) -> web.StreamResponse:
        return write_json(self._models.find(request.match_info["name"]).describe())
