"""JSONPath (RFC 9535): what a path finds in a value."""

from __future__ import annotations

from functools import cache
from typing import Any

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

    Raises:
        LookupError: It finds nothing.
    """
    if path == ROOT:
        return value
    query = _compile(path)
    found = [] if isinstance(value, str) else query.findall(value)  # the library would decode a text as JSON
    if not found:
        raise LookupError(path)
    return found[0] if query.singular_query() else found
