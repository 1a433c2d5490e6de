"""`tool_choice` as a grammar, in each family's own format, over tokenizers with its special tokens and without."""

import llguidance
import pytest

from reinforge.dialects.families.detection import find_family, opens_thinking
from reinforge.dialects.tool_calls import build_tool_grammar, parse_reply, prepare_request
from reinforge.engine.sampling.grammar import bind_markers
from reinforge.types.request import Grammar, ModelReply, ModelRequest
from tests.families import SPECS
from tests.models import make_tokenizer

ADD = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": "string"},
        "c": {"type": "boolean"},
        "d": {"type": "array", "items": {"type": "string"}},
        "e": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    },
    "required": ["a", "b"],
}
LOOK = {"type": "object", "properties": {"at": {"enum": ["sky", "sea"]}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in {"add": ADD, "look": LOOK}.items()
]
FULL = ("add", {"a": -5, "b": 'x "y" <z> ü', "c": True, "d": ["q"], "e": {"x": 1.5}})
SHORT, OTHER = ("add", {"a": 0, "b": ""}), ("look", {"at": "sky"})
SPECIAL = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]",
    "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>thought", "<channel|>", "<start_function_call>",
    "<end_function_call>", "<escape>", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call|>", "<|channel|>",
    "<|message|>", "<|start|>", "<|constrain|>", "<|call|>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)  # fmt: skip
UNMARKED = ("llama3", "gemma3")  # nothing marks the start of their calls


@pytest.fixture(scope="module", params=[False, True], ids=["markers are text", "markers are tokens"])
def vocabulary(request):
    from tokenizers import AddedToken

    backend = make_tokenizer().backend_tokenizer
    if request.param:
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    added = {token.content: number for number, token in backend.get_added_tokens_decoder().items()}
    return backend, llguidance.LLTokenizer(backend.to_str(), n_vocab=backend.get_vocab_size()), added


def accepts(vocabulary, name, choice, text, *, parallel=True, tools=TOOLS):
    backend, tokenizer, added = vocabulary
    grammar = build_tool_grammar(SPECS[name].text, tools, choice, parallel)
    if grammar is None:
        return True
    return matches(backend, tokenizer, grammar, text, added)


def matches(backend, tokenizer, grammar, text, added):
    """Returns True if a text may be all of a reply under a grammar."""
    body = bind_markers(grammar.text, added) if grammar.kind == "lark" else grammar.text
    matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from(grammar.kind, body))
    assert not matcher.is_error(), matcher.get_error()
    ids = backend.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def thought(name):
    return "so\n</think>\n\n" if opens_thinking(SPECS[name].text, {}) else ""


@pytest.mark.parametrize("name", SPECS)
def test_required_and_named_choices_allow_calls_of_these_tools_only(vocabulary, name):
    family, before = find_family(SPECS[name].text), thought(name)
    full, short, other = (before + family.write([call]) for call in (FULL, SHORT, OTHER))
    for text in (full, short, other):
        assert accepts(vocabulary, name, "required", text)
    assert accepts(vocabulary, name, "look", other)
    assert not accepts(vocabulary, name, "look", full)
    assert not accepts(vocabulary, name, "required", f"{before}just text")
    assert not accepts(vocabulary, name, "required", before + family.write([("add", {"a": "no number", "b": ""})]))
    assert not accepts(vocabulary, name, "required", before + family.write([("fly", {})]))


@pytest.mark.parametrize("name", SPECS)
def test_parallel_calls_can_be_refused(vocabulary, name):
    family, before = find_family(SPECS[name].text), thought(name)
    one, two = (before + family.write(calls) for calls in ([FULL], [FULL, OTHER]))
    assert accepts(vocabulary, name, "required", two) is SPECS[name].parallel
    assert not accepts(vocabulary, name, "required", two, parallel=False)
    if name not in (*UNMARKED, "harmony"):
        assert accepts(vocabulary, name, "auto", one, parallel=False)
        assert accepts(vocabulary, name, "auto", "hello", parallel=False)
        assert not accepts(vocabulary, name, "auto", family.write([FULL, OTHER]), parallel=False)


