"""Finds the earlier call of an episode that a request continues, so that its sampled tokens can be continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
    for call in reversed(calls):
        if call.llm == name and (reply := _find_reply(call, request)) is not None and reply.tokens is not None:
            tokens = (*reply.tokens.prompt_token_ids, *reply.tokens.token_ids)
            return replace(request, continued=ContinuedTurn(len(call.request.messages) + 1, tokens))
    return request


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
