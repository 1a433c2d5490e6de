"""Finds what a request has of the episode's earlier calls.

Its messages, each of which is kept once: the same object in all calls of a conversation.

    first call [a], reply b;  second [a, b, c]      =>  a, b and c, and not a twice

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
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import eq, truth
from typing import Any

from reinforge.bounded import dump_json, load_json
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
    if one is other or one == other:
        return True
    is_reply = one.get("role") == other.get("role") == "assistant"
    return is_reply and all((one.get(key) or None) == (other.get(key) or None) for key in ("content", "tool_calls"))


OwnCalls = dict[Hashable, list[Message]]  # the replies of an episode that call tools, by the ids of their calls

MAX_CONVERSATIONS = 8  # latest conversations of an episode with which a request is compared


@dataclass(slots=True)
class CallMessages:
    """The messages of one call, and its reply once it is there.

    Attributes:
        sent: As the agent sent them.
        kept: As the model got them: the same list, unless calls of tools were restored.
        num_plain: How many messages come before the first one with numbers, for which `==` is not exact: 1 == True.
        earlier: The conversation that the call continues; None: there is none, or the call has ended.
        prompt: The tokens of its prompt, before that of the one that it continues; empty: the model reports none.
    """

    is_policy: bool
    sent: list[Message]
    kept: list[Message]
    tools: list[dict[str, Any]] | None
    num_plain: int = 0
    earlier: CallMessages | None = None
    prompt: Sequence[int] = ()


NOTHING = CallMessages(is_policy=False, sent=[], kept=[], tools=None)  # what a first call continues


@dataclass(slots=True)
class EpisodeMessages:
    """What an episode's calls have in common: each message and each token is kept once."""

    _latest: tuple[CallMessages, ...] = ()  # the newest last
    _own_calls: OwnCalls | None = None

    def find(self, messages: Any, *, is_policy: bool) -> tuple[CallMessages, int]:
        """Returns the conversation that has the most messages at the beginning of an agent's, and how many."""
        best, most = NOTHING, 0
        if self._latest and type(messages) is list:
            for each in reversed(self._latest):
                if each.is_policy == is_policy and (count := _count_equal(each, messages)) > most:
                    best, most = each, count
                    if count >= len(each.sent) - 1:
                        break
        return best, most

    def begin(
        self, request: ModelRequest, known: CallMessages, count: int, *, is_policy: bool
    ) -> tuple[ModelRequest, CallMessages]:
        """Puts the tool calls of earlier replies into a request; returns it and its conversation.

        Args:
            known: The conversation of which it has `count` messages.
        """
        sent, tools = request.messages, request.tools
        new = sent[count:]
        restored = restore_replies(new, self._own_calls) if is_policy and self._own_calls else new
        kept = sent
        if restored is not new or known.kept is not known.sent:
            sent = [*sent]
            kept[:] = known.kept[:count] + restored
        if tools and tools is not known.tools and is_same(tools, known.tools):
            request = replace(request, tools=known.tools)
        num_plain = count
        if known.num_plain >= count:
            num_plain += sum(1 for _ in takewhile(_is_plain, new))
        earlier = known if count >= len(known.sent) - 1 else None  # the agent may write the reply in another way
        return request, CallMessages(is_policy, sent, kept, request.tools, num_plain, earlier, known.prompt)

    def end(self, conversation: CallMessages, replies: Sequence[ModelReply]) -> None:
        """Adds the replies to a call; their prompts then share the tokens of the conversation."""
        for reply in replies:
            if reply.tokens is not None:
                reply.tokens.share_prompt(conversation.prompt)
                conversation.prompt = reply.tokens.prompt_token_ids
            if reply.message.get("tool_calls"):
                self._own_calls = self._own_calls or {}
                add_calls(self._own_calls, reply.message)
        if conversation.num_plain == len(conversation.sent) and _is_plain(replies[0].message):
            conversation.num_plain += 1
        is_unchanged = conversation.kept is conversation.sent
        conversation.kept = [*conversation.kept, replies[0].message]
        conversation.sent = conversation.kept if is_unchanged else [*conversation.sent, replies[0].message]
        others = self._latest
        if conversation.earlier is not None:
            others = tuple(each for each in others if each is not conversation.earlier)
            conversation.earlier = None
        self._latest = (*others[1 - MAX_CONVERSATIONS :], conversation)


def _count_equal(known: CallMessages, messages: list[Any]) -> int:
    count = min(known.num_plain, len(messages))
    try:
        if known.sent[:count] == messages[:count]:
            return count
        return sum(1 for _ in takewhile(truth, map(eq, known.sent[:count], messages)))
    except Exception:  # noqa: BLE001  an agent's object may raise anything when it is compared
        return 0


def _is_plain(value: Any) -> bool:
    """Returns True if all that a message holds is text, which `==` compares exactly."""
    kind = type(value)
    if kind is dict:
        return all(map(_is_plain, value.values()))
    return kind is str or value is None or (kind is list and all(map(_is_plain, value)))


def is_same(one: Any, other: Any) -> bool:
    """Returns True if two values are the same JSON: `1`, `1.0` and `true` are not."""
    if one is other:
        return True
    try:
        return dump_json(one) == dump_json(other)
    except (TypeError, ValueError):  # an object, which the record may write in its own way
        return False


def restore_replies(messages: list[Message], own: OwnCalls) -> list[Message]:
    """Returns messages of a request with the tool calls of earlier replies as they were sampled.

    Args:
        messages: The messages; the list itself is returned if there is nothing to restore.
        own: The replies so far.
    """
    if not any("tool_calls" in message for message in messages):
        return messages
    return [_restore(message, own) for message in messages]


def add_calls(own: OwnCalls, message: Message) -> None:
    own.setdefault(_list_ids(message["tool_calls"]), []).append(message)


def _list_ids(calls: Sequence[Any]) -> Hashable:
    return tuple(str(call.get("id")) if isinstance(call, dict) else None for call in calls)


def _restore(message: Message, own: OwnCalls) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    candidates = own.get(_list_ids(calls), ())
    if (exact := next((each for each in candidates if is_same(each, message)), None)) is not None:
        return exact
    same = next((each for each in reversed(candidates) if _are_same_calls(calls, each["tool_calls"])), None)
    if same is None:
        return message
    restored = {**message, "tool_calls": same["tool_calls"]}
    if not message.get("content") and not same.get("content"):  # "", null and no field are the same
        restored["content"] = same.get("content")
    return same if is_same(same, restored) else restored


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