@pytest.mark.parametrize("name", [name for name in SPECS if name not in (*UNMARKED, "harmony")])
def test_the_choice_none_allows_text_but_no_call(vocabulary, name):
    assert accepts(vocabulary, name, "none", "hello [ < you")
    assert not accepts(vocabulary, name, "none", find_family(SPECS[name].text).write([OTHER]))


def test_harmony_answers_on_its_final_channel_if_no_call_is_allowed(vocabulary):
    final = "<|channel|>final<|message|>hello"
    assert accepts(vocabulary, "harmony", "none", final)
    thinking = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{final}"
    assert accepts(vocabulary, "harmony", "none", thinking)
    assert not accepts(vocabulary, "harmony", "none", find_family(SPECS["harmony"].text).write([OTHER]))


def test_reasoning_may_come_before_a_forced_call(vocabulary):
    call = find_family(SPECS["hermes"].text).write([OTHER])
    assert accepts(vocabulary, "hermes", "required", f"<think>\nhm\n</think>\n\n{call}")
    assert accepts(vocabulary, "hermes", "required", call)


def test_a_forced_call_may_have_the_line_breaks_of_its_template_or_none(vocabulary):
    """A model that was trained without them would be forced off its own format, and goes astray."""
    call = '{"name": "look", "arguments": {"at": "sky"}}'
    for text in (f"<tool_call>{call}</tool_call>", f"<tool_call>\n{call}\n</tool_call>"):
        assert accepts(vocabulary, "hermes", "required", text)
        assert accepts(vocabulary, "hermes", "required", text * 2)
        assert accepts(vocabulary, "hermes", "required", f"{text}\n{text}")
        assert not accepts(vocabulary, "hermes", "required", text * 2, parallel=False)


@pytest.mark.parametrize("line_break", ["\n", ""])
def test_glm_may_write_its_arguments_on_the_same_line(vocabulary, line_break):
    call = f"{thought('glm')}<tool_call>look{line_break}<arg_key>at</arg_key><arg_value>sky</arg_value></tool_call>"
    assert accepts(vocabulary, "glm", "required", call)


@pytest.mark.parametrize("name", SPECS)
def test_with_the_choice_none_a_call_stays_text(name):
    text = thought(name) + find_family(SPECS[name].text).write([OTHER])
    request = ModelRequest([], tools=TOOLS, tool_choice="none")
    reply = parse_reply(ModelReply({"role": "assistant", "content": text}, "stop", None), request, SPECS[name].text)
    assert "tool_calls" not in reply.message
    assert "look" in reply.message["content"]


def test_what_cannot_be_enforced_is_refused_by_name():
    text = SPECS["hermes"].text
    with pytest.raises(ValueError, match="there is no tool 'fly' in this request; its tools: add, look"):
        build_tool_grammar(text, TOOLS, "fly", True)
    with pytest.raises(ValueError, match="tool_choice='required' cannot be enforced: the chat template shows no known"):
        build_tool_grammar("{{ messages }}", TOOLS, "required", True)
    untyped = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}}}}}]
    with pytest.raises(ValueError, match=r"a call of f\.x cannot be forced"):
        build_tool_grammar(SPECS["gemma"].text, untyped, "required", True)


def test_a_request_gets_the_grammar_of_its_choice_and_keeps_its_own():
    text, own = SPECS["hermes"].text, Grammar("regex", "a+")
    assert prepare_request(ModelRequest([], tools=TOOLS), text).grammar is None
    assert prepare_request(ModelRequest([], tools=TOOLS, tool_choice="required"), text).grammar.kind == "lark"
    assert prepare_request(ModelRequest([], tools=TOOLS, tool_choice="required", grammar=own), text).grammar is own
    assert prepare_request(ModelRequest([], tool_choice="required"), text).grammar is None
