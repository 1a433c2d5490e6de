"""Scores whether the output is JSON that matches a schema.

schema: {required: [name, age], properties: {name: {type: string}, age: {type: integer}}}

output                        score: valid   score: fields
{"name": "Ann", "age": 7}     1.0            1.0
{"name": "Ann", "age": "7"}   0.0            0.5
Ann is 7                      0.0            0.0
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from reinforge.bounded import load_json
from reinforge.config.schema import EvaluatorConfig
from reinforge.errors import ConfigError, Problem
from reinforge.evaluation.answers import parse_answer
from reinforge.evaluation.evaluators.base import run_beside
from reinforge.evaluation.schemas import SchemaValidator
from reinforge.interfaces import Builder, Evaluator
from reinforge.registry import register_evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem

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
    timeout_s: float = Field(
        default=5.0,
        gt=0,
        description="Time limit of the schema's patterns for one output, in seconds; if it is exceeded, the score is "
        "missing, since a pattern is at fault.",
    )


class JsonSchema(Evaluator):
    """Validates the output against a schema; strings are parsed as JSON first.

    An output that cannot be validated, such as one that is nested too deeply, is wrong: it scores 0.0.
    """

    reads_steps = False

    def __init__(self, config: JsonSchemaConfig, schema: dict[str, Any]):
        self.config = config
        self.validator = SchemaValidator(schema)
        self.fields = list(dict.fromkeys(schema.get("required") or []))
        if config.score == "fields" and not self.fields:
            fix = "add `required` to the schema, or use score: valid"
            raise ConfigError(Problem("schema", "`score: fields` needs a schema with `required` fields", fix))

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        score, reason = await run_beside(lambda: self._score(item.output_obj))
        return EvalOutputItem(id=item.id, score=score, reasoning=reason)

    def _score(self, output: Any) -> tuple[float, str]:
        try:
            value = parse_answer(output, allow_fence=self.config.allow_fence)
        except ValueError as error:
            return 0.0, f"invalid JSON: {error}"
        errors = self.validator.find_errors(value, self.config.timeout_s)
        reason = "; ".join(f"{error.json_path}: {error.message[:200]}" for error in errors[:MAX_SHOWN]) or "valid"
        if self.config.score == "valid":
            return float(not errors), reason
        invalid = {error.absolute_path[0] for error in errors if error.absolute_path}
        valid = [name for name in self.fields if isinstance(value, dict) and name in value and name not in invalid]
        return len(valid) / len(self.fields), reason


def _load_schema(path: Path, project_root: Path) -> dict[str, Any]:
    """Returns the schema in a file, which is looked up in the working directory and then in the project folder."""
    file = next((each for each in (path, project_root / path) if each.is_file()), None)
    if file is None:
        folders = " and ".join(dict.fromkeys((str(Path.cwd()), str(project_root))))
        message = f"file not found: {path}; looked in {folders}"
        raise ConfigError(Problem("schema", message, "correct the path or make it absolute"))
    try:
        schema = load_json(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(Problem("schema", f"cannot read {file} as JSON: {error}")) from None
    if not isinstance(schema, dict):
        raise ConfigError(Problem("schema", f"{file} contains {type(schema).__name__}, expected an object"))
    return schema


@register_evaluator(config_type=JsonSchemaConfig)
async def json_schema(config: JsonSchemaConfig, builder: Builder) -> AsyncIterator[JsonSchema]:
    given = config.json_schema
    yield JsonSchema(config, _load_schema(given, builder.project_root) if isinstance(given, Path) else given)
