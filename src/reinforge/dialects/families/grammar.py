"""Builds a grammar in llguidance's dialect of Lark, rule by rule.

Two kinds of rules name what may be one token of the model, or text, which only the tokenizer knows:

    marker_1: "<tool_call>"                             this text, or this token
    until_1[suffix="</think>"]: /(?s:.*)/               any text up to and including this text, or this token

The engine replaces them by the tokens' ids where the tokenizer has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

WHITESPACE = {"whitespace_pattern": r"(\n[ \t]{0,24}| )?"}
"""Between the parts of a JSON value, as in the engine: with any whitespace, a weak model may write nothing else."""


class GrammarText:
    """A grammar under construction; its methods add rules and return their names."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def marker(self, text: str) -> str:
        return self._add("marker", "", quote(text))

    def until(self, text: str) -> str:
        """Adds any text up to and including this one, which may be one token."""
        return self._add("until", f"[suffix={quote(text)}]", "/(?s:.*)/")

    def text(self) -> str:
        return self._add("TEXT", "", "/(?s:.*)/")

    def text_without(self, text: str) -> str:
        """Adds any text that does not contain this one."""
        return self._add("TEXT", "", f"/(?s:.*)/ & ~/(?s:.*){escape_pattern(text)}(?s:.*)/")

    def json(self, schema: Mapping[str, Any]) -> str:
        return self._add("json", "", f"%json {json.dumps({'x-guidance': WHITESPACE, **schema})}")

    def lark(self, text: str) -> str:
        """Adds a whole grammar with names of its own."""
        return self._add("lark", "", f"%lark {{\n{text}\n}}")

    def rule(self, body: str) -> str:
        return self._add("rule", "", body)

    def build(self, start: str) -> str:
        return "\n".join([f"start: {start}", "SPACE: /[ \\n]{0,8}/", *self._rules.values()]) + "\n"

    def _add(self, kind: str, attributes: str, body: str) -> str:
        text = f"{attributes}: {body}"
        key = f"{kind}{text}"
        if key not in self._names:
            name = self._names[key] = f"{kind}_{len(self._names)}"
            self._rules[name] = f"{name}{text}"
        return self._names[key]


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def escape_pattern(text: str) -> str:
    """Returns a pattern between slashes that matches this text alone."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/]", lambda found: f"\\{found[0]}", text)
