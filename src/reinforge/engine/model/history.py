"""Continues the sampled tokens of a conversation: the template renders only what is new.

    earlier: prompt [1,2], sampled [4,9] (9 ends the reply); new messages render to "<end><user>so?<end><assistant>"
    => [1,2,4,9] + the tokens of "<user>so?<end><assistant>"

Rendering the whole history can change an earlier reply: a template drops its reasoning, or writes the JSON of a call
with other spaces, or the same text becomes other tokens. To find where the new messages begin, the reply is rendered
with a marker in place of its text; what follows the marker is the end of the reply and the new messages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from reinforge.types.request import Message

RenderMessages = Callable[[Sequence[Message], bool], str]
"""Renders messages by the chat template; True: with the generation prompt."""


def build_continuation(
    render: RenderMessages, messages: Sequence[Message], num_messages: int, end_text: str | None, ends: Sequence[str]
) -> str | None:
    """Returns the text that continues an earlier reply up to the next one.

    Args:
        messages: The whole conversation.
        num_messages: How many of them the earlier call covers; the last is its reply.
        end_text: The text of the token that ended the reply; None: it was cut off.
        ends: The texts of all tokens that end a reply.

    Returns:
        The text behind `end_text`; None: the template does not show the reply, so that its end cannot be found.
    """
    marker = f"reply-{os.urandom(8).hex()}"
    marked = [*messages[: num_messages - 1], mark_reply(messages[num_messages - 1], marker)]
    whole = render([*marked, *messages[num_messages:]], True)
    alone = render(marked, False)
    if marker not in whole or marker not in alone:
        return None
    after = whole[whole.rindex(marker) + len(marker) :]
    closing = find_common_start(after, alone[alone.rindex(marker) + len(marker) :])
    places = [(place, text) for text in ends if text and (place := closing.find(text)) >= 0]
    if end_text is None:  # the end that the template writes, without what closes a call
        return after[min(places)[0] :] if places else after
    if not places:  # the template ends a reply in another way, which the sampled end replaces
        return after[len(closing) :]
    place, text = min(places)
    return after[place + len(text) :]


def find_common_start(first: str, second: str) -> str:
    """Returns the longest text with which both begin."""
    count = min(len(first), len(second))
    return first[: next((i for i in range(count) if first[i] != second[i]), count)]


def mark_reply(message: Message, marker: str) -> Message:
    """Returns a reply whose text, or else the arguments of its calls, are a marker."""
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    marked: Message = {key: value for key, value in message.items() if key != "tool_calls"}
    if message.get("content") or not calls:
        marked["content"] = marker
    if calls:
        arguments = json.dumps({"marker": marker})
        marked["tool_calls"] = [
            {**call, "function": {**(call.get("function") or {}), "arguments": arguments}} for call in calls
        ]
    return marked
