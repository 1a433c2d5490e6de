"""Templates of graders: `{{item.answer}}`, `{{sample.output_text}}`, `{{sample.output_json.city}}`.

    template "{{ item.tags[0] }}: {{sample.output_text}}", item {"tags": ["a"]}, output "b"   =>  "a: b"

A name is looked up in the row (`item`) and in the answer (`sample`), by keys and indices alone; nothing is called.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from reinforge.evaluation.answers import UnusableOutputError, parse_answer
from reinforge.limits import get_limits

REFERENCE = re.compile(r"\{\{((?:(?!\{\{|\}\}).)*)\}\}", re.DOTALL)
"""Stops at the next pair of braces, so that a string full of open ones takes no longer to read than any other."""
STEP = re.compile(r"\.([^.\[\]\s]+)|\[(\d{1,6})\]")
NAMESPACES = ("item", "sample")
SAMPLE_FIELDS = ("output_text", "output_json", "output_tools")


class TemplateError(ValueError):
    """A reference in a template that leads nowhere."""


class TooLongError(TemplateError):
    """Templates that exceed `filled_chars` with their values."""


@dataclass(frozen=True, slots=True)
class GradedSample:
    output_text: str
    output_tools: tuple[Any, ...] = ()

    def find(self, name: str) -> Any:
        """Returns one of `SAMPLE_FIELDS`; an `UnusableOutputError` if the answer is not the JSON that is asked for."""
        if name == "output_json":
            try:
                return parse_answer(self.output_text, allow_fence=True)
            except ValueError as error:
                raise UnusableOutputError(f"the answer is not JSON: {error}") from None
        return list(self.output_tools) if name == "output_tools" else self.output_text


def check_template(template: str) -> None:
    """Checks the references of a template without values; a `TemplateError` names one that is not well-formed."""
    for match in REFERENCE.finditer(template):
        _parse(match[1])


def check_fields(template: str, item: Mapping[str, Any]) -> None:
    """Raises a `TemplateError` if a row lacks a field that a template asks for, before there is an answer."""
    for match in REFERENCE.finditer(template):
        namespace, steps = _parse(match[1])
        if namespace == "item":
            _walk(item, steps, "item")


def fill_templates(
    templates: Iterable[str],
    item: Mapping[str, Any],
    sample: GradedSample,
    quote: Callable[[str], str] = lambda text: text,
) -> list[str]:
    """Returns templates with the values of their references; values that are not strings are written as JSON.

    A `TemplateError` if the row lacks a value, a `TooLongError` if there are too many characters in all.
    """
    find, room = cache(sample.find), get_limits().filled_chars

    def find_text(reference: str) -> str:
        namespace, steps = _parse(reference)
        if namespace == "item":
            return _to_text(_walk(item, steps, "item"))
        try:
            return quote(_to_text(_walk(find(str(steps[0])), steps[1:], f"sample.{steps[0]}")))
        except TemplateError as error:
            raise UnusableOutputError(str(error)) from None

    find_known = cache(find_text)

    def fill(match: re.Match[str]) -> str:
        nonlocal room
        text = find_known(match[1])
        if (room := room - len(text)) < 0:
            most = get_limits().filled_chars
            raise TooLongError(f"the templates have more than {most:,} characters once they are filled in")
        return text

    return [REFERENCE.sub(fill, template) for template in templates]  # one pass, so braces in a value stay text


def _parse(text: str) -> tuple[str, list[str | int]]:
    """Returns namespace and steps: ` item.tags[0] ` -> ("item", ["tags", 0])."""
    reference = text.strip()
    namespace = next((each for each in NAMESPACES if re.match(rf"{each}(?=[.\[])", reference)), None)
    if namespace is None:
        raise TemplateError(f"{{{{{text}}}}} is unknown; a reference begins with item. or sample.")
    rest, steps = reference.removeprefix(namespace), list[str | int]()
    while rest:
        match = STEP.match(rest)
        if match is None:
            raise TemplateError(f"{{{{{text}}}}} is not a name such as {{{{item.answer}}}} or {{{{item.tags[0]}}}}")
        steps.append(match[1] if match[1] is not None else int(match[2]))
        rest = rest[match.end() :]
    if namespace == "sample" and steps[0] not in SAMPLE_FIELDS:
        allowed = ", ".join(f"sample.{name}" for name in SAMPLE_FIELDS)
        raise TemplateError(f"{{{{{text}}}}} is unknown; allowed: {allowed}")
    return namespace, steps


def _walk(value: Any, steps: list[str | int], where: str) -> Any:
    for step in steps:
        if not _has(value, step):
            known = f"; it has {', '.join(map(str, value))[:200]}" if isinstance(value, Mapping) and value else ""
            raise TemplateError(f"{where} has no {step}{known}")
        value = value[step]
        where = f"{where}[{step}]" if isinstance(step, int) else f"{where}.{step}"
    return value


def _has(value: Any, step: str | int) -> bool:
    if isinstance(step, int):
        return isinstance(value, list | tuple) and step < len(value)
    return isinstance(value, Mapping) and step in value


def _to_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)
