"""A format for a reply's text leaves room for what comes before or instead of the text: reasoning and tool calls."""

import json

import llguidance
import pytest

from reinforge.dialects.families.detection import find_family, may_think, opens_thinking
from reinforge.dialects.tool_calls import parse_reply, prepare_request
from reinforge.types.request import Grammar, ModelReply, ModelRequest
from tests.core.dialects.test_tool_grammars import matches
from tests.families import SPECS
from tests.models import make_tokenizer

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
FORMAT = Grammar("json_schema", json.dumps(SCHEMA))
ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]


@pytest.fixture(scope="module")
def vocabulary():
    backend = make_tokenizer().backend_tokenizer
    return backend, llguidance.LLTokenizer(backend.to_str(), n_vocab=backend.get_vocab_size())


def prepare(name, grammar=FORMAT, tools=None, **fields):
    return prepare_request(ModelRequest([], tools=tools, grammar=grammar, **fields), SPECS[name].text)


def accepts(vocabulary, grammar, text):
    return matches(*vocabulary, grammar, text, {})


@pytest.mark.parametrize("name", SPECS)
def test_with_tools_to_choose_from_the_reply_is_a_call_or_the_format(vocabulary, name):
    template = SPECS[name].text
    before = "so\n</think>\n\n" if opens_thinking(template, {}) else ""
    request = prepare(name, tools=TOOLS)
    call = before + find_family(template).write([("add", {"a": 5})])
    assert accepts(vocabulary, request.grammar, call)
    assert accepts(vocabulary, request.grammar, before + '{"x": 5}')
    assert not accepts(vocabulary, request.grammar, before + '{"y": 5}')
    assert not accepts(vocabulary, request.grammar, before + "just text")
    raw = ModelReply({"role": "assistant", "content": call}, "stop", None, raw_text=call)
    (parsed,) = parse_reply(raw, request, template).message["tool_calls"]
    assert json.loads(parsed["function"]["arguments"]) == {"a": 5}


@pytest.mark.parametrize("name", [name for name in SPECS if may_think(SPECS[name].text, {})])
def test_a_model_that_thinks_may_do_so_first(vocabulary, name):
    template, request = SPECS[name].text, prepare(name)
    tags = find_family(template).thinking
    thought = f"so {tags.end}\n" if opens_thinking(template, {}) else f"{tags.start}so {tags.end}\n"
    assert accepts(vocabulary, request.grammar, thought + '{"x": 5}')
    assert not accepts(vocabulary, request.grammar, thought + "text")
    text = thought + '{"x": 5}'
    reply = ModelReply({"role": "assistant", "content": text}, "stop", None, raw_text=text)
    assert parse_reply(reply, request, template).message["content"] == '{"x": 5}'


def test_a_pattern_keeps_its_slashes(vocabulary):
    request = prepare("hermes", Grammar("regex", "a/b\\/c\n"), TOOLS)
    assert accepts(vocabulary, request.grammar, "a/b/c\n")
    assert not accepts(vocabulary, request.grammar, "a/b")


LARK = Grammar("lark", 'start: "{" marker_0 "}"\nmarker_0: "a" | SPACE\nSPACE: "b"\n// }')


@pytest.mark.parametrize("name", ["hermes", "qwen_xml", "mistral"])
def test_a_grammar_of_lark_has_names_of_its_own_and_leaves_room_for_calls(vocabulary, name):
    before = "so\n</think>\n\n" if opens_thinking(SPECS[name].text, {}) else ""
    request = prepare(name, LARK, TOOLS)
    for text in ("{a}", "{b}", find_family(SPECS[name].text).write([("add", {"a": 5})])):
        assert accepts(vocabulary, request.grammar, before + text)
    assert not accepts(vocabulary, request.grammar, before + "{c}")


def test_a_grammar_of_lark_leaves_room_for_reasoning(vocabulary):
    name = next(name for name in SPECS if may_think(SPECS[name].text, {}))
    tags = find_family(SPECS[name].text).thinking
    thought = f"so {tags.end}\n" if opens_thinking(SPECS[name].text, {}) else f"{tags.start}so {tags.end}\n"
    assert accepts(vocabulary, prepare(name, LARK).grammar, f"{thought}{{b}}")
    assert not accepts(vocabulary, LARK, f"{thought}{{b}}")  # by itself it leaves none


@pytest.mark.parametrize("grammar", [FORMAT, Grammar("regex", "a+"), Grammar("lark", 'start: "a"')])
def test_without_tools_and_reasoning_the_format_is_the_whole_reply(grammar):
    name = next(name for name in SPECS if not may_think(SPECS[name].text, {}))
    assert prepare(name, grammar).grammar == grammar
    assert prepare_request(ModelRequest([], tools=TOOLS, grammar=grammar), None).grammar == grammar
