"""Schemas at fault are refused before any work; whatever an answer is, it is valid or wrong, and never missing."""

import contextlib
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforge.errors import ConfigError
from reinforge.evaluation import schemas
from reinforge.evaluation.answers import UnusableOutputError, parse_answer, strip_fence
from reinforge.evaluation.evaluators.base import score_item
from reinforge.evaluation.evaluators.json_schema import JsonSchema, JsonSchemaConfig
from reinforge.evaluation.patterns import PatternTimeout
from reinforge.evaluation.schemas import SchemaValidator
from tests.core.evaluation.test_patterns import SLOW, TEXT
from tests.doubles import make_item

TREE = {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False}
EITHER = {"type": "object", "properties": {"child": {"$ref": "#"}}}
DOUBLING = {"anyOf": [EITHER | {"required": ["x"]}, EITHER | {"required": ["y"]}]}
"""Doubles the work at every level of an answer."""


def build(schema, **settings):
    return JsonSchema(JsonSchemaConfig.model_validate({"schema": schema, **settings}), schema)


def nest(depth):
    value = {}
    for _ in range(depth):
        value = {"child": value}
    return value


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "#"}, r"\$ refers to itself without going into the answer"),
        ({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"not": {"$ref": "#/$defs/a"}}}}, "refers to itself"),
        ({"dependentSchemas": {"seldom": {"$ref": "#"}}}, "refers to itself"),
        ({"properties": {"a": {"$ref": "#/$defs/nowhere"}}}, r"\$\.properties\.a: \$ref '#/\$defs/nowhere' points to"),
        ({"$ref": "https://x.example/s.json"}, "points outside the schema"),
        (
            {"properties": {"a": {"pattern": "(?P<a>x)(?P<a>y)"}}},
            r"not a valid JSON schema: \$\.properties\.a\.pattern",
        ),
        ({"patternProperties": {"a": {}}, "unevaluatedProperties": False}, "cannot be used in the same schema"),
        ({"type": "objekt"}, "not a valid JSON schema"),
        ({"$schema": "http://json-schema.org/draft-03/schema#", "type": "objekt"}, "cannot be used|not a valid"),
    ],
)
def test_a_schema_that_is_at_fault_is_refused(schema, message):
    with pytest.raises(ConfigError, match=message) as caught:
        SchemaValidator(schema)
    assert caught.value.problems[0].path == "schema"


def test_a_schema_may_refer_to_itself_below_the_answers_parts():
    validator = SchemaValidator(TREE)
    assert validator.find_errors(nest(50), 1) == []
    (error,) = validator.find_errors({"child": {"chidl": {}}}, 1)
    assert (error.json_path, error.message) == ("$.child", "additional properties are not allowed: 'chidl'")


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": SLOW},
        {"patternProperties": {SLOW: {}}},
        {"patternProperties": {SLOW: {}}, "additionalProperties": False},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "allOf": [{"pattern": SLOW}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$schema": "http://json-schema.org/draft-07/schema#", "pattern": SLOW}}},
        {"propertyNames": {"pattern": SLOW}},
    ],
)
async def test_a_pattern_that_takes_too_long_is_at_fault_wherever_it_stands(schema):
    evaluator = build(schema, timeout_s=0.05)
    for answer in (json.dumps(TEXT), {TEXT: 1}):
        found = await score_item(evaluator, make_item(answer))
        if found.error is not None:
            assert found.score is None
            assert found.error.startswith("PatternTimeout: the pattern '(a|aa)+$' was still matching 61 characters")
            return
    pytest.fail("the pattern was matched without a time limit")


BIG = 10**6000
DEEP = "[" * 2000 + "]" * 2000
WRONG = [
    ({"multipleOf": 2}, "1e400", "invalid JSON: the number 1e400 is too large"),
    ({"type": "number"}, "[-1e999]", "invalid JSON: the number -1e999 is too large"),
    ({"multipleOf": 2}, math.inf, "invalid JSON: a number is not finite"),
    ({"multipleOf": 0.1}, "1" + "0" * 399, "the answer cannot be validated: int too large"),
    ({"type": "integer"}, "1" * 5000, "invalid JSON: a number of 5000 digits, the limit is 400"),
    ({"type": "integer"}, BIG, "invalid JSON: an integer has more than"),
    ({"type": "array"}, DEEP, "invalid JSON: nested deeper than 64 levels"),
    ({"type": "object"}, nest(2000), "invalid JSON: it is nested"),
    (TREE, nest(199), ""),
    (DOUBLING, nest(40), "the answer needs more than 2,000 checks"),
    ({"type": "array"}, "[" + "1," * 600_000 + "1]", "invalid JSON: 1200003 characters, the limit is 1048576"),
    (
        {"uniqueItems": True},
        [1, True, "1", [1], {"a": 1, "b": 2}, {"b": 2, "a": 1.0}],
        "$: {'b': 2, 'a': 1.0} is a duplicate",
    ),
]


