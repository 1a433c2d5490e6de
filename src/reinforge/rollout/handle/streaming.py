"""A reply as a stream of chunks, with the attributes of the objects of OpenAI's Python client.

The reply is sampled whole and recorded once before its first chunk, so what is trained is what is streamed, even if the
agent stops reading.

    stream = await llm.chat.completions.create(messages=..., stream=True)
    async for chunk in stream:
        text = chunk.choices[0].delta.content
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from reinforge.dialects.chunks import split_completion
from reinforge.dialects.reply_tokens import read_tokens
from reinforge.rollout.handle.completion import CalledFunction, ChatUsage, EndpointLogprobs, ReplyObject, build_token


class CalledFunctionDelta(CalledFunction):
    """`delta.tool_calls[i].function`: the name in the first delta of a call, then pieces of the arguments."""

    absent = ("name", "arguments")


class ToolCallDelta(ReplyObject):
    """`delta.tool_calls[i]`: `index` tells which call it continues."""

    absent = ("id", "type", "function")

    index: int
    id: str | None
    type: Literal["function"] | None
    function: CalledFunctionDelta | None


class MessageDelta(ReplyObject):
    """`choices[i].delta`: what the chunk adds to the message."""

    absent = ("role", "content", "refusal", "function_call", "tool_calls")
    other = ("reasoning_content",)

    role: Literal["assistant"] | None
    content: str | None
    tool_calls: list[ToolCallDelta] | None


class ChunkChoice(ReplyObject):
    index: int
    delta: MessageDelta
    finish_reason: str | None
    logprobs: EndpointLogprobs | None


class ChatCompletionChunk(ReplyObject):
    """One chunk of a streamed reply."""

    absent = ("service_tier", "system_fingerprint", "usage")

    id: str
    choices: list[ChunkChoice]
    created: int
    model: str
    object: Literal["chat.completion.chunk"]
    usage: ChatUsage | None


class ChunkStream:
    """The chunks of a reply, for `for`; also a context manager."""

    def __init__(self, chunks: Iterator[ChatCompletionChunk]):
        self._chunks = chunks

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ChatCompletionChunk:
        return next(self._chunks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._chunks = iter(())


class AsyncChunkStream:
    """The chunks of a reply, for `async for`; also a context manager."""

    def __init__(self, chunks: Iterator[ChatCompletionChunk]):
        self._chunks = chunks

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChatCompletionChunk:
        for chunk in self._chunks:
            return chunk
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._chunks = iter(())


def build_chunks(
    completion: Mapping[str, Any], *, logprobs: bool = False, include_usage: bool = False
) -> Iterator[ChatCompletionChunk]:
    tokens = read_tokens(completion["choices"][0])
    if not logprobs:
        choices = [{**choice, "logprobs": None} for choice in completion["choices"]]
        completion = {**completion, "choices": choices}
    for chunk in split_completion(completion, token_texts=tokens.texts if tokens else (), include_usage=include_usage):
        yield _build_chunk(chunk)


def _build_chunk(chunk: dict[str, Any]) -> ChatCompletionChunk:
    choices = [ChunkChoice({**each, "delta": _build_delta(each["delta"])}) for each in chunk["choices"]]
    for choice in choices:
        if (found := choice["logprobs"]) is not None:
            content = [build_token(each) for each in found["content"]]
            choice["logprobs"] = EndpointLogprobs({**found, "content": content})
    built = ChatCompletionChunk({**chunk, "choices": choices})
    if chunk.get("usage") is not None:
        built["usage"] = ChatUsage(chunk["usage"])
    return built


def _build_delta(delta: dict[str, Any]) -> MessageDelta:
    built = MessageDelta(delta)
    if calls := delta.get("tool_calls"):
        built["tool_calls"] = [_build_call_delta(call) for call in calls]
    return built


def _build_call_delta(call: dict[str, Any]) -> ToolCallDelta:
    built = ToolCallDelta(call)
    if isinstance(call.get("function"), dict):
        built["function"] = CalledFunctionDelta(call["function"])
    return built
