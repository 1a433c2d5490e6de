"""contains, regex, json_schema and the options of exact_match, with scores that are easy to check by hand."""

import json
from functools import reduce
from types import SimpleNamespace

import pytest

from reinforge.config.dump import dump_config
from reinforge.config.loader import build_config
from reinforge.errors import ConfigError
from reinforge.evaluation.evaluators import base
from reinforge.evaluation.evaluators.base import score_item
from reinforge.evaluation.evaluators.contains import Contains, ContainsConfig
from reinforge.evaluation.evaluators.exact_match import ExactMatch, ExactMatchConfig
from reinforge.evaluation.evaluators.json_schema import JsonSchema, JsonSchemaConfig, json_schema
from reinforge.evaluation.evaluators.numeric import Numeric, NumericConfig
from reinforge.evaluation.evaluators.regex import Regex, RegexConfig
from tests.doubles import make_item


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
async def test_contains(settings, output, expected, score):
    found = await score_item(Contains(ContainsConfig(**settings)), make_item(output, expected))
    assert found.score == score
    assert found.error == (None if score is not None else "the example has no expected output to search for")


async def test_contains_names_the_texts_it_did_not_find():
    found = await Contains(ContainsConfig(texts=["x", "q"])).evaluate(make_item("xyz"))
    assert found.reasoning == "not found: 'q'"


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
async def test_regex(settings, output, score):
    assert (await score_item(Regex(RegexConfig(**settings)), make_item(output))).score == score


@pytest.mark.parametrize(
    ("evaluator", "message"),
    [
        ({"_type": "regex", "pattern": "(a"}, "invalid regular expression: missing ), unterminated subpattern"),
        ({"_type": "contains", "texts": ["a", ""]}, "every output contains an empty string"),
        ({"_type": "contains", "texts": []}, "give at least one string"),
        ({"_type": "weighted", "weights": {"a": 0}}, "the weight of a is 0; give it a finite weight"),
        ({"_type": "llm_judge", "llm": "j", "rubric": "r", "low": 1, "high": 1}, "found low 1 and high 1"),
        ({"_type": "llm_judge", "llm": "j", "rubric": "r", "prompt": "{rubric}"}, "the prompt has no {output}"),
    ],
)
def test_errors_for_invalid_settings_name_their_path(evaluator, message):
    with pytest.raises(ConfigError) as caught:
        build_config({"eval": {"evaluators": {"mine": evaluator}}})
    assert "eval.evaluators.mine" in str(caught.value)
    assert message in str(caught.value)


PERSON = {
    "type": "object",
    "required": ["name", "age"],
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "additionalProperties": False,
}


def schema(given=PERSON, **settings):
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
async def test_json_schema(output, valid, fields):
    assert (await score_item(schema(), make_item(output))).score == valid
    assert (await score_item(schema(score="fields"), make_item(output))).score == fields


async def test_json_in_a_fence_is_accepted_if_allowed():
    fenced = '```json\n{"name": "Ann", "age": 7}\n```\n'
    assert (await score_item(schema(allow_fence=True), make_item(fenced))).score == 1.0
    assert (await score_item(schema(allow_fence=True), make_item(f"Sure!\n{fenced}"))).score == 0.0


async def test_the_reasoning_lists_the_first_errors():
    found = await schema().evaluate(make_item('{"name": 1, "age": -1}'))
    assert found.reasoning == "$.age: -1 is less than the minimum of 0; $.name: 1 is not of type 'string'"


def test_scores_of_fields_need_a_schema_that_requires_some():
    with pytest.raises(ConfigError, match="`score: fields` needs a schema with `required` fields"):
        schema({"type": "object"}, score="fields")


async def test_a_schema_file_is_loaded_and_dumped_as_its_path(tmp_path):
    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    settings = {"_type": "json_schema", "schema": "person.json"}
    loaded = build_config({"eval": {"evaluators": {"mine": settings}}})
    assert "schema: person.json" in dump_config(loaded)
    builder = SimpleNamespace(project_root=tmp_path)
    async for evaluator in json_schema(loaded.config.eval.evaluators["mine"], builder):
        assert (await score_item(evaluator, make_item('{"name": "Ann", "age": 7}'))).score == 1.0
    for text, message in (("[1]", "contains list, expected an object"), ("{", r"cannot read .*person\.json as JSON")):
        (tmp_path / "person.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            await anext(json_schema(loaded.config.eval.evaluators["mine"], builder))
    (tmp_path / "person.json").unlink()
    with pytest.raises(ConfigError, match=r"file not found: person\.json"):
        await anext(json_schema(loaded.config.eval.evaluators["mine"], builder))


DEEP = reduce(lambda value, _: [value], range(3000), 5)
EVALUATORS = [
    ExactMatch(ExactMatchConfig()),
    ExactMatch(ExactMatchConfig(any_of=True)),
    Contains(ContainsConfig()),
    Numeric(NumericConfig()),
    Regex(RegexConfig(pattern="5")),
]


@pytest.mark.parametrize("evaluator", EVALUATORS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("output", [DEEP, 10**6000], ids=["deep", "digits"])
async def test_an_output_that_is_no_text_is_wrong_and_not_missing(evaluator, output):
    found = await score_item(evaluator, make_item(output, ["5"]))
    assert (found.score, found.error) == (0.0, None)
    assert found.reasoning.startswith("the output cannot be converted to a string: ")


@pytest.mark.parametrize("evaluator", EVALUATORS, ids=lambda each: type(each).__name__)
async def test_long_outputs_are_scored_in_a_thread(evaluator, monkeypatch):
    seen = []

    async def run(work, name):
        seen.append(name)
        return work()

    monkeypatch.setattr(base, "run_in_daemon_thread", run)
    await score_item(evaluator, make_item("x" * 20_001, ["5"]))
    is_too_long = isinstance(evaluator, Regex)  # more than its max_chars
    assert seen == ([] if is_too_long else ["evaluator"])
    await score_item(evaluator, make_item("5", ["5"]))
    assert seen == ["evaluator"], "of short ones only patterns, whose time does not depend on the length alone"
