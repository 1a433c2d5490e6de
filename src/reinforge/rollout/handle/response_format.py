"""Turns `response_format`, and the names that other servers have for it, into the grammar of a reply.

    response_format {"type": "text"}                                     no grammar
    response_format {"type": "json_object"}                              Grammar("json_schema", '{"type":"object"}')
    response_format {"type": "json_schema", "json_schema": {"schema": S}}  Grammar("json_schema", S as text)
    extra_body {"structured_outputs": {"regex": R}}                      Grammar("regex", R)
    extra_body {"guided_choice": ["yes", "no"]}                          Grammar("regex", "(yes|no)")

A schema is checked here, before anything is sampled. `strict` makes no difference: every schema is enforced.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from reinforge.bounded import dump_json, load_json
from reinforge.errors import InvalidCall
from reinforge.limits import get_limits
from reinforge.rollout.handle.arguments import FORMATS, CallArguments
from reinforge.types.request import Grammar

_ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")


def read_grammar(arguments: CallArguments) -> Grammar | None:
    """Returns what the reply must match, by the one of `FORMATS` that is given; None: it is free."""
    given = [name for name in FORMATS if name in arguments.given]
    if len(given) > 1:
        raise arguments.bad(given[1], f"cannot be combined with {arguments.path(given[0])}: pass one of them")
    name, value = given[0], arguments.given[given[0]]
    if name == "response_format":
        return _read_response_format(value, name)
    if name in _GUIDED:
        return _read_guided(_GUIDED[name], value, arguments.path(name))
    return _read_structured(value, arguments.path(name))


def _read_response_format(value: Any, path: str) -> Grammar | None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _ANY_OBJECT if value.get("schema") is None else build_json_grammar(value["schema"], f"{path}.schema")
    if kind == "json_schema":
        inner = value.get("json_schema")
        if not isinstance(inner, Mapping):
            raise _error(f"{path}.json_schema", f'must be {{"name": ..., "schema": ...}}, found {_show(inner)}')
        schema = inner.get("schema")
        return _ANY_OBJECT if schema is None else build_json_grammar(schema, f"{path}.json_schema.schema")
    allowed = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {...}}'
    raise _error(path, f"must be {allowed}, found {_show(value)}")


def _read_structured(value: Any, path: str) -> Grammar:
    found = {kind: each for kind, each in value.items() if each is not None} if isinstance(value, Mapping) else {}
    if len(found) == 1:
        (kind, content), allowed = next(iter(found.items())), set(_GUIDED.values())
        if kind == "json_object" and content is True:
            return _ANY_OBJECT
        if kind in allowed:
            return _read_guided(kind, content, f"{path}.{kind}")
    raise _error(path, f"must have one of json, regex, choice, grammar; found {_show(value)}")


def _read_guided(kind: str, value: Any, path: str) -> Grammar:
    if kind == "json":
        return build_json_grammar(value, path)
    if kind == "choice":
        if isinstance(value, str) or not isinstance(value, Sequence) or not value:
            raise _error(path, f"must be a list of strings, found {_show(value)}")
        if not all(isinstance(each, str) and each for each in value):
            raise _error(path, f"must be a list of non-empty strings, found {_show(value)}")
        choices = "|".join(_SPECIAL.sub(r"\\\g<0>", each) for each in value)
        return Grammar("regex", f"({choices})")
    if not isinstance(value, str) or not value:
        raise _error(path, f"must be a non-empty string, found {_show(value)}")
    return Grammar("regex" if kind == "regex" else "lark", value)


def build_json_grammar(schema: Any, path: str) -> Grammar:
    """Returns the grammar of JSON that a schema accepts.

    Args:
        schema: The schema, as a dict, as JSON text, or True.
    """
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if not isinstance(schema, str):
        if not isinstance(schema, Mapping | bool):
            raise _error(path, f"must be a JSON schema, found {_show(schema)}")
        try:
            schema = dump_json(schema, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise _error(path, f"is not a JSON schema: {error}") from None
    if len(schema) > (most := get_limits().grammar_chars):
        raise _error(path, f"may have {most:,} characters, found {len(schema):,}")
    if (problem := find_schema_problem(schema)) is not None:
        raise _error(path, f"is not a usable JSON schema: {problem}")
    return Grammar("json_schema", schema)


@functools.lru_cache(128)
def find_schema_problem(text: str) -> str | None:
    """Returns why a JSON schema cannot be used; None: it can."""
    from jsonschema import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    try:
        schema = load_json(text)
        depth, reference = _measure(schema)
        if depth > (most := get_limits().schema_depth):
            return f"it is nested {depth} levels deep; {most} are allowed"
        if reference is not None:
            return f'"$ref": {_show(reference)} points to another document; copy that into "$defs"'
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        where = "/".join(str(each) for each in error.absolute_path)
        return f"{f'at {where}: ' if where else ''}{error.message[:200]}"
    except ValueError as error:
        return str(error)
    return None


def _measure(schema: Any) -> tuple[int, Any]:
    """Returns how deep a schema is nested, and a reference to another document, if it has one."""
    deepest, reference, open_ = 0, None, [(schema, 1)]
    while open_:
        value, depth = open_.pop()
        deepest = max(deepest, depth)
        if isinstance(value, dict):
            target = value.get("$ref")
            if isinstance(target, str) and not target.startswith("#"):
                reference = target
            open_ += ((each, depth + 1) for each in value.values())
        elif isinstance(value, list):
            open_ += ((each, depth + 1) for each in value)
    return deepest, reference


def _error(path: str, message: str) -> InvalidCall:
    return InvalidCall(f"chat.completions.create: {path} {message}", path)


def _show(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
