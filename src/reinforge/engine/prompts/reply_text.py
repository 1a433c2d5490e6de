"""The text of a reply: while its tokens arrive, and as the beginning of the next prompt.

tokens "Hel", "lo", first half of an emoji, second half    ->    "Hel", "lo", "", the emoji
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reinforge.types.request import Message
from reinforge.types.text_markers import count_held, find_marker

RenderMessages = Callable[[Sequence[Message], bool], str]
"""Renders messages by the chat template; True: with the generation prompt."""
INCOMPLETE = "\ufffd"  # what tokenizers write for a part of a character


class TextStream:
    """Decodes one reply; no character is shown before all of its tokens are there.

    Args:
        special: Text of each special token; an empty text if the reply's text leaves it out.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], special: Mapping[int, str], stop: Sequence[str] = ()):
        self._decode, self._special, self._stop = decode, special, tuple(stop)
        self._ids: list[int] = []
        self._prefix, self._read = 0, 0
        self._held = ""
        self._has_ended = False

    def add(self, token_ids: Sequence[int]) -> str:
        """Returns the text that is certain with some more tokens.

        What is held back (half a character, the beginning of a stop string) is part of a later text, or of none.
        """
        if self._has_ended:
            return ""
        text = self._held
        for token in token_ids:
            if (written := self._special.get(token)) is None:
                self._ids.append(token)
            elif written:
                text += self._take() + written
        text += self._take()
        if self._stop and (end := find_marker(text, self._stop)) >= 0:
            self._has_ended = True
            return text[:end]
        held = count_held(text, self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _take(self) -> str:
        """Returns the text of the newest tokens; they are decoded behind earlier ones, on which their spaces depend."""
        if self._read == len(self._ids):
            return ""
        known, whole = self._decode(self._ids[self._prefix : self._read]), self._decode(self._ids[self._prefix :])
        if len(whole) <= len(known) or whole.endswith(INCOMPLETE):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return whole[len(known) :]


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
