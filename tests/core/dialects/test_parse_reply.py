"""What families write by hand-checkable examples, and hostile replies, which are the policy's own failure."""

import json

import pytest
from jinja2 import Template

from reinforge.dialects.families.detection import find_thinking, opens_thinking, spell_switch
from reinforge.dialects.tool_calls import ToolFormat, parse_reply, prepare_request, read_tool_calls
from reinforge.types.request import ModelReply, ModelRequest, SamplingParams
from tests.families import SPECS

ADD = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {}, "o": {"type": "object"}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": ADD}}}]
EXAMPLES = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "2"}}\n</tool_call>',
    "qwen_xml": "</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
    "llama3": '{"name": "add", "parameters": {"a": 1, "b": "2"}}',
    "mistral_list": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "2"}, "id": "abcdefghi"}]',
    "mistral": '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1, "b": "2"}',
    "gemma": '<|tool_call>call:add{a:1,b:<|"|>2<|"|>}<tool_call|>',
    "function_gemma": "<start_function_call>call:add{a:1,b:<escape>2<escape>}<end_function_call>",
    "gemma3": "```tool_code\nadd(a=1, b='2')\n```",
    "glm": "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>"
    "<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>",
    "lfm2": '<|tool_call_start|>[add(a=1, b="2")]<|tool_call_end|>',
    "granite": '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": "2"}}]',
    "phi4": 'functools[{"name": "add", "arguments": {"a": 1, "b": "2"}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": "2"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": "2"}<｜tool▁call▁end｜>',
    "harmony": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": "2"}',
}
DEEP, DIGITS = "[" * 2000 + "]" * 2000, "7" * 5000


def parse(name, text, tools=TOOLS, **arguments):
    request = ModelRequest([], SamplingParams(seed=5), tools, **arguments)
    message = {"role": "assistant", "content": text}
    return parse_reply(ModelReply(message, "stop", None, raw_text=text), request, SPECS[name].text)


@pytest.mark.parametrize("name", SPECS)
def test_a_call_is_parsed(name):
    reply = parse(name, EXAMPLES[name])
    (call,) = reply.message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1, "b": "2"})
    assert (reply.message["content"], reply.finish_reason, reply.failure) == (None, "tool_calls", None)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("value", [DEEP, DIGITS, "1e400", "NaN", "{"], ids=["deep", "digits", "large", "nan", "broken"])
def test_a_hostile_value_is_the_policys_failure_and_stays_text(name, value):
    before, after = EXAMPLES[name].split("1", 1)
    reply = parse(name, f"{before}{value}{after}")
    assert reply.failure.startswith("the model wrote a tool call that cannot be parsed: ")
    assert "tool_calls" not in reply.message
    assert value[:100] in reply.message["content"]


@pytest.mark.parametrize("name", SPECS)
def test_half_a_surrogate_is_the_policys_failure(name):
    text = EXAMPLES[name].replace('"2"', r'"\ud800"').replace("'2'", r"'\ud800'")
    if text == EXAMPLES[name]:  # its texts have no escapes
        text = text.replace("2", "\ud800")
    assert "surrogate" in parse(name, text).failure


@pytest.mark.parametrize("name", SPECS)
def test_the_last_closing_token_may_be_cut_off(name):
    closings = ("</tool_call>", "<tool_call|>", "<end_function_call>", "<|tool_call_end|>", "<｜tool▁calls▁end｜>")
    text = EXAMPLES[name]
    for closing in closings:
        text = text.removesuffix(closing)
    assert len(parse(name, text).message["tool_calls"]) == 1


@pytest.mark.parametrize("name", SPECS)
def test_text_stays_as_it_was_sampled(name):
    text = "  just words, 2 < 3 [1] {2}\n"
    text = f"<think>so</think>{text}" if name == "qwen_xml" else text
    assert parse(name, text).message["content"].strip() == "just words, 2 < 3 [1] {2}"
    if name != "qwen_xml":
        assert parse(name, text).message == {"role": "assistant", "content": text}


