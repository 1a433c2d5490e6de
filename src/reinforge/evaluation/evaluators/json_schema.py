"""Scores whether the output is JSON that matches a schema.

schema: {required: [name, age], properties: {name: {type: string}, age: {type: integer}}}

output                        score: valid   score: fields
{"name": "Ann", "age": 7}     1.0            1.0
{"name": "Ann", "age": "7"}   0.0            0.5
Ann is 7                      0.0            0.0
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from reinforge.config.schema import EvaluatorConfig
from reinforge.errors import ConfigError, Problem
from reinforge.interfaces import Builder, Evaluator
from reinforge.registry import register_evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem

FENCE = re.compile(r"\s*```(?:json)?[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL)
MAX_SHOWN = 5


class JsonSchemaConfig(EvaluatorConfig, name="json_schema"):
    """Scores whether the output is JSON that matches a schema."""

    json_schema: dict[str, Any] | Path = Field(
        alias="schema", description="A JSON schema, or a file with one; $ref may only point into the same schema."
    )
    score: Literal["valid", "fields"] = Field(
        default="valid", description="valid: 1.0 or 0.0. fields: the fraction of the required fields that are valid."
    )
    allow_fence: bool = Field(
        default=False, description="Also accept JSON inside one ``` block with nothing around it."
    )


class JsonSchema(Evaluator):
    """Validates the output against a schema; strings are parsed as JSON first.

    Args:
        config: The evaluator's settings.
        schema: The schema.

    Raises:
        ConfigError: The schema is invalid, or `score: fields` is set and the schema has no required fields.
    """

    def __init__(self, config: JsonSchemaConfig, schema: dict[str, Any]):
        self.config = config
        self.validator = _build_validator(schema)
        self.fields = list(dict.fromkeys(schema.get("required") or []))
        if config.score == "fields" and not self.fields:
            fix = "add `required` to the schema, or use score: valid"
            raise ConfigError(Problem("schema", "`score: fields` needs a schema with `required` fields", fix))

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Returns 1.0, 0.0 or the fraction of valid required fields, and the first errors."""
        try:
            value = parse_json(item.output_obj, self.config.allow_fence)
        except ValueError as error:
            return EvalOutputItem(id=item.id, score=0.0, reasoning=f"invalid JSON: {error}")
        errors = sorted(self.validator.iter_errors(value), key=lambda error: [str(key) for key in error.absolute_path])
        reason = "; ".join(f"{error.json_path}: {error.message[:200]}" for error in errors[:MAX_SHOWN]) or "valid"
        if self.config.score == "valid":
            return EvalOutputItem(id=item.id, score=float(not errors), reasoning=reason)
        invalid = {error.absolute_path[0] for error in errors if error.absolute_path}
        valid = [name for name in self.fields if isinstance(value, dict) and name in value and name not in invalid]
        return EvalOutputItem(id=item.id, score=len(valid) / len(self.fields), reasoning=reason)


def parse_json(value: Any, allow_fence: bool = False) -> Any:
    """Returns the value of a JSON string; other values are returned unchanged.

    Raises:
        ValueError: The string is not JSON, or the value is None.
    """
    if value is None:
        raise ValueError("the agent returned nothing")
    if not isinstance(value, str):
        return value
    fenced = FENCE.fullmatch(value) if allow_fence else None
    try:
        return json.loads(fenced[1] if fenced else value, parse_constant=_reject_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not allowed in JSON")


def _build_validator(schema: dict[str, Any]) -> Any:
    from jsonschema import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        message = f"not a valid JSON schema: {error.json_path}: {error.message[:300]}"
        raise ConfigError(Problem("schema", message)) from None
    remote = [reference for reference in _find_references(schema) if not reference.startswith("#")]
    if remote:
        fix = "copy the definition under $defs and refer to it as #/$defs/NAME"
        raise ConfigError(Problem("schema", f"$ref {remote[0]!r} points outside the schema", fix))
    return kind(schema, registry=Registry())


def _find_references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if key in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield value
            yield from _find_references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _find_references(value)


def _load_schema(path: Path, project_root: Path) -> dict[str, Any]:
    """Returns the schema in a file, which is looked up in the working directory and then in the project folder."""
    file = next((each for each in (path, project_root / path) if each.is_file()), None)
    if file is None:
        folders = " and ".join(dict.fromkeys((str(Path.cwd()), str(project_root))))
        message = f"file not found: {path}; looked in {folders}"
        raise ConfigError(Problem("schema", message, "correct the path or make it absolute"))
    try:
        schema = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(Problem("schema", f"cannot read {file} as JSON: {error}")) from None
    if not isinstance(schema, dict):
        raise ConfigError(Problem("schema", f"{file} contains {type(schema).__name__}, expected an object"))
    return schema


@register_evaluator(config_type=JsonSchemaConfig)
async def json_schema(config: JsonSchemaConfig, builder: Builder) -> AsyncIterator[JsonSchema]:
    """Yields the evaluator."""
    given = config.json_schema
    yield JsonSchema(config, _load_schema(given, builder.project_root) if isinstance(given, Path) else given)
