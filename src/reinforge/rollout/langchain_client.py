"""A LangChain chat model for an entry of `llms`, whose calls are recorded in the episode that makes them.

It works in `prompt | model | parser`, with `bind_tools` and `with_structured_output`, and in LangGraph. The run decides
how a trained policy is sampled, so temperature and the like belong in the configuration. `langchain-core` is imported
when an agent asks for the model.

A reply keeps its reasoning and the tool calls whose arguments are not a JSON object, and they are sent back with it:
LangChain itself leaves both out of requests, and the model would continue a conversation that it never had.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

TOOL_CHOICES = {"any": "required", True: "required", False: "none"}
"""LangChain's values of `tool_choice` that OpenAI spells otherwise; any string that is not a mode names a tool."""

MODES = ("auto", "none", "required")


def build_chat_model(entry: str, create: Callable[..., Any]) -> Any:
    return _build_class()(entry=entry, create=create)


@cache
def _build_class() -> Callable[..., Any]:
    from langchain_core.language_models.chat_models import BaseChatModel
    from langchain_core.outputs import ChatResult
    from langchain_core.utils.function_calling import convert_to_openai_tool

    class EpisodeChatModel(BaseChatModel):
        entry: Any
        create: Any

        @property
        def _llm_type(self) -> str:
            return "reinforge"

        def _generate(
            self, messages: Sequence[Any], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
        ) -> Any:
            arguments = kwargs if stop is None else {**kwargs, "stop": stop}
            reply = self.create(messages=_build_messages(messages), **arguments)
            return ChatResult(generations=[_build_generation(reply, choice) for choice in reply.choices])

        async def _agenerate(
            self, messages: Sequence[Any], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
        ) -> Any:
            return await asyncio.to_thread(self._generate, messages, stop, run_manager, **kwargs)

        def bind_tools(self, tools: Sequence[Any], *, tool_choice: Any = None, **kwargs: Any) -> Any:
            kwargs.pop("ls_structured_output_format", None)  # what LangSmith shows; no argument of the call
            choice = {} if tool_choice is None else {"tool_choice": _build_tool_choice(tool_choice)}
            return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **choice, **kwargs)

    return EpisodeChatModel


def _build_tool_choice(choice: Any) -> Any:
    if isinstance(choice, str | bool) and choice in TOOL_CHOICES:
        return TOOL_CHOICES[choice]
    if isinstance(choice, str) and choice not in MODES:
        return {"type": "function", "function": {"name": choice}}
    return choice


def _build_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns LangChain's messages in OpenAI's form, with the reasoning and the invalid tool calls of replies."""
    from langchain_core.messages import AIMessage, convert_to_openai_messages

    built = []
    for message in messages:
        [sent] = convert_to_openai_messages([message])
        if isinstance(message, AIMessage):
            sampled = {call.get("id"): call for call in message.additional_kwargs.get("tool_calls", ())}
            invalid = [sampled[call["id"]] for call in message.invalid_tool_calls if call.get("id") in sampled]
            if invalid:
                sent["tool_calls"] = [*(sent.get("tool_calls") or ()), *invalid]
            if reasoning := message.additional_kwargs.get("reasoning_content"):
                sent["reasoning_content"] = reasoning
        built.append(sent)
    return built


def _build_generation(reply: Any, choice: Any) -> Any:
    """Returns a choice; `response_metadata` has its log-probs and the completion's id.

    A call whose arguments are not a JSON object is one of `invalid_tool_calls`, as with LangChain's own clients.
    """
    from langchain_core.exceptions import OutputParserException
    from langchain_core.messages import AIMessage
    from langchain_core.output_parsers.openai_tools import make_invalid_tool_call, parse_tool_call
    from langchain_core.outputs import ChatGeneration

    sent = choice.message.model_dump(exclude_none=True)
    calls, invalid = [], []
    for raw in sent.get("tool_calls") or ():
        try:
            parsed, reason = parse_tool_call(raw, return_id=True), "the arguments are not a JSON object"
        except OutputParserException as error:
            parsed, reason = None, str(error)
        if parsed is not None and isinstance(parsed["args"], dict):
            calls.append(parsed)
        else:
            invalid.append(make_invalid_tool_call(raw, reason))
    kept = {name: sent[name] for name in ("tool_calls", "reasoning_content") if sent.get(name)}
    message = AIMessage(
        content=sent.get("content") or "", tool_calls=calls, invalid_tool_calls=invalid, additional_kwargs=kept
    )
    message.response_metadata = {
        "id": reply.id,
        "model_name": reply.model,
        "finish_reason": choice.finish_reason,
        "logprobs": choice.logprobs,
    }
    return ChatGeneration(message=message)
