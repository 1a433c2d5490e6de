r"""One conversation of attacker and target, as each of them sees it.

opening "A rainy Monday at the desk."   probe "What is new?"   response "Nothing."   probe "And now?"

attacker   user: A rainy Monday at the desk.   assistant: What is new?   user: Nothing.   assistant: And now?
target     user: A rainy Monday at the desk.\nWhat is new?   assistant: Nothing.   user: And now?
"""

from __future__ import annotations

from collections.abc import Sequence

from reinforge.types.request import Message

Turn = tuple[str, str]
"""What the attacker said, and what the target answered."""


def attacker_messages(opening: str, turns: Sequence[Turn]) -> list[Message]:
    """Returns the conversation as the attacker is asked to go on with it."""
    messages: list[Message] = [{"role": "user", "content": opening}]
    for probe, response in turns:
        messages += [{"role": "assistant", "content": probe}, {"role": "user", "content": response}]
    return messages


def target_messages(opening: str, turns: Sequence[Turn], probe: str) -> list[Message]:
    """Returns the conversation as the target is asked to answer it."""
    messages: list[Message] = []
    for said, response in turns:
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": response}]
    messages.append({"role": "user", "content": probe})
    return [{"role": "user", "content": f"{opening}\n{messages[0]['content']}"}, *messages[1:]]
