"""A LangChain chat model for an entry of `llms`, whose calls are recorded in the episode that makes them.

It works in `prompt | model | parser`, with `bind_tools`, and in LangGraph. The run decides how a trained policy is
sampled, so temperature and the like belong into the configuration. `langchain-core` is imported when an agent asks for
the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any


def build_chat_model(entry: str, create: Callable[..., Any]) -> Any:
    """Returns a LangChain chat model.

    Args:
        entry: The entry of `llms`.
        create: Makes one model call and blocks until it has ended: `create(messages=..., **arguments)`.
    """
    return _build_class()(entry=entry, create=create)


@cache
def _build_class() -> Callable[..., Any]:
    """Returns the model's class, made on first use."""
    from langchain_core.language_models.chat_models import BaseChatModel
    from langchain_core.messages import convert_to_openai_messages
    from langchain_core.outputs import ChatResult
    from langchain_core.utils.function_calling import convert_to_openai_tool

    class EpisodeChatModel(BaseChatModel):
        """The chat model of one entry of `llms`."""

        entry: Any
        create: Any

        @property
        def _llm_type(self) -> str:
            return "reinforge"

        def _generate(
            self, messages: Sequence[Any], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
        ) -> Any:
            arguments = kwargs if stop is None else {**kwargs, "stop": stop}
            reply = self.create(messages=convert_to_openai_messages(list(messages)), **arguments)
            return ChatResult(generations=[_build_generation(reply, choice) for choice in reply.choices])

        async def _agenerate(
            self, messages: Sequence[Any], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
        ) -> Any:
            return await asyncio.to_thread(self._generate, messages, stop, run_manager, **kwargs)

        def bind_tools(self, tools: Sequence[Any], *, tool_choice: Any = None, **kwargs: Any) -> Any:
            """Returns the model with tools to call."""
            choice = {} if tool_choice is None else {"tool_choice": tool_choice}
            return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **choice, **kwargs)

    return EpisodeChatModel


def _build_generation(reply: Any, choice: Any) -> Any:
    """Returns a choice; `response_metadata` has its log-probs and the completion's id."""
    from langchain_core.messages import convert_to_messages
    from langchain_core.outputs import ChatGeneration

    content = choice.message.get("content") or ""
    [message] = convert_to_messages([{**choice.message.model_dump(exclude_none=True), "content": content}])
    message.response_metadata = {
        "id": reply.id,
        "model_name": reply.model,
        "finish_reason": choice.finish_reason,
        "logprobs": choice.logprobs,
    }
    return ChatGeneration(message=message)
