"""`{name}` in the texts of a configuration, filled in for each episode; and JSONPaths (RFC 9535).

    {"task": "{input}", "note": "seed {seed}"}   with input ["a"], seed 7   ->   {"task": ["a"], "note": "seed 7"}

A text that is only a placeholder becomes the value itself; inside a longer text, any other value is written as JSON.
`{{name}}` stands for a literal `{name}`. Other braces, such as those of JSON in a prompt, stay unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from reinforge.errors import did_you_mean

PLACEHOLDER = re.compile(r"\{\{(?P<literal>[A-Za-z_]\w*)\}\}|\{(?P<name>[A-Za-z_]\w*)\}")


def list_placeholders(value: Any) -> list[str]:
    return list(dict.fromkeys(_iterate_names(value)))


def _iterate_names(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from (match["name"] for match in PLACEHOLDER.finditer(value) if match["name"])
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _iterate_names(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iterate_names(item)


def validate_template(value: Any, names: Collection[str]) -> Any:
    """Returns a template unchanged; it may have placeholders of these names only."""
    for name in list_placeholders(value):
        if name not in names:
            allowed = ", ".join(f"{{{each}}}" for each in names)
            raise ValueError(
                f"there is no placeholder {{{name}}}{did_you_mean(name, names)}; there are {allowed}; write "
                f"{{{{{name}}}}} for a literal {{{name}}}"
            )
    return value


def fill_template(value: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: fill_template(item, values) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [fill_template(item, values) for item in value]
    if not isinstance(value, str):
        return value
    whole = PLACEHOLDER.fullmatch(value)
    if whole is not None and whole["name"]:
        return values[whole["name"]]
    return PLACEHOLDER.sub(lambda match: _fill(match, values), value)


def fill_text(text: str, values: Mapping[str, Any]) -> str:
    """Returns a template that stays text, whatever its values are."""
    return PLACEHOLDER.sub(lambda match: _fill(match, values), text)


def _fill(match: re.Match[str], values: Mapping[str, Any]) -> str:
    if match["literal"]:
        return f"{{{match['literal']}}}"
    value = values[match["name"]]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


ROOT = "$"


@cache
def _compile(path: str) -> Any:
    import jsonpath  # takes a third of a second

    return jsonpath.JSONPathEnvironment(strict=True).compile(path)


def validate_json_path(path: str) -> str:
    if path == ROOT:
        return path
    import jsonpath

    try:
        _compile(path)
    except jsonpath.JSONPathError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f'"{path}" is not a JSONPath: {reason}; begin with $, for example $.answer') from None
    return path


def find_by_path(path: str, value: Any) -> Any:
    """Returns what a JSONPath finds: the value for a path to one place, a list for one with wildcards or filters.

    Example: `$.a` in `{"a": 1}` -> `1`; `$.b[*].c` in `{"b": [{"c": 1}, {"c": 2}]}` -> `[1, 2]`.
    """
    if path == ROOT:
        return value
    query = _compile(path)
    found = [] if isinstance(value, str) else query.findall(value)  # the library would decode a text as JSON
    if not found:
        raise LookupError(path)
    return found[0] if query.singular_query() else found
