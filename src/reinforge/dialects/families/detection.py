"""Which family a chat template belongs to, and whether it thinks: the template's text says both."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from reinforge.dialects.families.deepseek import DeepSeek
from reinforge.dialects.families.family import THINK, Family, ThinkingTags, ToolFormat
from reinforge.dialects.families.gemma import FUNCTION_GEMMA, GEMMA_4
from reinforge.dialects.families.harmony import Harmony
from reinforge.dialects.families.hermes import Hermes
from reinforge.dialects.families.json_list import Granite
from reinforge.dialects.families.llama import Llama3
from reinforge.dialects.families.mistral import Mistral
from reinforge.dialects.families.pythonic import LFM2, Pythonic
from reinforge.dialects.families.tagged import GLM, QwenXML

FAMILIES: tuple[Family, ...] = (
    Harmony(),
    DeepSeek(),
    DeepSeek(blocks=True),
    GEMMA_4,
    FUNCTION_GEMMA,
    LFM2(),
    Mistral(),
    Mistral(lists=True),
    Granite(),
    GLM(),
    QwenXML(),
    Hermes(),
    Pythonic(),
    Llama3(),
)
"""All families. The first that matches a template is its family, so the tags of several come last."""

_LITERAL = re.compile(r"'(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\"", re.DOTALL)
_SWITCHES = ("enable_thinking", "thinking")
"""Names under which agents switch thinking off in `chat_template_kwargs`."""


@functools.lru_cache(64)
def find_family(chat_template: str | None) -> Family | None:
    """Returns the family of a chat template; None: it shows no known format of tool calls."""
    if not chat_template:
        return None
    return next((family for family in FAMILIES if family.matches(chat_template)), None)


def get_family(tool_format: ToolFormat) -> Family:
    return next(family for family in FAMILIES if family.tool_format is tool_format)


@functools.lru_cache(64)
def find_thinking(chat_template: str | None) -> ThinkingTags | None:
    """Returns what surrounds the reasoning of a template's model; None: it does not think, or its family reads it."""
    family = find_family(chat_template)
    tags = THINK if family is None else family.thinking
    return tags if tags is not None and chat_template and tags.end in chat_template else None


def may_think(chat_template: str | None, template_kwargs: Mapping[str, Any]) -> bool:
    """Returns True if the model thinks, by its template, and the request does not switch it off."""
    switched_off = any(template_kwargs.get(name) is False for name in _SWITCHES)
    return find_thinking(chat_template) is not None and not switched_off


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
