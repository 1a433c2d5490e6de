"""JSON schemas that an untrusted answer can be validated against: bounded work, and no failure that hides the answer.

A schema is at fault if it is invalid, refers to something that does not exist, or refers to itself without going into
the answer: it is refused before any work starts. A pattern is at fault if it exceeds its time limit (`PatternTimeout`).
Whatever else fails while an answer is validated is the answer's fault (`UnusableOutputError`): a number that is too
large to divide, values that are nested too deeply, or so many of them that validation would take minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from reinforge.bounded import TooDeepError, refuse_depth
from reinforge.errors import ConfigError, Problem
from reinforge.evaluation.answers import UnusableOutputError
from reinforge.evaluation.patterns import PatternTimeout, compile_pattern, search_pattern
from reinforge.limits import get_limits

_DATA = ("const", "enum", "default", "examples")  # keywords whose values are data, not schemas
_IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "extends", "disallow")
_IN_PLACE_BY_NAME = ("dependentSchemas", "dependencies")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_PROBES: tuple[Any, ...] = (None, True, 0, 0.5, "", "a", [], [0, 0], {}, {"a": 0})
"""One answer of each kind; a schema that fails on these is at fault itself."""

Keyword = Callable[[Any, Any, Any, Any], Iterator[Any] | None]


@dataclass
class _Budget:
    """What is left for one answer."""

    deadline: float
    checks: int

    def spend(self) -> None:
        self.checks -= 1
        if self.checks < 0:
            raise UnusableOutputError(f"the answer needs more than {get_limits().schema_checks:,} checks")

    @property
    def seconds(self) -> float:
        return self.deadline - time.monotonic()


_budget: ContextVar[_Budget] = ContextVar("_budget")


class SchemaValidator:
    """Validates answers against one schema; a `ConfigError` if the schema is at fault."""

    def __init__(self, schema: dict[str, Any]):
        try:
            self._validator = _build(schema)
            for probe in _PROBES:
                self.find_errors(probe, timeout_s=1.0)
        except ConfigError:
            raise
        except PatternTimeout as error:
            raise ConfigError(Problem("schema", str(error), "rewrite the pattern")) from None
        except Exception as error:  # jsonschema has its own errors for what its own schemas do not exclude
            what = " ".join(str(error).split())[:200]
            raise ConfigError(Problem("schema", f"the schema cannot be used: {what}")) from error

    def find_errors(self, answer: Any, timeout_s: float) -> list[Any]:
        """Returns jsonschema's errors for an answer, ordered by their path; empty: the answer is valid.

        Raises:
            PatternTimeout: The patterns took longer, all together.
            UnusableOutputError: The answer cannot be validated.
        """
        token = _budget.set(_Budget(time.monotonic() + timeout_s, get_limits().schema_checks))
        try:
            with refuse_depth():
                errors = list(self._validator.iter_errors(answer))
        except TooDeepError as cause:
            raise UnusableOutputError("the answer is nested too deeply to validate") from cause
        except (OverflowError, ValueError, TypeError) as cause:
            raise UnusableOutputError(f"the answer cannot be validated: {cause}") from cause
        finally:
            _budget.reset(token)
        return sorted(errors, key=lambda error: [str(key) for key in error.absolute_path])


def _build(schema: dict[str, Any]) -> Any:
    from jsonschema import SchemaError
    from jsonschema.validators import Draft202012Validator, extend, validator_for
    from referencing import Registry

    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        message = f"not a valid JSON schema: {error.json_path}: {error.message[:300]}"
        raise ConfigError(Problem("schema", message)) from None
    _check_patterns(schema)
    plain = _remove_dialects(schema)  # jsonschema would switch to its own, unlimited keywords at every $schema
    _check_references(plain, kind)
    keywords = {name: _limit_keyword(function) for name, function in {**kind.VALIDATORS, **_OWN_KEYWORDS}.items()}
    return extend(kind, keywords)(plain, registry=Registry())


def _limit_keyword(function: Keyword) -> Keyword:
    def check(validator: Any, value: Any, answer: Any, schema: Any) -> Iterator[Any] | None:
        _budget.get().spend()
        return function(validator, value, answer, schema)

    return check


def _remove_dialects(schema: Any) -> Any:
    if isinstance(schema, Mapping):
        kept = {key: value for key, value in schema.items() if key != "$schema" or not isinstance(value, str)}
        return {key: value if key in _DATA else _remove_dialects(value) for key, value in kept.items()}
    return [_remove_dialects(value) for value in schema] if isinstance(schema, list) else schema


def _iterate_objects(schema: Any, path: str = "$") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields every object of a schema with its path, without those that are data."""
    if isinstance(schema, Mapping):
        yield path, schema
        for key, value in schema.items():
            if key not in _DATA:
                yield from _iterate_objects(value, f"{path}.{key}")
    elif isinstance(schema, list):
        for number, value in enumerate(schema):
            yield from _iterate_objects(value, f"{path}[{number}]")


def _check_patterns(schema: Any) -> None:
    objects = list(_iterate_objects(schema))
    for path, each in objects:
        by_pattern = each.get("patternProperties")
        patterns = list(by_pattern) if isinstance(by_pattern, Mapping) else []
        patterns += [each["pattern"]] if isinstance(each.get("pattern"), str) else []
        for pattern in patterns:
            try:
                compile_pattern(pattern)
            except ValueError as error:
                raise ConfigError(Problem("schema", f"{path}: {error}, in {pattern[:80]!r}")) from None
    if all(any(keyword in each for _, each in objects) for keyword in ("patternProperties", "unevaluatedProperties")):
        message = "patternProperties and unevaluatedProperties cannot be used in the same schema"
        fix = "use additionalProperties instead, or name the properties under properties"
        raise ConfigError(Problem("schema", message, fix))


