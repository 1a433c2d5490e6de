"""Turns the steps of an episode into one list of chat messages.

prompt [S, U1] -> A1; prompt [S, U1, A1, U2] -> A2      =>  S, U1, A1, U2, A2
prompt [S, U1] -> A1; prompt [S, U2] -> A2              =>  S, U1, A1, U2, A2    (the agent starts over in each turn)

A message that equals an earlier one stays if the agent sent it again: only the part that a prompt shares with the
messages so far is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from reinforge.types.steps import IntermediateStep, IntermediateStepType

ROLES = {"human": "user", "HumanMessageChunk": "user", "ai": "assistant", "AIMessageChunk": "assistant"}
"""Roles under LangChain's names."""

Message = dict[str, Any]


def parse_to_openai_messages(steps: Sequence[IntermediateStep]) -> list[Message]:
    """Returns the messages of an episode in OpenAI's form; replies have their `logprobs` if they are known.

    Args:
        steps: The steps, in order; those that are neither model calls nor tool calls are left out.
    """
    messages: list[Message] = []
    prompts: dict[str, list[Message]] = {}
    results: list[Message] = []  # of tools, until a prompt tells whether the model saw them
    for step in steps:
        if step.event_type is IntermediateStepType.TOOL_END:
            results.append(_build_tool_message(step))
        elif step.event_type is IntermediateStepType.LLM_START:
            prompts[step.UUID] = _find_prompt(step)
        elif step.event_type is IntermediateStepType.LLM_END:
            prompt = prompts.pop(step.UUID, None)
            _extend(messages, _find_prompt(step) if prompt is None else prompt, results)
            results = []
            messages.append(_find_reply(step))
    return messages + results


def _extend(messages: list[Message], prompt: Sequence[Message], results: Sequence[Message]) -> None:
    """Appends what a prompt has beyond the messages so far, and results of tools that it leaves out."""
    shared = 0
    for before, message in zip(messages, prompt, strict=False):
        if _key(before) != _key(message):
            break
        shared += 1
    new = prompt[shared:]
    if not any(message["role"] in ("tool", "function") for message in new):
        messages.extend(results)
    messages.extend(new)


def _key(message: Message) -> tuple[Any, ...]:
    return message["role"], message.get("content") or "", message.get("tool_calls") or None


def _find_prompt(step: IntermediateStep) -> list[Message]:
    """Returns the messages of a model call.

    Frameworks put the text of the last message alone into `input`, and all messages into `payload` or
    `metadata.chat_inputs`, which therefore come first.
    """
    given = getattr(step.data, "input", None)
    for value in (getattr(step.data, "payload", None), getattr(step.metadata, "chat_inputs", None), given):
        if isinstance(value, Sequence) and not isinstance(value, str | bytes) and value:
            return [_build_message(each, step) for each in value]
    return [{"role": "user", "content": given}] if isinstance(given, str) else []


def _find_reply(step: IntermediateStep) -> Message:
    """Returns the reply of a model call: the payload's message if it has one, else the output as text."""
    data, payload = step.data, getattr(step.data, "payload", None)
    choices = getattr(payload, "choices", None)
    source = (
        choices[(step.metadata or {}).get("choice", 0) if isinstance(step.metadata, Mapping) else 0]
        if choices
        else payload
    )
    found = source.get("message") if isinstance(source, Mapping) else getattr(source, "message", None)
    if found is None:
        return {"role": "assistant", "content": str(getattr(data, "output", None) or "")}
    message = {**_build_message(found, step), "role": "assistant"}
    logprobs = source.get("logprobs") if isinstance(source, Mapping) else getattr(source, "logprobs", None)
    if logprobs is None:  # LangChain keeps them beside the message
        logprobs = (getattr(found, "response_metadata", None) or {}).get("logprobs")
    return message if logprobs is None else {**message, "logprobs": logprobs}


def _build_tool_message(step: IntermediateStep) -> Message:
    output = getattr(step.data, "output", None)
    content = getattr(output, "content", output)
    message = {"role": "tool", "content": "" if content is None else str(content), "name": step.name}
    call_id = getattr(output, "tool_call_id", None)
    return message if call_id is None else {**message, "tool_call_id": call_id}


def _build_message(value: Any, step: IntermediateStep) -> Message:
    """Returns a message that is a dict, or an object of a framework with `role` or `type`, and `content`."""
    if isinstance(value, str):
        return {"role": "user", "content": value}
    read = value.get if isinstance(value, Mapping) else lambda name, default=None: getattr(value, name, default)
    role = read("role") or read("type")
    if not isinstance(role, str):
        found = type(value).__name__
        raise ValueError(f"step {step.UUID} ({step.event_type}): {found} is not a message, it has no role")
    content = read("content")
    message: Message = {"role": ROLES.get(role, role), "content": "" if content is None else content}
    for name in ("tool_call_id", "function_call", "name"):
        if read(name):
            message[name] = read(name)
    if calls := (read("additional_kwargs") or {}).get("tool_calls") or read("tool_calls"):
        message["tool_calls"] = [_build_tool_call(call) for call in calls]
    return message


def _build_tool_call(call: Any) -> Any:
    """Returns a tool call in OpenAI's form; LangChain's has `name`, and `args` as values."""
    if not isinstance(call, Mapping) or "args" not in call:
        return call
    arguments = call["args"] if isinstance(call["args"], str) else json.dumps(call["args"], ensure_ascii=False)
    return {"id": call.get("id"), "type": "function", "function": {"name": call.get("name"), "arguments": arguments}}
