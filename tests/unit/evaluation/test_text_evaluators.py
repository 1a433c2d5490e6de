"""contains, regex, json_schema and the further options of exact_match, with scores that can be checked by eye."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reinforge.config.dump import dump_config
from reinforge.config.loader import build_config
from reinforge.errors import ConfigError
from reinforge.evaluation.evaluators.base import score_item
from reinforge.evaluation.evaluators.contains import Contains, ContainsConfig
from reinforge.evaluation.evaluators.exact_match import ExactMatch, ExactMatchConfig
from reinforge.evaluation.evaluators.json_schema import JsonSchema, JsonSchemaConfig, json_schema
from reinforge.evaluation.evaluators.regex import Regex, RegexConfig
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem


def item(output: Any, expected: Any = None) -> EvalInputItem:
    return EvalInputItem(id="q1", input_obj="?", expected_output_obj=expected, output_obj=output, full_dataset_entry={})


@pytest.mark.parametrize(
    ("settings", "output", "expected", "score"),
    [
        ({}, "it is Paris.", "Paris", 1.0),
        ({}, "it is paris.", "Paris", 0.0),
        ({"ignore_case": True}, "it is paris.", "Paris", 1.0),
        ({}, "a and b", ["a", "b"], 1.0),
        ({}, "a", ["a", "b"], 0.0),
        ({"mode": "any"}, "a", ["a", "b"], 1.0),
        ({"texts": "x"}, "xyz", None, 1.0),
        ({"texts": ["x", "q"]}, "xyz", None, 0.0),
        ({"texts": ["x", "q"], "mode": "any"}, "xyz", None, 1.0),
        ({}, 15, 5, 1.0),
        ({}, None, "Paris", 0.0),
        ({}, "x", None, None),
        ({}, "x", [], None),
    ],
)
async def test_contains(settings: dict[str, Any], output: Any, expected: Any, score: float | None) -> None:
    found = await score_item(Contains(ContainsConfig(**settings)), item(output, expected))
    assert found.score == score
    assert found.error == (None if score is not None else "the example has no expected output to look for")


async def test_contains_names_what_is_not_there() -> None:
    found = await Contains(ContainsConfig(texts=["x", "q"])).evaluate(item("xyz"))
    assert found.reasoning == "not there: 'q'"


@pytest.mark.parametrize(
    ("settings", "output", "score"),
    [
        ({"pattern": r"\d+"}, "about 12", 1.0),
        ({"pattern": r"\d+", "mode": "fullmatch"}, "about 12", 0.0),
        ({"pattern": r"\d+", "mode": "fullmatch"}, "12", 1.0),
        ({"pattern": "(?i)paris"}, "PARIS", 1.0),
        ({"pattern": "^$"}, None, 1.0),
        ({"pattern": "a", "max_chars": 3}, "aaaa", 0.0),
    ],
)
async def test_regex(settings: dict[str, Any], output: Any, score: float) -> None:
    assert (await score_item(Regex(RegexConfig(**settings)), item(output))).score == score


@pytest.mark.parametrize(
    ("evaluator", "said"),
    [
        ({"_type": "regex", "pattern": "(a"}, "not a regular expression: missing ), unterminated subpattern"),
        ({"_type": "contains", "texts": ["a", ""]}, "an empty text is in every output"),
        ({"_type": "contains", "texts": []}, "give at least one text"),
        ({"_type": "weighted", "weights": {"a": 0}}, "the weight of a is 0; leave the part out"),
        ({"_type": "llm_judge", "llm": "j", "rubric": "r", "low": 1, "high": 1}, "low 1 and high 1 are no range"),
        ({"_type": "llm_judge", "llm": "j", "rubric": "r", "prompt": "{rubric}"}, "would not see {output}"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_their_place(evaluator: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({"eval": {"evaluators": {"mine": evaluator}}})
    assert "eval.evaluators.mine" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "output", "expected", "score"),
    [
        ({}, '{"a": 1}', {"a": 1}, 1.0),
        ({}, '{"a": 2}', {"a": 1}, 0.0),
        ({}, "[" * 100_000, [1], 0.0),
        ({}, "a  b", "a b", 0.0),
        ({"collapse_space": True}, "a \n b", "a b", 1.0),
        ({"any_of": True}, "b", ["a", "b"], 1.0),
        ({"any_of": True}, "c", ["a", "b"], 0.0),
        ({"any_of": True}, "c", "c", None),
    ],
)
async def test_exact_match_options(settings: dict[str, Any], output: Any, expected: Any, score: float | None) -> None:
    assert (await score_item(ExactMatch(ExactMatchConfig(**settings)), item(output, expected))).score == score


PERSON = {
    "type": "object",
    "required": ["name", "age"],
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "additionalProperties": False,
}


def schema(given: Any = PERSON, **settings: Any) -> JsonSchema:
    config = JsonSchemaConfig.model_validate({"schema": given, **settings})
    return JsonSchema(config, given)


@pytest.mark.parametrize(
    ("output", "valid", "fields"),
    [
        ('{"name": "Ann", "age": 7}', 1.0, 1.0),
        ({"name": "Ann", "age": 7}, 1.0, 1.0),
        ('{"name": "Ann", "age": "7"}', 0.0, 0.5),
        ('{"name": "Ann"}', 0.0, 0.5),
        ('{"name": 1, "age": -1}', 0.0, 0.0),
        ('{"name": "Ann", "age": 7, "more": 1}', 0.0, 1.0),
        ("[]", 0.0, 0.0),
        ("Ann is 7", 0.0, 0.0),
        ('{"name": "Ann", "age": NaN}', 0.0, 0.0),
        ("[" * 100_000, 0.0, 0.0),
        (None, 0.0, 0.0),
        ('```json\n{"name": "Ann", "age": 7}\n```', 0.0, 0.0),
    ],
)
async def test_json_schema(output: Any, valid: float, fields: float) -> None:
    assert (await score_item(schema(), item(output))).score == valid
    assert (await score_item(schema(score="fields"), item(output))).score == fields


async def test_json_in_a_fence_counts_where_it_is_allowed() -> None:
    fenced = '```json\n{"name": "Ann", "age": 7}\n```\n'
    assert (await score_item(schema(allow_fence=True), item(fenced))).score == 1.0
    assert (await score_item(schema(allow_fence=True), item(f"Sure!\n{fenced}"))).score == 0.0


async def test_the_first_errors_are_told() -> None:
    found: EvalOutputItem = await schema().evaluate(item('{"name": 1, "age": -1}'))
    assert found.reasoning == "$.age: -1 is less than the minimum of 0; $.name: 1 is not of type 'string'"


@pytest.mark.parametrize(
    ("given", "settings", "said"),
    [
        ({"type": "objekt"}, {}, "schema: not a JSON schema: $.type: 'objekt' is not valid"),
        ({"type": "object"}, {"score": "fields"}, "`score: fields` needs a schema with `required` fields"),
        ({"$ref": "https://x.example/s.json"}, {}, "$ref 'https://x.example/s.json' leads out of the schema"),
    ],
)
def test_a_schema_that_is_none_is_refused(given: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schema(given, **settings)
    assert said in str(caught.value)


async def test_a_schema_may_stand_in_a_file_and_is_written_back(tmp_path: Path) -> None:
    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    settings = {"_type": "json_schema", "schema": "person.json"}
    loaded = build_config({"eval": {"evaluators": {"mine": settings}}})
    assert "schema: person.json" in dump_config(loaded)
    builder = SimpleNamespace(project_root=tmp_path)
    async for evaluator in json_schema(loaded.config.eval.evaluators["mine"], builder):
        assert (await score_item(evaluator, item('{"name": "Ann", "age": 7}'))).score == 1.0
    for text, said in (("[1]", "holds list, expected an object"), ("{", "cannot be read as JSON")):
        (tmp_path / "person.json").write_text(text)
        with pytest.raises(ConfigError, match=said):
            await anext(json_schema(loaded.config.eval.evaluators["mine"], builder))
    (tmp_path / "person.json").unlink()
    with pytest.raises(ConfigError, match=r"there is no file person\.json"):
        await anext(json_schema(loaded.config.eval.evaluators["mine"], builder))
