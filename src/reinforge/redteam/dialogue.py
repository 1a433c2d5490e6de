r"""The messages of one conversation as the attacker and the target each see them.

opening "A rainy Monday at the desk."   probe "What is new?"   response "Nothing."   probe "And now?"

attacker   user: A rainy Monday at the desk.   assistant: What is new?   user: Nothing.   assistant: And now?
target     user: A rainy Monday at the desk.\nWhat is new?   assistant: Nothing.   user: And now?
"""

from __future__ import annotations

from collections.abc import Sequence

from reinforge.types.request import Message

Turn = tuple[str, str]
"""Probe and response."""


def build_attacker_messages(opening: str, turns: Sequence[Turn]) -> list[Message]:
    """Returns the messages that prompt the attacker for its next probe."""
    messages: list[Message] = [{"role": "user", "content": opening}]
    for probe, response in turns:
        messages += [{"role": "assistant", "content": probe}, {"role": "user", "content": response}]
    return messages


def build_target_messages(opening: str, turns: Sequence[Turn], probe: str) -> list[Message]:
    """Returns the messages that prompt the target for its response to `probe`."""
    messages: list[Message] = []
    for earlier, response in turns:
        messages += [{"role": "user", "content": earlier}, {"role": "assistant", "content": response}]
    messages.append({"role": "user", "content": probe})
    return [{"role": "user", "content": f"{opening}\n{messages[0]['content']}"}, *messages[1:]]
