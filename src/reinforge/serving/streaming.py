"""Sends replies while they are sampled, as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace

from aiohttp import web

from reinforge.dialects.chat_call import BadRequest, ChatCall, ReplyHead, encode_event
from reinforge.errors import ReinforgeError
from reinforge.rollout.capture import derive_call_seed
from reinforge.rollout.http.exchange import EVENT_STREAM, Dialect, build_error_body, describe_failure
from reinforge.serving.caller import ModelCaller, PreparedCall
from reinforge.serving.limits import ServerLimits
from reinforge.serving.models import ServedModel
from reinforge.types.request import ModelReply, ModelRequest, ReplyDelta

Part = tuple[int, ReplyDelta | ModelReply]
PIECES_AT_ONCE = 64
"""Events of a finished reply that are written before other requests get their turn."""


class ReplyStream:
    """The response to one call whose client reads the reply while it is sampled.

    Args:
        request: The HTTP request.
        dialect: The API that the client speaks.
        call: What the client asked for.
        limits: The server's limits.
    """

    def __init__(self, request: web.Request, dialect: Dialect, call: ChatCall, limits: ServerLimits):
        self._request, self._dialect, self._call, self._limits = request, dialect, call, limits
        self._response: web.StreamResponse | None = None

    async def send(self, caller: ModelCaller, prepared: PreparedCall, model: ServedModel) -> web.StreamResponse:
        """Samples and sends the replies; what fails before the first token is the caller's to tell.

        Args:
            caller: Makes the call.
            prepared: The call.
            model: The model that answers.
        """
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
        """Sends events; the response begins with the first ones.

        Raises:
            ConnectionError: The client hung up, or does not read.
        """
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
        """Tells a client whose stream has begun what failed."""
        body = build_error_body(self._request.path, error)
        await self._write(encode_event(body, "error" if "/messages" in self._request.path else None))


async def iterate_parts(model: ServedModel, request: ModelRequest, n: int) -> AsyncGenerator[Part, None]:
    """Yields the pieces of n replies as they come, each reply after its pieces; closing it stops sampling.

    The first reply uses the request's seed; the others use seeds derived from it, as `sample_choices` does.

    Args:
        model: The model that answers.
        request: The request.
        n: Number of replies.
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
