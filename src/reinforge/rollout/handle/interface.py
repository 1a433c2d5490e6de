"""`llm.chat.completions`, with the methods of OpenAI's client: `create` and `parse`, awaited or blocking.

What OpenAI's client has besides is an `AttributeError` that names `context.openai()`: the client itself, whose calls
are recorded in the same way.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from pydantic import BaseModel, ValidationError

from reinforge.errors import InvalidCall
from reinforge.rollout.handle.arguments import CallArguments, read_arguments
from reinforge.rollout.handle.completion import ChatCompletion


class ChatCaller(Protocol):
    def complete(self, messages: Sequence[Any] | None, arguments: CallArguments) -> Coroutine[Any, Any, ChatCompletion]:
        """Makes one call."""

    def blame_reply(self, reason: str) -> None:
        """Notes why the latest reply is unusable, in case that the agent fails on it."""


class AsyncCompletions:
    """`llm.chat.completions` of an async workflow."""

    __slots__ = ("__dict__", "__weakref__", "_caller")

    def __init__(self, caller: ChatCaller):
        self._caller = caller

    def create(
        self, *, messages: Sequence[Any] | None = None, stream: bool | None = None, **arguments: Any
    ) -> Coroutine[Any, Any, Any]:
        """Returns a completion; with `stream=True` its chunks, an async iterator.

        Args:
            arguments: Every other argument of OpenAI's API. Those that change no token are ignored.

        Raises:
            InvalidCall: An argument would change the reply and cannot be honored; the message names it.
        """
        if stream is not True and _SHAPING_ARGUMENTS.isdisjoint(arguments):  # a coroutine less while thousands wait
            return self._caller.complete(messages, read_arguments(arguments) if arguments else _NO_ARGUMENTS)
        return self._create(messages, stream, arguments)

    async def _create(self, messages: Sequence[Any] | None, stream: bool | None, arguments: Mapping[str, Any]) -> Any:
        read = read_arguments(arguments)
        _check_shape(read)
        completion = await self._caller.complete(messages, read)
        if read.get("return_token_ids"):
            add_token_ids(completion)
        return _open_stream(completion, read, is_async=True) if stream is True else completion

    async def parse(self, *, response_format: Any = None, **arguments: Any) -> ChatCompletion:
        """Returns a completion whose `choices[i].message.parsed` is an instance of a pydantic class.

        Args:
            response_format: The class; its JSON schema is enforced while the reply is sampled.
        """
        completion = await self.create(**_read_parse_arguments(response_format, arguments))
        return _add_parsed(completion, response_format, self._caller)

    def __getattr__(self, name: str) -> NoReturn:
        raise build_missing(self, "llm.chat.completions", name, ("create", "parse"))


# `create` returns a coroutine: `unittest.mock.patch.object` and libraries that wrap it must treat it as `async def`
if sys.version_info >= (3, 12):
    inspect.markcoroutinefunction(AsyncCompletions.create)
else:
    AsyncCompletions.create._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]


class BlockingCompletions:
    """`llm.chat.completions` of a plain workflow, whose calls block the thread."""

    def __init__(self, caller: ChatCaller, loop: asyncio.AbstractEventLoop):
        self._caller, self._loop = caller, loop
        self._completions = AsyncCompletions(caller)

    def create(self, *, stream: bool | None = None, **arguments: Any) -> Any:
        """Returns a completion; with `stream=True` its chunks, an iterator. See `AsyncCompletions.create`."""
        work = self._completions.create(**arguments)
        completion = asyncio.run_coroutine_threadsafe(work, self._loop).result()
        return _open_stream(completion, read_arguments(arguments), is_async=False) if stream is True else completion

    def parse(self, *, response_format: Any = None, **arguments: Any) -> ChatCompletion:
        work = self._completions.parse(response_format=response_format, **arguments)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __getattr__(self, name: str) -> NoReturn:
        raise build_missing(self, "llm.chat.completions", name, ("create", "parse"))


class ChatNamespace:
    """`llm.chat`."""

    __slots__ = ("__weakref__", "completions")

    def __init__(self, completions: AsyncCompletions | BlockingCompletions):
        self.completions = completions


_NO_ARGUMENTS = CallArguments({})
_SHAPING_ARGUMENTS = frozenset({"extra_body", "response_format", "return_token_ids", "stream_options"})
"""Arguments that concern the shape of the result, or hide others that do."""


def build_missing(owner: object, path: str, name: str, has: Sequence[str]) -> AttributeError:
    message = f"{path} has {' and '.join(has)}, but no attribute {name!r}"
    if not name.startswith("_"):
        message += "; context.openai() and context.async_openai() return OpenAI's own client, which is recorded as well"
    return AttributeError(message, name=name, obj=owner)


def _check_shape(arguments: CallArguments) -> None:
    """Refuses what concerns the shape of the result, before anything is sampled."""
    if "stream" in arguments.given:
        raise arguments.bad("stream", "is a separate argument: create(..., stream=True)")
    if isinstance(found := arguments.get("response_format"), type):
        raise arguments.bad("response_format", f"is the class {found.__name__}: use chat.completions.parse")
    options = arguments.get("stream_options")
    if options is not None and not isinstance(options, Mapping):
        raise arguments.bad("stream_options", f"must be a dict, found {type(options).__name__}")


def _open_stream(completion: ChatCompletion, arguments: CallArguments, *, is_async: bool) -> Any:
    from reinforge.rollout.handle.streaming import AsyncChunkStream, ChunkStream, build_chunks

    usage = bool((arguments.get("stream_options") or {}).get("include_usage"))
    chunks = build_chunks(completion, logprobs=bool(arguments.get("logprobs")), include_usage=usage)
    return AsyncChunkStream(chunks) if is_async else ChunkStream(chunks)


def add_token_ids(completion: ChatCompletion) -> None:
    """Adds `prompt_token_ids` and each choice's `token_ids`, as vLLM does; None where they are not known."""
    found = [choice.logprobs for choice in completion.choices]
    completion["prompt_token_ids"] = list(getattr(found[0], "prompt_token_ids", None) or ()) or None
    for choice, tokens in zip(completion.choices, found, strict=True):
        choice["token_ids"] = list(getattr(tokens, "token_ids", None) or ()) or None


def _read_parse_arguments(response_format: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    if arguments.get("stream"):
        raise InvalidCall("chat.completions.parse: stream is not supported; use create", "stream")
    if not isinstance(response_format, type) or not issubclass(response_format, BaseModel):
        return {**arguments, "response_format": response_format}
    schema = {"name": response_format.__name__, "schema": response_format.model_json_schema(), "strict": True}
    return {**arguments, "response_format": {"type": "json_schema", "json_schema": schema}}


def _add_parsed(completion: ChatCompletion, response_format: Any, caller: ChatCaller) -> ChatCompletion:
    is_class = isinstance(response_format, type) and issubclass(response_format, BaseModel)
    for choice in completion.choices:
        message, parsed = choice.message, None
        if is_class and message.content and not message.refusal and not message.tool_calls:
            try:
                parsed = response_format.model_validate_json(message.content)
            except ValidationError as error:
                cut = ", since it was cut off at its maximum length" if choice.finish_reason == "length" else ""
                problem = error.errors(include_url=False, include_input=False)[0]["msg"]
                reason = f"the reply is not the JSON of a {response_format.__name__}{cut}: {problem}"
                caller.blame_reply(reason)
                raise ValueError(reason) from None
        object.__setattr__(message, "parsed", parsed)  # no entry: it is not part of the message that is passed back
    return completion
