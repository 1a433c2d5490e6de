"""Strings that carry their tokens and turns: plain text to user code, and nothing is tokenized a second time.

Conversation("Monday.") + GeneratedText(" What is new?", tokens) + GeneratedText(" Nothing.")
=> "Monday. What is new? Nothing.", turns ("Monday.", " What is new?", " Nothing.")
"""

from __future__ import annotations

from typing import Any

from reinforge.types.request import Message, TokenLogprobs


class GeneratedText(str):
    tokens: TokenLogprobs | None  # the exact tokens; None if the model does not report them
    message: Message | None  # the whole message, including `tool_calls`; None: the text is the whole message

    def __new__(
        cls, text: str = "", tokens: TokenLogprobs | None = None, message: Message | None = None
    ) -> GeneratedText:
        generated = super().__new__(cls, text)
        generated.tokens, generated.message = tokens, message
        return generated

    def __getnewargs__(self) -> tuple[Any, ...]:
        return str(self), self.tokens, self.message


class Conversation(str):
    """A conversation as one string: the opening, then probes and responses in turn."""

    turns: tuple[str, ...]  # opening, probe, response, probe, ..

    def __new__(cls, *turns: str) -> Conversation:
        if len(turns) == 1 and isinstance(turns[0], Conversation):
            turns = turns[0].turns
        conversation = super().__new__(cls, "".join(turns))
        conversation.turns = turns
        return conversation

    def __add__(self, turn: str) -> Conversation:
        return Conversation(*self.turns, turn)

    def __getnewargs__(self) -> tuple[str, ...]:  # type: ignore[override]  # every turn is an argument
        return self.turns

    @property
    def exchanges(self) -> list[tuple[str, str]]:
        return list(zip(self.turns[1::2], self.turns[2::2], strict=False))

    @property
    def open_probe(self) -> str | None:
        return self.turns[-1] if len(self.turns) % 2 == 0 else None