@pytest.mark.parametrize(("schema", "output", "why"), WRONG, ids=[why[:40] or "tree" for _, _, why in WRONG])
async def test_an_answer_that_cannot_be_validated_is_wrong_and_not_missing(set_limit, schema, output, why):
    set_limit("schema_checks", 2000)
    found = await score_item(build(schema), make_item(output))
    assert found.error is None
    assert why in found.reasoning
    if why:
        assert found.score == 0.0


async def test_an_answer_that_raises_would_be_missing_without_that_rule(monkeypatch):
    """The mutation: what an answer makes fail counts as a failure of the evaluator."""
    monkeypatch.setattr(schemas, "UnusableOutputError", OverflowError)
    found = await score_item(build({"multipleOf": 0.1}), make_item("1" + "0" * 399))
    assert found.score is None
    assert str(found.error).startswith("OverflowError: the answer cannot be validated")


async def test_unique_items_follow_jsons_equality():
    evaluator = build({"uniqueItems": True})
    for unique in ([1, True], [0, False], [[1], [True]], [{"a": 1}, {"a": True}], ["1", 1], [{}, []]):
        assert (await score_item(evaluator, make_item(unique))).score == 1.0
    for repeated in ([1, 1.0], [[1], [1.0]], [{"a": 1}, {"a": 1.0}], [None, None], ["a", "a"]):
        assert (await score_item(evaluator, make_item(repeated))).score == 0.0


def test_a_fence_is_read_in_one_pass():
    assert strip_fence("```json\n[1]\n```\n") == "[1]\n"
    assert parse_answer(" ```\n[1]```", allow_fence=True) == [1]
    for text in ("```\n" + " " * 1_000_000, "Sure!\n```\n[1]\n```", "```python\n[1]\n```", "``` [1]```"):
        assert strip_fence(text) == text


HUGE = st.sampled_from([400, 4299, 6000]).map(lambda digits: 10**digits)
NUMBERS = st.integers() | st.floats() | HUGE
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=20)
ANSWERS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
KEYWORDS = {
    "type": TYPES,
    "pattern": st.sampled_from(["^a", SLOW, r"\d+$", "^(a+)+$"]),
    "multipleOf": st.sampled_from([1, 3, 0.1, 1e-300, 1e300]),
    "minimum": st.sampled_from([0, -1e308, 10**400]),
    "uniqueItems": st.booleans(),
    "maxLength": st.integers(0, 9),
    "required": st.lists(st.text(max_size=3), unique=True, max_size=2),
    "enum": st.lists(SCALARS, min_size=1, max_size=3),
    "minProperties": st.integers(0, 3),
}


def nest_schemas(inner):
    return st.fixed_dictionaries(
        {},
        optional={
            **KEYWORDS,
            "items": inner,
            "anyOf": st.lists(inner, min_size=1, max_size=3),
            "not": inner,
            "properties": st.dictionaries(st.text(max_size=3), inner, max_size=3),
            "patternProperties": st.dictionaries(st.sampled_from(["a", "^b", SLOW]), inner, max_size=2),
            "additionalProperties": inner,
            "$ref": st.sampled_from(["#", "#/anyOf/0", "#/items"]),
            "contains": inner,
        },
    )


SCHEMAS = st.recursive(st.fixed_dictionaries({}, optional=KEYWORDS) | st.booleans(), nest_schemas, max_leaves=6)


@settings(max_examples=50, deadline=None)
@given(SCHEMAS.filter(lambda schema: isinstance(schema, dict)), ANSWERS, st.booleans())
def test_any_answer_to_any_schema_has_a_typed_outcome(schema, answer, as_text):
    try:
        evaluator = build(schema, timeout_s=0.05)
    except ConfigError:
        return
    with contextlib.suppress(ValueError):  # json.dumps itself refuses integers of so many digits
        answer = json.dumps(answer) if as_text else answer
    try:
        score, reason = evaluator._score(answer)
    except (UnusableOutputError, PatternTimeout):
        return
    assert score in (0.0, 1.0)
    assert isinstance(reason, str)
