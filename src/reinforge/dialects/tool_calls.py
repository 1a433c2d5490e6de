"""Parses tool calls and reasoning from the text formats of model families into OpenAI's format.

    hermes (Qwen, Hermes)   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, any number of times
    llama3                  {"name": "add", "parameters": {"a": 1}}, optionally after <|python_tag|>; separated by ;
    ...                     one module a family or group in `families`

A reply that looks like a call but cannot be parsed stays text: the agent may ask the model again. If the agent fails on
it instead, the episode is the policy's failure, with the reason that `find_bad_call` gives.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from reinforge.bounded import decode_json, find_surrogate
from reinforge.dialects.families.detection import (
    find_family,
    find_thinking,
    get_family,
    may_think,
    opens_thinking,
    split_thinking,
)
from reinforge.dialects.families.family import (
    Family,
    GrammarText,
    ParsedReply,
    ToolFormat,
    ToolSchemas,
    build_arguments_schema,
    dump,
)
from reinforge.types.request import Grammar, Message, ModelReply, ModelRequest


def detect_tool_format(chat_template: str) -> ToolFormat | None:
    family = find_family(chat_template)
    return None if family is None else family.tool_format


def parse_reply(reply: ModelReply, request: ModelRequest, chat_template: str | None) -> ModelReply:
    """Returns a reply with its reasoning in `reasoning_content` and its tool calls in `tool_calls`.

    Calls are read if the request has tools that the reply may call. What cannot be parsed stays text; `failure` says
    why.
    """
    if request.prompt is not None or not isinstance(reply.message.get("content"), str):
        return reply
    family, tags = find_family(chat_template), find_thinking(chat_template)
    text = str(reply.message["content"]) if reply.raw_text is None else reply.raw_text
    reasoning, rest = None, text
    if tags is not None:
        is_open = opens_thinking(chat_template, request.template_kwargs)
        reasoning, rest = split_thinking(
            text, tags, is_open=is_open, call_start=None if family is None else family.start
        )
    parsed = ParsedReply(rest)
    may_call = bool(request.tools) and request.tool_choice != "none"
    if family is not None and (may_call or family.reads_channels):
        parsed = _read(family, rest, ToolSchemas.from_tools(request.tools))
        if not may_call and (parsed.calls or parsed.failure):
            parsed = ParsedReply(rest)
    if reasoning is not None:
        parsed = replace(parsed, reasoning=reasoning)
    if parsed.failure is not None:
        failure = f"the model wrote a tool call that cannot be parsed: {parsed.failure}"
        return replace(reply, message=parsed.build_message(""), failure=failure)
    if parsed == ParsedReply(text):
        return reply
    ids = _build_call_ids(request, family, len(parsed.calls))
    finish_reason = "tool_calls" if parsed.calls else reply.finish_reason
    return replace(reply, message=parsed.build_message_with(ids), finish_reason=finish_reason)


def _build_call_ids(request: ModelRequest, family: Family | None, count: int) -> list[str]:
    # counted over the conversation: a frozen model may get the same seed with every call
    first = sum(len(message.get("tool_calls") or ()) for message in request.messages)
    ids = [f"call-{request.sampling.seed or 0:x}-{number}" for number in range(first, first + count)]
    length = None if family is None else family.call_id_length
    return ids if length is None else [hashlib.sha256(each.encode()).hexdigest()[:length] for each in ids]


def parse_tool_calls(text: str, tool_format: ToolFormat, call_id: str) -> Message:
    """Returns the assistant message for a model's text; text that looks like a call but cannot be parsed stays text.

    Example: `parse_tool_calls('<tool_call>{"name": "f", "arguments": {}}</tool_call>', HERMES, "c1")` ->
    `{"role": "assistant", "content": None, "tool_calls": [{"id": "c1-0", "type": "function", "function": {"name": "f",
    "arguments": "{}"}}]}`.

    Args:
        call_id: Prefix of the call ids; the number of the call is appended.
    """
    return read_tool_calls(text, tool_format).build_message(call_id)


def read_tool_calls(
    text: str, tool_format: ToolFormat, tools: Sequence[Mapping[str, Any]] | None = None
) -> ParsedReply:
    return _read(get_family(tool_format), text, ToolSchemas.from_tools(tools))


def _read(family: Family, text: str, tools: ToolSchemas) -> ParsedReply:
    try:
        parsed = family.read(text, tools)
    except ValueError as error:
        return ParsedReply(text, failure=str(error))
    if text.isascii() and "\\" not in text:
        return parsed
    if any(find_surrogate(f"{name}{dump(arguments)}") is not None for name, arguments in parsed.calls):
        return ParsedReply(text, failure="a lone surrogate")
    return parsed


def prepare_request(request: ModelRequest, chat_template: str | None) -> ModelRequest:
    """Returns a request as the model gets it: with the grammar of its `tool_choice`.

    A template that ignores `tool_calls` would show the model empty replies; there the calls become text, in the
    family's own format.
    """
    if request.prompt is not None:
        return request
    if request.grammar is not None:
        request = replace(request, grammar=build_answer_grammar(request, chat_template))
    elif request.tools:
        grammar = build_tool_grammar(
            chat_template,
            request.tools,
            request.tool_choice,
            request.parallel_tool_calls,
            template_kwargs=request.template_kwargs,
        )
        request = request if grammar is None else replace(request, grammar=grammar)
    messages = write_calls(request.messages, chat_template)
    return request if messages is request.messages else replace(request, messages=messages)


def write_calls(messages: list[Message], chat_template: str | None) -> list[Message]:
    """Returns a conversation as its template can show it: a template that ignores `tool_calls` gets them as text.

    Args:
        messages: The conversation; the list itself is returned if the template needs nothing else.
    """
    family = find_family(chat_template)
    if family is None or chat_template is None or "tool_calls" in chat_template:
        return messages
    if not any(message.get("tool_calls") for message in messages):
        return messages
    return [_write_message(message, family) for message in messages]


def _write_message(message: Message, family: Family) -> Message:
    try:
        calls = [
            (call["function"]["name"], decode_json(call["function"]["arguments"] or "{}"))
            for call in message.get("tool_calls") or ()
        ]
        written = family.write(calls) if calls else ""
    except (KeyError, TypeError, ValueError, AttributeError):  # not written by this policy
        return message
    if not written:
        return message
    return {**message, "content": "\n".join(part for part in (message.get("content"), written) if part)}


def build_tool_grammar(
    chat_template: str | None,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str,
    parallel: bool,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Grammar | None:
    """Returns what makes a reply follow `tool_choice`, in the family's own format; None: nothing is to be enforced.

    Args:
        tool_choice: `auto`, `none`, `required`, or the name of the tool that must be called.
        template_kwargs: Arguments of the template; they say whether the model thinks.
    """
    family, schemas = find_family(chat_template), ToolSchemas.from_tools(tools)
    if tool_choice == "auto" and parallel:
        return None
    grammar = GrammarText()
    if tool_choice in ("auto", "none"):
        if family is None:
            return None
        start = family.write_none(grammar) if tool_choice == "none" else family.write_at_most_one(grammar, schemas)
        return None if start is None else Grammar("lark", grammar.build(start))
    chosen = schemas if tool_choice == "required" else schemas.select(tool_choice)
    if family is None or not chosen.parameters:
        reason = "the request has no tools" if family else "the chat template shows no known format of tool calls"
        raise ValueError(f'tool_choice={tool_choice!r} cannot be enforced: {reason}; use tool_choice="auto"')
    given = template_kwargs or {}
    is_open = opens_thinking(chat_template, given)
    # A template without reasoning belongs to a model that was not trained to write any.
    thinks = may_think(chat_template, given)
    start = family.write_required(grammar, chosen, parallel=parallel, opens_thinking=is_open, thinks=thinks)
    return Grammar("lark", grammar.build(start))


def find_bad_call(message: Message) -> str | None:
    """Returns why the arguments of a tool call are unusable; None: they are valid, or there are no calls.

    For replies of a hosted policy, whose calls come parsed but whose arguments are text as the model wrote it.
    """
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(arguments, str) or not arguments.strip():  # a call without arguments; not a function
            continue
        try:
            if not isinstance(decode_json(arguments), dict):
                raise ValueError("not an object")
        except ValueError as error:
            return f"the model wrote arguments of the tool {str(name)[:80]!r} that cannot be parsed: {error}"
    return None


_ESCAPED = re.compile(r"\\.|/|\n", re.DOTALL)


def build_answer_grammar(request: ModelRequest, chat_template: str | None) -> Grammar | None:
    """Returns what a reply must match, if its text must match the request's grammar.

    A model that thinks may do so before, and one that is offered tools may call them instead:

        text                    the format
        a model that thinks     (reasoning)? the format
        tools to choose from    (reasoning)? (calls | the format)
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
