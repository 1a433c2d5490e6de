"""gpt-oss: a reply is messages on channels (harmony).

    <|channel|>analysis<|message|>thinking<|end|><|start|>assistant<|channel|>final<|message|>text<|return|>
    <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>

The recipient may also stand before the channel: `<|start|>assistant to=functions.add<|channel|>commentary json`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from reinforge.bounded import decode_json_prefix
from reinforge.dialects.families import family

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]++)")
_NAMED_CHANNEL = re.compile(r"<\|channel\|>\s*+(\w++)")
_ENDS = re.compile(r"<\|(?:end|call|return)\|>")
_AFTER_CALL = re.compile(r"\s*+(?:<\|(?:end|call|return)\|>(?:<\|start\|>assistant)?|\Z)")


class Harmony(family.Family):
    tool_format = family.ToolFormat.HARMONY
    thinking = None
    reads_channels = True

    def read(self, text: str, tools: family.ToolSchemas) -> family.ParsedReply:
        """Returns the messages by channel; a reply without channels is text."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[family.Call] = []
        position = 0
        while (head_end := text.find(_MESSAGE, position)) >= 0:
            head, body = text[position:head_end], head_end + len(_MESSAGE)
            channel, recipient = _NAMED_CHANNEL.search(head), _RECIPIENT.search(head)
            if recipient is not None:
                arguments, position = decode_json_prefix(text, body)
                if not isinstance(arguments, dict):
                    raise ValueError("the arguments are not an object")
                after = _AFTER_CALL.match(text, position)
                if after is None:
                    raise ValueError(f"text after the arguments: {text[position : position + 40]!r}")
                calls.append((recipient[1], arguments))
                position = after.end()
                continue
            end = _ENDS.search(text, body)
            said, position = text[body : end.start() if end else len(text)], end.end() if end else len(text)
            is_thought = channel is not None and channel[1] == "analysis"
            (reasoning if is_thought else content).append(said)
        if not (content or reasoning or calls):
            return family.ParsedReply(text)
        return family.ParsedReply("\n".join(content), calls, reasoning="\n".join(reasoning) or None)

    def write(self, calls: Sequence[family.Call]) -> str:
        return f"<|call|>{_START}assistant".join(
            f"{_CHANNEL}commentary to=functions.{name} <|constrain|>json{_MESSAGE}{family.dump(arguments)}"
            for name, arguments in calls
        )

    def write_rules(self, grammar: family.GrammarText, tools: family.ToolSchemas, *, parallel: bool) -> str:
        """Returns the rule of one call: a turn of this family ends with its first."""
        channel, message = grammar.marker(_CHANNEL), grammar.marker(_MESSAGE)
        calls = [
            f"{channel} {family.quote(f'commentary to=functions.{name} ')} {grammar.marker('<|constrain|>')} "
            f'"json" {message} {grammar.json(family.build_arguments_schema(schema))}'
            for name, schema in tools.parameters.items()
        ]
        return grammar.rule(" | ".join(calls))

    def write_required(
        self,
        grammar: family.GrammarText,
        tools: family.ToolSchemas,
        *,
        parallel: bool,
        opens_thinking: bool,
        thinks: bool,
    ) -> str:
        """Returns the grammar's start: analysis or none, then a call."""
        return f"{self._write_analysis(grammar)} {self.write_rules(grammar, tools, parallel=parallel)}"

    def write_none(self, grammar: family.GrammarText) -> str:
        """Returns the grammar's start: analysis or none, then the answer."""
        return f"{self._write_analysis(grammar)} {self._write_channel(grammar, 'final')} {grammar.text()}"

    def write_at_most_one(self, grammar: family.GrammarText, tools: family.ToolSchemas) -> str | None:
        return None

    def _write_channel(self, grammar: family.GrammarText, name: str) -> str:
        return f"{grammar.marker(_CHANNEL)} {family.quote(name)} {grammar.marker(_MESSAGE)}"

    def _write_analysis(self, grammar: family.GrammarText) -> str:
        again = f'{grammar.marker(_START)} "assistant"'
        return f"({self._write_channel(grammar, 'analysis')} {grammar.until('<|end|>')} {again})?"
