"""Gives a policy's tool calls back as it wrote them, where a client has formatted their JSON anew.

Frameworks parse the arguments of a tool call and write them again into the next request:

    sampled         {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    sent back       {"name": "add", "arguments": '{"a":2,"b":3}'}      =>  '{"a": 2, "b": 3}'
    a history that the agent changed keeps the agent's arguments: '{"a": 9, "b": 3}'

Otherwise a conversation would look like two, of which the second trains nothing of the first's last turn.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from reinforge.types.episode import ModelCall
from reinforge.types.request import Message


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
    with contextlib.suppress(TypeError, ValueError, RecursionError):  # no JSON: only the same text is the same
        arguments = json.dumps(json.loads(arguments), sort_keys=True)
    return call.get("id"), function.get("name"), arguments
