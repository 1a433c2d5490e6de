"""How well the output is JSON that fits a schema.

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
from reinforge.interfaces import Evaluator
from reinforge.registry import register_evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem

FENCE = re.compile(r"\s*```(?:json)?[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL)
MAX_SHOWN = 5


class JsonSchemaConfig(EvaluatorConfig, name="json_schema"):
    """The schema and what a partly valid output is worth."""

    json_schema: dict[str, Any] | Path = Field(
        alias="schema", description="A JSON schema, or the file with one; references stay within it."
    )
    score: Literal["valid", "fields"] = Field(
        default="valid", description="valid: 1.0 or 0.0. fields: the share of the required fields that are valid."
    )
    allow_fence: bool = Field(default=False, description="JSON inside one ``` block, with nothing around it, counts.")


class JsonSchema(Evaluator):
    """Checks the output; text is parsed first, other values are taken as they are.

    Args:
        config: What a partly valid output is worth.
        schema: The schema.

    Raises:
        ConfigError: It is not a schema, or the fields of `score: fields` are not there.
    """

    def __init__(self, config: JsonSchemaConfig, schema: dict[str, Any]):
        self.config = config
        self.validator = _validator(schema)
        self.fields = _fields(schema)
        if config.score == "fields" and not self.fields:
            fix = "list them, or use score: valid"
            raise ConfigError(Problem("schema", "`score: fields` needs a schema with `required` fields", fix))

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Returns 1.0, 0.0 or the share of valid required fields, and the first errors."""
        try:
            value = parsed_json(item.output_obj, self.config.allow_fence)
        except ValueError as error:
            return EvalOutputItem(id=item.id, score=0.0, reasoning=f"not JSON: {error}")
        errors = sorted(self.validator.iter_errors(value), key=lambda error: [str(key) for key in error.absolute_path])
        reason = "; ".join(f"{error.json_path}: {error.message[:200]}" for error in errors[:MAX_SHOWN]) or "valid"
        if self.config.score == "valid":
            return EvalOutputItem(id=item.id, score=float(not errors), reasoning=reason)
        wrong = {error.absolute_path[0] for error in errors if error.absolute_path}
        there = [name for name in self.fields if isinstance(value, dict) and name in value and name not in wrong]
        return EvalOutputItem(id=item.id, score=len(there) / len(self.fields), reasoning=reason)


def parsed_json(value: Any, allow_fence: bool = False) -> Any:
    """Returns the value that a text is the JSON of; any other value as it is.

    Raises:
        ValueError: It is no JSON, or there is nothing.
    """
    if value is None:
        raise ValueError("the agent returned nothing")
    if not isinstance(value, str):
        return value
    fenced = FENCE.fullmatch(value) if allow_fence else None
    try:
        return json.loads(fenced[1] if fenced else value, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _validator(schema: dict[str, Any]) -> Any:
    from jsonschema import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ConfigError(Problem("schema", f"not a JSON schema: {error.json_path}: {error.message[:300]}")) from None
    remote = [reference for reference in _references(schema) if not reference.startswith("#")]
    if remote:
        fix = "put what it names below $defs and write #/$defs/NAME"
        raise ConfigError(Problem("schema", f"$ref {remote[0]!r} leads out of the schema, which is not followed", fix))
    return kind(schema, registry=Registry())


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if key in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield value
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _fields(schema: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(schema.get("required") or []))


def _read(path: Path, project_root: Path) -> dict[str, Any]:
    """Returns the schema of a file, which is looked for here and then beside the configuration."""
    found = next((place for place in (path, project_root / path) if place.is_file()), None)
    if found is None:
        fix = f"looked in {' and '.join(dict.fromkeys((str(Path.cwd()), str(project_root))))}"
        raise ConfigError(Problem("schema", f"there is no file {path}", fix))
    try:
        schema = json.loads(found.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(Problem("schema", f"{found} cannot be read as JSON: {error}")) from None
    if not isinstance(schema, dict):
        raise ConfigError(Problem("schema", f"{found} holds {type(schema).__name__}, expected an object"))
    return schema


@register_evaluator(config_type=JsonSchemaConfig)
async def json_schema(config: JsonSchemaConfig, builder: Any) -> AsyncIterator[JsonSchema]:
    """Yields the evaluator."""
    given = config.json_schema
    yield JsonSchema(config, _read(given, builder.project_root) if isinstance(given, Path) else given)
