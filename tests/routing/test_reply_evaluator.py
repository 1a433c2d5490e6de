"""Evaluators that a router decides by: how they are named, what they are shown, and which are refused."""

import json

import pytest

from reinforge.errors import ConfigError
from reinforge.routing.reply_evaluator import open_evaluator, read_evaluator
from reinforge.types.request import ModelReply, ModelRequest

CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
SHOWN = """
def knows_the_answer(item):
    return 1.0 if item.expected_output_obj or item.full_dataset_entry else 0.0

def calls_f(item):
    return item.output_obj[-1]["tool_calls"][0]["function"]["name"] == "f"

def repeats(item):
    return item.output_obj == item.input_obj[-1]["content"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("router")
    (made / "shown_to_routers.py").write_text(SHOWN)
    (made / "form.json").write_text(json.dumps({"type": "array"}))
    return made


def test_how_an_evaluator_is_named():
    assert read_evaluator("json_schema") == {"_type": "json_schema"}
    assert read_evaluator("checks:is_valid") == {"_type": "python", "function": "checks:is_valid"}
    assert read_evaluator("{_type: regex, pattern: ':'}") == {"_type": "regex", "pattern": ":"}
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_evaluator("{_type: [")


@pytest.mark.parametrize(
    ("settings", "message", "score"),
    [
        ({"_type": "python", "function": "shown_to_routers:knows_the_answer"}, {"content": "yes"}, 0.0),
        ({"_type": "python", "function": "shown_to_routers:calls_f"}, CALL, 1.0),
        ({"_type": "python", "function": "shown_to_routers:calls_f"}, {"content": "f"}, None),  # it raises
        ({"_type": "python", "function": "shown_to_routers:repeats"}, {"content": "yes"}, 1.0),
        ({"_type": "json_schema", "schema": "form.json"}, {"content": "[]"}, 1.0),
        ({"_type": "json_schema", "schema": "form.json"}, {"content": "{}"}, 0.0),
    ],
)
async def test_it_is_shown_the_request_and_the_reply_alone(folder, settings, message, score):
    request = ModelRequest([{"role": "user", "content": "yes"}])
    async with open_evaluator(settings, folder, "router.json") as evaluator:
        assert await evaluator.score(request, ModelReply(message, "stop", None)) == score


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"_type": "python", "function": "absent_module:f"}, 'router.json evaluator.function: there is no module "abs'),
        (
            {"_type": "json_schema", "schema": "absent.json"},
            "router.json evaluator.schema: file not found: absent.json",
        ),
        ({"_type": "jsn_schema"}, "router.json evaluator._type: "),
        ({"_type": "exact_match"}, "router.json evaluator: compares with an expected answer"),
        ({"_type": "llm_judge", "llm": "judge", "rubric": "Polite?"}, "router.json evaluator.llm: llms has no entry"),
    ],
)
async def test_one_that_cannot_be_used_is_refused_with_file_and_key(tmp_path, settings, said):
    with pytest.raises(ConfigError) as caught:
        async with open_evaluator(settings, tmp_path, "router.json"):
            pass
    assert said in str(caught.value)
    assert all(each.fix for each in caught.value.problems)
