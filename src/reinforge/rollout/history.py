"""Finds what a request has of the episode's earlier calls.

The call that it continues, so that its sampled tokens can be continued; and the policy's own tool calls, which
frameworks parse and write again into the next request:

    sampled         {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    sent back       {"name": "add", "arguments": '{"a":2,"b":3}'}      =>  '{"a": 2, "b": 3}'
    a history that the agent changed keeps the agent's arguments: '{"a": 9, "b": 3}'

Otherwise a conversation would look like two, of which the second trains nothing of the first's last turn.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reinforge.bounded import load_json
from reinforge.interfaces import ChatModel
from reinforge.types.episode import ModelCall
from reinforge.types.request import ContinuedTurn, Message, ModelReply, ModelRequest


def add_continued_turn(model: ChatModel, name: str, request: ModelRequest, calls: Sequence[ModelCall]) -> ModelRequest:
    """Returns a request with the call that it continues, if the model splices histories and there is one.

    A request continues the latest call of the same entry whose messages it begins with, followed by one of that call's
    replies. Agents drop a reply's reasoning, so only its text and its tool calls are compared.
    """
    if not getattr(model, "splices_history", False) or request.prompt is not None:
        return request
    found = _find_continued(name, request, calls)
    return request if found is None else replace(request, continued=found)


def count_repeated_tokens(calls: Sequence[ModelCall]) -> int:
    """Returns the tokens that are trained as context again: of turns that a later call continues as text alone.

    Example: prompt [1] -> [2, 3], then the template writes the reply as [7] in the prompt [1, 7, 4] -> 3.
    """
    count = 0
    for index, call in enumerate(calls):
        if (tokens := call.reply.tokens) and (found := _find_continued(call.llm, call.request, calls[:index])):
            length = len(found.token_ids)
            count += 0 if tuple(tokens.prompt_token_ids[:length]) == found.token_ids else length
    return count


def _find_continued(name: str, request: ModelRequest, calls: Sequence[ModelCall]) -> ContinuedTurn | None:
    for call in reversed(calls):
        if call.llm == name and (reply := _find_reply(call, request)) is not None and reply.tokens is not None:
            tokens = (*reply.tokens.prompt_token_ids, *reply.tokens.token_ids)
            return ContinuedTurn(len(call.request.messages) + 1, tokens)
    return None


def _find_reply(call: ModelCall, request: ModelRequest) -> ModelReply | None:
    earlier, count = call.request, len(call.request.messages)
    if count >= len(request.messages) or earlier.prompt is not None:
        return None
    same_form = earlier.tools == request.tools and earlier.template_kwargs == request.template_kwargs
    if not same_form or not begins_with(request.messages, earlier.messages):
        return None
    given = request.messages[count]
    replies = [call.reply, *call.choices]  # equal choices: the one that was chosen
    return next((reply for reply in replies if reply.tokens and _says_the_same(reply.message, given)), None)


def begins_with(messages: Sequence[Message], previous: Sequence[Message]) -> bool:
    """Returns True if a conversation continues another one.

    An agent may have dropped fields of the replies, such as their reasoning, so only their text and calls are compared.
    """
    if len(messages) < len(previous):
        return False
    return all(_says_the_same(one, other) for one, other in zip(messages, previous, strict=False))


def _says_the_same(one: Message, other: Message) -> bool:
    if one == other:
        return True
    is_reply = one.get("role") == other.get("role") == "assistant"
    return is_reply and all((one.get(key) or None) == (other.get(key) or None) for key in ("content", "tool_calls"))


def restore_replies(messages: list[Message], calls: Iterable[ModelCall]) -> list[Message]:
    """Returns the messages of a request with the tool calls of earlier replies as they were sampled.

    Args:
        messages: The messages; the list itself is returned if there is nothing to restore.
    """
    if not any("tool_calls" in message for message in messages):
        return messages
    own: dict[Hashable, list[Message]] = {}
    for call in calls:
        for reply in call.choices:
            if made := reply.message.get("tool_calls"):
                own.setdefault(_list_ids(made), []).append(reply.message)
    return [_restore(message, own) for message in messages] if own else messages


def _list_ids(calls: Sequence[Any]) -> Hashable:
    return tuple(str(call.get("id")) if isinstance(call, dict) else None for call in calls)


def _restore(message: Message, own: Mapping[Hashable, Sequence[Message]]) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    candidates = own.get(_list_ids(calls), ())
    if message in candidates:
        return message
    same = next((each for each in reversed(candidates) if _are_same_calls(calls, each["tool_calls"])), None)
    if same is None:
        return message
    restored = {**message, "tool_calls": same["tool_calls"]}
    if not message.get("content") and not same.get("content"):  # "", null and no field are the same
        restored["content"] = same.get("content")
    return restored


def _are_same_calls(sent: Sequence[Any], own: Sequence[Any]) -> bool:
    if len(sent) != len(own) or not all(isinstance(each, dict) for each in sent):
        return False
    return all(_normalize(one) == _normalize(other) for one, other in zip(sent, own, strict=True))


def _normalize(call: Message) -> Any:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments: Any = function.get("arguments")
    with contextlib.suppress(TypeError, ValueError):  # no JSON: only the same text is the same
        arguments = json.dumps(load_json(arguments), sort_keys=True)
    return call.get("id"), function.get("name"), arguments
