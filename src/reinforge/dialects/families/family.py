"""The port of a model family: its texts to calls and reasoning, and the grammar that forces a call.

A family reads the raw text of a reply, with its special tokens. Earlier replies reach the model through its own chat
template; only for templates that ignore `tool_calls` does the family write the calls as text.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from reinforge.dialects.families.grammar import GrammarText
from reinforge.dialects.families.tools import ToolSchemas
from reinforge.types.request import Message

Call = tuple[str, dict[str, Any]]
"""Name and arguments of a tool call."""


class ToolFormat(StrEnum):
    HERMES = "hermes"
    LLAMA3 = "llama3"
    QWEN_XML = "qwen_xml"
    GLM = "glm"
    MISTRAL = "mistral"
    GEMMA = "gemma"
    FUNCTION_GEMMA = "function_gemma"
    PYTHONIC = "pythonic"
    LFM2 = "lfm2"
    GRANITE = "granite"
    DEEPSEEK = "deepseek"
    HARMONY = "harmony"


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """The text, the tool calls and the reasoning of a model's reply.

    Attributes:
        content: The text around the calls; the whole reply if there are none.
        failure: Why what looks like a call cannot be parsed; None: it can, or nothing looks like a call.
        reasoning: What the model wrote as its thinking; None: it wrote none.
    """

    content: str
    calls: list[Call] = field(default_factory=list)
    failure: str | None = None
    reasoning: str | None = None

    def build_message(self, call_id: str) -> Message:
        return self.build_message_with([f"{call_id}-{number}" for number in range(len(self.calls))])

    def build_message_with(self, call_ids: Sequence[str]) -> Message:
        """Returns the assistant message in OpenAI's format, with one id a call."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
                }
                for call_id, (name, arguments) in zip(call_ids, self.calls, strict=True)
            ]
        return message


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """What stands before and after a model's reasoning."""

    start: str
    end: str


THINK = ThinkingTags("<think>", "</think>")


class Family(ABC):
    """One text format of tool calls and reasoning.

    Attributes:
        thinking: What surrounds its reasoning; None: the family's `read` finds it, or there is none.
        reads_channels: True if `read` is needed without tools, too: it finds reasoning and text.
        call_id_length: Number of letters and digits of a call's id, where the template checks it; None: any id will do.
    """

    tool_format: ClassVar[ToolFormat]
    start: ClassVar[str | None] = None
    thinking: ThinkingTags | None = THINK
    call_id_length: ClassVar[int | None] = None
    reads_channels: ClassVar[bool] = False

    @property
    def call_starts(self) -> tuple[str, ...]:
        """What a call may begin with; empty: nothing marks it."""
        return () if self.start is None else (self.start,)

    @abstractmethod
    def matches(self, chat_template: str) -> bool:
        """Returns True if a chat template is this family's."""

    @abstractmethod
    def read(self, text: str, tools: ToolSchemas) -> ParsedReply:
        """Returns the calls in a reply's text, whose reasoning was removed, and the text around them.

        Raises:
            ValueError: What looks like a call cannot be parsed; the message says why.
        """

    @abstractmethod
    def write(self, calls: Sequence[Call]) -> str:
        """Returns calls as the model writes them, for templates that ignore `tool_calls`."""

    @abstractmethod
    def write_rules(self, grammar: GrammarText, tools: ToolSchemas, *, parallel: bool) -> str:
        """Adds the rules of the calls and returns what follows the first `start`.

        Raises:
            ValueError: A call of one of these tools cannot be forced; the message names it.
        """

    def write_required(
        self, grammar: GrammarText, tools: ToolSchemas, *, parallel: bool, opens_thinking: bool, thinks: bool
    ) -> str:
        """Returns the grammar's start: reasoning if the model thinks, then at least one call."""
        calls = self.write_rules(grammar, tools, parallel=parallel)
        begin = f"{grammar.marker(self.start)} {calls}" if self.start else calls
        return f"{self._write_thinking(grammar, is_open=opens_thinking)} {begin}" if thinks else begin

    def write_at_most_one(self, grammar: GrammarText, tools: ToolSchemas) -> str | None:
        """Returns the grammar's start: any text, then a call or none; None: it cannot be said."""
        if self.start is None:
            return None
        calls, free = self.write_rules(grammar, tools, parallel=False), self._write_free(grammar)
        return f"{free} | {self._write_prefix(grammar)} {calls}"

    def write_none(self, grammar: GrammarText) -> str | None:
        """Returns the grammar's start: any text without a call; None: nothing marks a call."""
        return None if self.start is None else self._write_free(grammar)

    def _write_thinking(self, grammar: GrammarText, *, is_open: bool) -> str:
        if self.thinking is None:
            return ""
        rest = f"{grammar.until(self.thinking.end)} SPACE"
        return rest if is_open else f"({grammar.marker(self.thinking.start)} {rest})?"

    def _write_free(self, grammar: GrammarText) -> str:
        assert self.start is not None
        free = grammar.text_without(self.start)
        if self.thinking is None:
            return free
        tags = f"{grammar.marker(self.thinking.start)} | {grammar.marker(self.thinking.end)}"
        return f"{free} (({tags}) {free})*"

    def _write_prefix(self, grammar: GrammarText) -> str:
        assert self.start is not None
        if self.thinking is None:
            return grammar.until(self.start)
        tags = f"{grammar.marker(self.thinking.start)} | {grammar.marker(self.thinking.end)}"
        return f"({grammar.text_without(self.start)} ({tags}))* {grammar.until(self.start)}"
