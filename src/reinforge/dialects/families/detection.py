"""Which family a chat template belongs to, and whether it thinks: the template's text says both."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from reinforge.dialects.families.family import THINK, Family, ThinkingTags, ToolFormat
from reinforge.registry import load_named


class KnownFamily(NamedTuple):
    """A family, which is imported for its own templates alone."""

    tool_format: ToolFormat
    name: str  # module and class
    options: dict[str, Any]
    matches: Callable[[str], bool]  # returns True if a chat template is this family's


_DEEPSEEK, _MISTRAL = "<｜tool▁calls▁begin｜>", "[TOOL_CALLS]"
FAMILIES = (
    KnownFamily(ToolFormat.HARMONY, "harmony:Harmony", {}, lambda t: "<|channel|>" in t and "<|start|>" in t),
    KnownFamily(ToolFormat.DEEPSEEK, "deepseek:DeepSeek", {}, lambda t: _DEEPSEEK in t and "```json" not in t),
    KnownFamily(ToolFormat.DEEPSEEK, "deepseek:DeepSeek", {"blocks": True}, lambda t: _DEEPSEEK in t),
    KnownFamily(ToolFormat.GEMMA, "gemma:Gemma", {}, lambda t: "<|tool_call>" in t),
    KnownFamily(
        ToolFormat.FUNCTION_GEMMA, "gemma:Gemma", {"is_function": True}, lambda t: "<start_function_call>" in t
    ),
    KnownFamily(
        ToolFormat.LFM2, "python_calls:LFM2", {}, lambda t: "<|tool_call_start|>" in t or "<|tool_list_start|>" in t
    ),
    KnownFamily(ToolFormat.MISTRAL, "mistral:Mistral", {}, lambda t: _MISTRAL in t and "[ARGS]" in t),
    KnownFamily(ToolFormat.MISTRAL, "mistral:Mistral", {"lists": True}, lambda t: _MISTRAL in t),
    KnownFamily(ToolFormat.GRANITE, "hermes:Granite", {}, lambda t: "<|tool_call|>" in t or "<|/tool|>" in t),
    KnownFamily(ToolFormat.GLM, "tagged:GLM", {}, lambda t: "<arg_key>" in t),
    KnownFamily(ToolFormat.QWEN_XML, "tagged:QwenXML", {}, lambda t: "<function=" in t and "<parameter=" in t),
    KnownFamily(ToolFormat.HERMES, "hermes:Hermes", {}, lambda t: "<tool_call>" in t),
    KnownFamily(
        ToolFormat.PYTHONIC,
        "python_calls:Pythonic",
        {},
        lambda t: "tool_code" in t or re.search(r"\[\w+\(\w+=", t) is not None,
    ),
    KnownFamily(
        ToolFormat.LLAMA3, "llama:Llama3", {}, lambda t: "<|python_tag|>" in t or ("tools" in t and '"parameters"' in t)
    ),
)
"""All families. The first that matches a template is its family, so the tags of several come last."""

_LITERAL = re.compile(r"'(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\"", re.DOTALL)
_SWITCHES = ("enable_thinking", "thinking")
"""Names of the switch of thinking in `chat_template_kwargs`; most templates read the first, DeepSeek's the other."""
_OFF = re.compile(r"not\s+thinking\s+is\s+defined.{0,200}?set\s+thinking\s*=\s*false", re.DOTALL)
"""A template whose model thinks only if it is asked to."""


@functools.cache
def _load_family(index: int) -> Family:
    known = FAMILIES[index]
    family: Family = load_named(f"reinforge.dialects.families.{known.name}")(**known.options)
    return family


@functools.lru_cache(64)
def find_family(chat_template: str | None) -> Family | None:
    """Returns the family of a chat template; None: it shows no known format of tool calls."""
    matching = (i for i, known in enumerate(FAMILIES) if chat_template and known.matches(chat_template))
    index = next(matching, None)
    return None if index is None else _load_family(index)


def get_family(tool_format: ToolFormat) -> Family:
    return _load_family(next(i for i, known in enumerate(FAMILIES) if known.tool_format is tool_format))


@functools.lru_cache(64)
def find_thinking(chat_template: str | None) -> ThinkingTags | None:
    """Returns what surrounds the reasoning of a template's model; None: it does not think, or its family reads it."""
    family = find_family(chat_template)
    tags = THINK if family is None else family.thinking
    return tags if tags is not None and chat_template and tags.end in chat_template else None


def may_think(chat_template: str | None, template_kwargs: Mapping[str, Any]) -> bool:
    """Returns True if the model thinks, by its template, and the request does not switch it off."""
    if find_thinking(chat_template) is None:
        return False
    given = [template_kwargs[name] for name in _SWITCHES if template_kwargs.get(name) is not None]
    return False not in given if given else _OFF.search(str(chat_template)) is None


def spell_switch(template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a template with the switch of thinking under each of its names."""
    given = next((template_kwargs[name] for name in _SWITCHES if name in template_kwargs), None)
    return {**({} if given is None else dict.fromkeys(_SWITCHES, given)), **template_kwargs}


def opens_thinking(chat_template: str | None, template_kwargs: Mapping[str, Any]) -> bool:
    """Returns True if the generation prompt ends inside the reasoning, so that the reply has its end tag only."""
    tags = find_thinking(chat_template)
    return tags is not None and may_think(chat_template, template_kwargs) and _opens(str(chat_template), tags)


@functools.lru_cache(64)
def _opens(chat_template: str, tags: ThinkingTags) -> bool:
    """Looks at the texts that the template writes behind its last mention of the generation prompt."""
    _, _, ending = chat_template.rpartition("add_generation_prompt")
    written = [found[0][1:-1] for found in _LITERAL.finditer(ending)]
    return any(tags.start in text and tags.end not in text for text in written)


def split_thinking(
    text: str, tags: ThinkingTags, *, is_open: bool, call_start: str | None = None
) -> tuple[str | None, str]:
    r"""Returns the reasoning of a reply, None if there is none, and the rest.

    Example: `split_thinking("<think>\n2+3\n</think>\n\n5", THINK, is_open=False)` -> `("2+3", "5")`; with `is_open`
    the start tag may be missing, and without an end tag all is reasoning. Tags behind the start of a call are the
    call's.
    """
    body = text.lstrip()
    starts = body.startswith(tags.start)
    if not starts and not is_open:
        before = text if call_start is None else text.partition(call_start)[0]
        if tags.start in before or tags.end not in before:
            return None, text
    thought, _, rest = (body.removeprefix(tags.start) if starts else text).partition(tags.end)
    return thought.strip("\n"), rest.lstrip("\n")