def _check_references(schema: Any, kind: Any) -> None:
    """Raises a `ConfigError` for a reference that leads out of the schema, to nothing, or back to itself."""
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012, specification_with

    specification = specification_with(str(kind.ID_OF(kind.META_SCHEMA)), default=DRAFT202012)
    root = specification.create_resource(schema)
    visiting: set[int] = set()
    done: set[int] = set()

    def follow(each: Mapping[str, Any], resolver: Any, path: str) -> Iterator[tuple[Any, Any]]:
        for key in _REFERENCES:
            reference = each.get(key)
            if not isinstance(reference, str):
                continue
            if not reference.startswith("#"):
                fix = "copy the definition under $defs and refer to it as #/$defs/NAME"
                raise ConfigError(Problem("schema", f"$ref {reference!r} points outside the schema ({path})", fix))
            try:
                found = resolver.lookup(reference)
            except Unresolvable:
                raise ConfigError(Problem("schema", f"{path}: $ref {reference!r} points to nothing")) from None
            yield found.contents, found.resolver

    def visit(each: Any, resolver: Any, path: str) -> None:
        """Follows everything that is validated against the same part of an answer."""
        if not isinstance(each, Mapping) or id(each) in done:
            return
        if id(each) in visiting:
            message = f"{path} refers to itself without going into the answer, so validation would never end"
            raise ConfigError(Problem("schema", message, "refer to it below properties or items"))
        visiting.add(id(each))
        resolver = resolver.in_subresource(specification.create_resource(each))
        for child, its_resolver in follow(each, resolver, path):
            visit(child, its_resolver, path)
        for child in _list_in_place(each):
            visit(child, resolver, path)
        visiting.discard(id(each))
        done.add(id(each))

    def walk(each: Any, resolver: Any, path: str) -> None:
        visit(each, resolver, path)
        if isinstance(each, Mapping):
            resolver = resolver.in_subresource(specification.create_resource(each))
        pairs = each.items() if isinstance(each, Mapping) else enumerate(each) if isinstance(each, list) else ()
        for key, value in pairs:
            if key not in _DATA:
                walk(value, resolver, f"{path}.{key}")

    walk(schema, Registry().resolver_with_root(root), "$")


def _list_in_place(schema: Mapping[str, Any]) -> list[Any]:
    """Returns the subschemas that are validated against the same part of an answer."""
    found: list[Any] = []
    for key in _IN_PLACE:
        value = schema.get(key)
        found += value if isinstance(value, list) else [value]
    for key in _IN_PLACE_BY_NAME:
        value = schema.get(key)
        found += value.values() if isinstance(value, Mapping) else []
    return found


def _matches(pattern: str, text: str) -> bool:
    return search_pattern(pattern, text, _budget.get().seconds) is not None


def _check_pattern(validator: Any, pattern: str, answer: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(answer, "string") and not _matches(pattern, answer):
        yield _build_error(f"{_shorten(answer)} does not match {pattern!r}")


def _check_pattern_properties(validator: Any, patterns: Any, answer: Any, schema: Any) -> Iterator[Any]:
    if not validator.is_type(answer, "object"):
        return
    for pattern, subschema in patterns.items():
        for key, value in answer.items():
            if _matches(pattern, key):
                yield from validator.descend(value, subschema, path=key, schema_path=pattern)


def _check_additional_properties(validator: Any, allowed: Any, answer: Any, schema: Any) -> Iterator[Any]:
    if not validator.is_type(answer, "object"):
        return
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    extra = [key for key in answer if key not in named and not any(_matches(pattern, key) for pattern in patterns)]
    if validator.is_type(allowed, "object"):
        for key in extra:
            yield from validator.descend(answer[key], allowed, path=key)
    elif not allowed and extra:
        names = ", ".join(_shorten(key) for key in sorted(extra, key=str)[:10])
        yield _build_error(f"additional properties are not allowed: {names}")


def _check_unique_items(validator: Any, wanted: Any, answer: Any, schema: Any) -> Iterator[Any]:
    if not wanted or not validator.is_type(answer, "array"):
        return
    seen: set[Any] = set()
    for item in answer:
        key = _make_key(item)
        if key in seen:
            yield _build_error(f"{_shorten(item)} is a duplicate")
            return
        seen.add(key)


def _make_key(value: Any) -> Any:
    """Returns a hashable stand-in that is equal for equal JSON values: 1 equals 1.0, but not True."""
    _budget.get().spend()
    if isinstance(value, Mapping):
        return ("object", frozenset((key, _make_key(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return ("array", tuple(_make_key(item) for item in value))
    return ("boolean", value) if isinstance(value, bool) else value


def _build_error(message: str) -> Any:
    from jsonschema import ValidationError

    return ValidationError(message)


def _shorten(value: Any) -> str:
    return repr(value)[:200]


_OWN_KEYWORDS: dict[str, Keyword] = {
    "pattern": _check_pattern,
    "patternProperties": _check_pattern_properties,
    "additionalProperties": _check_additional_properties,
    "uniqueItems": _check_unique_items,
}
