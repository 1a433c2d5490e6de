"""Text that keeps what it was made of: to user code it is plain text, and nothing of ours is tokenised twice.

Dialogue("Monday.") + Said(" What is new?", tokens) + Said(" Nothing.")
=> "Monday. What is new? Nothing.", turns ("Monday.", " What is new?", " Nothing.")
"""

from __future__ import annotations

from typing import Any

from reinforge.types.request import Message, TokenLogprobs


class Said(str):
    """What a model said.

    Attributes:
        tokens: Its exact tokens; None where the model behind it does not tell them.
        message: The whole message, with `tool_calls` where there are any; None: the text is all.
    """

    tokens: TokenLogprobs | None
    message: Message | None

    def __new__(cls, text: str = "", tokens: TokenLogprobs | None = None, message: Message | None = None) -> Said:
        """Returns the text, with its tokens."""
        said = super().__new__(cls, text)
        said.tokens, said.message = tokens, message
        return said

    def __getnewargs__(self) -> tuple[Any, ...]:
        return str(self), self.tokens, self.message


class Dialogue(str):
    """A conversation as one text: an opening, then probe and response by turns.

    Attributes:
        turns: Opening, probe, response, probe, ...
    """

    turns: tuple[str, ...]

    def __new__(cls, *turns: str) -> Dialogue:
        """Returns the turns as one text; of a conversation alone, that conversation."""
        if len(turns) == 1 and isinstance(turns[0], Dialogue):
            turns = turns[0].turns
        dialogue = super().__new__(cls, "".join(turns))
        dialogue.turns = turns
        return dialogue

    def __add__(self, turn: str) -> Dialogue:
        return Dialogue(*self.turns, turn)

    def __getnewargs__(self) -> tuple[str, ...]:  # type: ignore[override]  # every turn is an argument
        return self.turns

    @property
    def exchanges(self) -> list[tuple[str, str]]:
        """The turns that are answered: (probe, response)."""
        return list(zip(self.turns[1::2], self.turns[2::2], strict=False))

    @property
    def open_probe(self) -> str | None:
        """The last probe, while nobody has answered it."""
        return self.turns[-1] if len(self.turns) % 2 == 0 else None
