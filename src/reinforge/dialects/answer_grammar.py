"""The grammar of a whole reply whose text must match a format.

A model that thinks may do so before, and one that is offered tools may call them instead:

    text                    the format
    a model that thinks     (reasoning)? the format
    tools to choose from    (reasoning)? (calls | the format)
"""

from __future__ import annotations

import json
import re
from typing import Any

from reinforge.dialects.families.detection import find_family, find_thinking, may_think, opens_thinking
from reinforge.dialects.families.family import ToolFormat
from reinforge.dialects.families.grammar import GrammarText
from reinforge.dialects.families.hermes import build_arguments_schema
from reinforge.dialects.families.tools import ToolSchemas
from reinforge.types.request import Grammar, ModelRequest

_ESCAPED = re.compile(r"\\.|/|\n", re.DOTALL)


def build_answer_grammar(request: ModelRequest, chat_template: str | None) -> Grammar | None:
    """Returns what a reply must match, if its text must match the request's grammar.

    Raises:
        ValueError: The grammar of a tool's parameters cannot be written.
    """
    answer, given = request.grammar, request.template_kwargs
    family = find_family(chat_template)
    may_call = bool(request.tools) and request.tool_choice == "auto" and family is not None
    tags = find_thinking(chat_template) if may_think(chat_template, given) else None
    is_forced = request.tool_choice not in ("auto", "none")
    if answer is None or is_forced or not (may_call or tags):
        return answer
    grammar, schema = GrammarText(), json.loads(answer.text) if answer.kind == "json_schema" else None
    schemas = ToolSchemas.from_tools(request.tools or ())
    if may_call and family is not None and family.tool_format is ToolFormat.LLAMA3 and isinstance(schema, dict):
        start = grammar.json(_add_calls(schema, schemas))  # its calls are JSON, too, so nothing tells them apart
    else:
        start = _write_answer(grammar, answer, schema)
        if may_call and family is not None:
            calls = family.write_required(
                grammar, schemas, parallel=request.parallel_tool_calls, opens_thinking=False, thinks=False
            )
            start = f"({calls} | {start})"
    if tags is not None:
        rest = f"{grammar.until(tags.end)} SPACE"
        is_open = opens_thinking(chat_template, given)
        start = f"{rest if is_open else f'({grammar.marker(tags.start)} {rest})?'} {start}"
    return Grammar("lark", grammar.build(start))


def _write_answer(grammar: GrammarText, answer: Grammar, schema: Any) -> str:
    if answer.kind == "lark":
        return grammar.lark(answer.text)
    return _write_regex(answer.text) if answer.kind == "regex" else grammar.json({} if schema is True else schema)


def _add_calls(schema: dict[str, Any], tools: ToolSchemas) -> dict[str, Any]:
    """Returns the schema of a value that is a call of one of the tools, or accepted by another schema."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": build_arguments_schema(parameters)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, parameters in tools.parameters.items()
    ]
    definitions: dict[str, Any]  # stay at the top, where references to them begin
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return {"anyOf": [*calls, {name: each for name, each in schema.items() if name not in definitions}], **definitions}


def _write_regex(pattern: str) -> str:
    r"""Returns a regular expression between slashes.

    Example: `a/b\/c` -> `/a\/b\/c/`.
    """
    escaped = _ESCAPED.sub(lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), pattern)
    return f"/{escaped}/"