def test_special_tokens_are_read_from_the_raw_text():
    """`content` alone, without special tokens, would show no call."""
    request = ModelRequest([], SamplingParams(seed=5), TOOLS)
    message = {"role": "assistant", "content": '[add(a=1, b="2")]'}
    for raw in (EXAMPLES["lfm2"], None):
        reply = parse_reply(ModelReply(message, "stop", None, raw_text=raw), request, SPECS["lfm2"].text)
        assert ("tool_calls" in reply.message) == (raw is not None)


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "content"),
    [
        ("hermes", "<think>\n2+3\n</think>\n\n5", "2+3", "5"),
        ("hermes", "<think>\n\n</think>\n\n5", None, "5"),
        ("hermes", "2+3</think>5", "2+3", "5"),  # the prompt had opened it
        ("hermes", "<think>\n2+", "2+", ""),  # cut off
        ("hermes", "5 <think> 6 </think>", None, "5 <think> 6 </think>"),
        ("qwen_xml", "2+3\n</think>\n\n5", "2+3", "5"),
        ("qwen_xml", "2+", "2+", ""),
        ("mistral", "[THINK]2+3[/THINK]5", "2+3", "5"),
        ("gemma", "<|channel>thought\n2+3\n<channel|>5", "2+3", "5"),
        ("deepseek_v31", "5", None, "5"),
        (
            "harmony",
            "<|channel|>analysis<|message|>2+3<|end|><|start|>assistant<|channel|>final<|message|>5",
            "2+3",
            "5",
        ),
        ("llama3", "<think>2</think>5", None, "<think>2</think>5"),  # no word of it in the template
    ],
)
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "no tools"])
def test_reasoning_is_separated_from_the_answer(name, text, reasoning, content, tools):
    message = parse(name, text, tools).message
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_a_switched_off_reasoning_does_not_take_the_answer():
    assert opens_thinking(SPECS["qwen_xml"].text, {})
    reply = parse("qwen_xml", "5", template_kwargs={"enable_thinking": False})
    assert reply.message == {"role": "assistant", "content": "5"}


DEEPSEEK = """{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ messages[0].content }}
{%- if add_generation_prompt %}{{ '<think>' if thinking else '</think>' }}{% endif %}"""


@pytest.mark.parametrize(
    ("switch", "thinks"), [({}, False), ({"enable_thinking": True}, True), ({"thinking": True}, True)]
)
def test_a_model_that_thinks_only_if_it_is_asked_to(switch, thinks):
    """The template of DeepSeek V3.1 calls its switch `thinking`."""
    assert opens_thinking(DEEPSEEK, switch) is thinks
    prompt = Template(DEEPSEEK).render(messages=[{"content": ""}], add_generation_prompt=True, **spell_switch(switch))
    assert prompt == ("<think>" if thinks else "</think>")
    reply = ModelReply({"role": "assistant", "content": "b" if not thinks else "a</think>b"}, "stop", None)
    message = parse_reply(reply, ModelRequest([], template_kwargs=switch), DEEPSEEK).message
    assert (message["content"], message.get("reasoning_content")) == ("b", "a" if thinks else None)


def test_a_template_without_tools_may_think():
    template = "{{ messages }}{% if add_generation_prompt %}<a>{% endif %}{# </think> #}"
    assert find_thinking(template) is not None
    reply = ModelReply({"role": "assistant", "content": "<think>a</think>b"}, "stop", None)
    message = parse_reply(reply, ModelRequest([]), template).message
    assert message == {"role": "assistant", "content": "b", "reasoning_content": "a"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("5", 5), ("[1]", [1]), ("True", True), ("None", None), ("blue", "blue"), ("[blue", "[blue"), ('"5"', "5")],
)
def test_a_value_without_a_declared_type_is_json_if_it_can_be(text, value):
    call = f"<function=add>\n<parameter=c>\n{text}\n</parameter>\n</function>"
    (found,) = read_tool_calls(call, ToolFormat.QWEN_XML, TOOLS).calls
    assert found == ("add", {"c": value})


def test_calls_that_the_template_ignores_become_text():
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "2"}'}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "So:", "tool_calls": [call]}]
    prepared = prepare_request(ModelRequest(messages, tools=TOOLS), SPECS["gemma3"].text)
    assert prepared.messages[1]["content"] == 'So:\n[add(a=1, b="2")]'
    assert messages[1]["content"] == "So:"
    assert prepare_request(ModelRequest(messages, tools=TOOLS), SPECS["lfm2"].text).messages is messages


def test_raw_prompts_are_not_parsed():
    assert "tool_calls" not in parse("hermes", EXAMPLES["hermes"], prompt="Once").message


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_calls_of_one_conversation_have_different_ids_though_an_agent_gives_one_seed(name):
    messages, ids = [], []
    for _ in range(3):
        request = ModelRequest(messages, SamplingParams(seed=7), TOOLS)
        text = EXAMPLES[name]
        reply = ModelReply({"role": "assistant", "content": text}, "stop", None, raw_text=text)
        message = parse_reply(reply, request, SPECS[name].text).message
        ids += [call["id"] for call in message["tool_calls"]]
        messages = [*messages, message, {"role": "tool", "tool_call_id": ids[-1], "content": "3"}]
    assert len(set(ids)) == 3
    assert ids[0] == "call-7-0" or len(ids[0]) == 9
