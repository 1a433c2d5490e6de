"""What can be attacked: a model in this process, one behind a URL, a function."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import SecretStr

from reinforge.config.loader import build_config
from reinforge.rollout.capture import ChatModel
from reinforge.rollout.openai_client import OpenAIChat
from reinforge.rollout.openai_llm import OpenAILLMConfig, endpoint_of
from reinforge.trainer.components import Builder
from reinforge.types.request import Message, ModelReply, ModelRequest

Target = str | Path | ChatModel | Callable[[list[Message]], Any]
"""A folder, hub id or `bundled:NAME`; anything with `sample(request)`; or `function(messages)`, async or plain."""


class FunctionTarget:
    """A function as a model: `function(messages)` returns the text of the answer.

    This is how a whole agent is attacked: the function runs it on the conversation and returns what it says.

    Args:
        function: Async, or plain; a plain one runs in threads, many at a time.
    """

    is_policy = False

    def __init__(self, function: Callable[[list[Message]], Any]):
        self._function = function

    @property
    def model_name(self) -> str:
        """The function's name."""
        return getattr(self._function, "__name__", type(self._function).__name__)

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Returns what the function answers."""
        if inspect.iscoroutinefunction(self._function):
            answer = await self._function(list(request.messages))
        else:
            answer = await asyncio.to_thread(self._function, list(request.messages))
        message = answer if isinstance(answer, dict) else {"role": "assistant", "content": str(answer)}
        return ModelReply(message, "stop", None)


def openai_target(
    model_name: str, base_url: str | None = None, api_key: str | None = None, **settings: Any
) -> OpenAIChat:
    """Returns a model behind an OpenAI-compatible URL, as a target or as a judge.

    Example: `ASTProblem(target=openai_target("some-model", "http://localhost:8000/v1"))`.

    Args:
        model_name: The model's name at the endpoint.
        base_url: Up to /v1; None: `OPENAI_BASE_URL`, or OpenAI's own.
        api_key: Sent as a bearer token; None: none, or `OPENAI_API_KEY` at OpenAI's own.
        settings: Further settings of `llms.<name>._type: openai`, such as `timeout_s`.
    """
    secret = None if api_key is None else SecretStr(api_key)
    config = OpenAILLMConfig(model_name=model_name, base_url=base_url, api_key=secret, **settings)
    url, key = endpoint_of(config)
    return OpenAIChat(config, url, key)


async def model_folder(named: str | Path) -> str:
    """Returns the folder or hub id of a model; `bundled:NAME` is made on first use.

    Raises:
        ConfigError: There is no bundled model of that name.
    """
    async with Builder(build_config({"finetuning": {"policy": {"model": str(named)}}})) as builder:
        return str(await builder.get_model_path())


def is_local(target: Target) -> bool:
    """Returns True for a model that is loaded into this process."""
    return isinstance(target, str | Path)


def as_chat_model(target: Any) -> ChatModel:
    """Returns a target that is not loaded here as a chat model."""
    return target if hasattr(target, "sample") else FunctionTarget(target)


class Answers(Protocol):
    """Whatever answers a request: a chat model, or the tester's own policy."""

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Draws one reply."""


async def ask_all(model: Answers, requests: Sequence[ModelRequest]) -> list[ModelReply | BaseException]:
    """Returns every reply, all asked for at the same time; what went wrong stands in its place."""
    return list(await asyncio.gather(*(model.sample(request) for request in requests), return_exceptions=True))
